"""Lambda-returns in one kernel: each program loops backwards over time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import jit

ROWS = 32
"""Rows per program."""


def lambda_return(
    reward: Float[Tensor, "B T"],
    bootstrap: Float[Tensor, "B T"],
    is_last: Float[Tensor, "B T"],
    is_terminal: Float[Tensor, "B T"],
    discount: float,
    lam: float,
) -> Float[Tensor, "B T-1"]:
    """Return the same as `lambda_return` in `agents/returns.py`, without a gradient."""
    rows, steps = reward.shape
    returns = torch.empty(rows, steps - 1, device=reward.device)
    inputs = [
        x.detach().float().contiguous()
        for x in (reward, bootstrap, is_last, is_terminal)
    ]
    if returns.numel():
        grid = (triton.cdiv(rows, ROWS),)
        _lambda_return[grid](
            *inputs, returns, rows, discount, lam, steps, ROWS, num_warps=1
        )
    return returns


@jit
def _lambda_return(
    reward, bootstrap, is_last, is_terminal, returns, rows, discount, lam,
    STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the returns of ROWS sequences; `back` counts steps from the last one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    last = row * STEPS + STEPS - 1
    value = tl.load(bootstrap + last, mask, 0.0)
    for back in range(STEPS - 1):
        discounts = (1 - tl.load(is_terminal + last - back, mask, 0.0)) * discount
        trace = (1 - tl.load(is_last + last - back, mask, 0.0)) * lam
        boot = (1 - trace) * discounts * tl.load(bootstrap + last - back, mask, 0.0)
        one_step = tl.load(reward + last - back, mask, 0.0) + boot
        value = one_step + discounts * trace * value
        tl.store(returns + row * (STEPS - 1) + STEPS - 2 - back, value, mask)
