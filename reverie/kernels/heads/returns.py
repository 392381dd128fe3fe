"""Lambda-returns in one kernel: every program walks some rows from their end."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

ROWS = 32


def lambda_return(
    reward: Float[Tensor, "B T"],
    bootstrap: Float[Tensor, "B T"],
    is_last: Float[Tensor, "B T"],
    is_terminal: Float[Tensor, "B T"],
    discount: float,
    lam: float,
) -> Float[Tensor, "B T-1"]:
    """As `agents/returns.py` has it, without a gradient."""
    rows, steps = reward.shape
    returns = torch.empty(rows, steps - 1, device=reward.device)
    inputs = [
        x.detach().float().contiguous()
        for x in (reward, bootstrap, is_last, is_terminal)
    ]
    if returns.numel():
        grid = (triton.cdiv(rows, ROWS),)
        _walk[grid](*inputs, returns, rows, discount, lam, steps, ROWS, num_warps=1)
    return returns


@triton.jit
@no_type_check
def _walk(
    reward,
    bootstrap,
    is_last,
    is_terminal,
    returns,
    rows,
    discount,
    lam,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    place = row * STEPS + STEPS - 1
    value = tl.load(bootstrap + place, inside, 0.0)
    for back in range(STEPS - 1):
        live = (1 - tl.load(is_terminal + place - back, inside, 0.0)) * discount
        trace = (1 - tl.load(is_last + place - back, inside, 0.0)) * lam
        ahead = tl.load(bootstrap + place - back, inside, 0.0)
        now = tl.load(reward + place - back, inside, 0.0) + (1 - trace) * live * ahead
        value = now + live * trace * value
        tl.store(returns + row * (STEPS - 1) + STEPS - 2 - back, value, inside)
