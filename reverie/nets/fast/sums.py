"""The second half of a sum over rows: adding what every program has summed up.

Programs that each keep their own partial sum need no atomics, so results are the same
to the bit in every run. The library's reduction is slow for many short rows.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

ROWS, COLUMNS = 512, 16


def add_up(partial: Float[Tensor, "*any"]) -> Float[Tensor, "*rest"]:
    """The sum over the first axis."""
    count, width = len(partial), partial[0].numel()
    total = torch.empty(partial.shape[1:], device=partial.device)
    grid, steps = (triton.cdiv(width, COLUMNS),), triton.cdiv(count, ROWS)
    _add_up[grid](partial, total, count, width, steps, ROWS, COLUMNS, num_warps=8)
    return total


@triton.jit
@no_type_check
def _add_up(
    partial,
    total,
    count,
    width,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    col = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    sums = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        row = step * R + tl.arange(0, R)[:, None]
        inside = (row < count) & (col < width)
        sums += tl.load(partial + row.to(tl.int64) * width + col, inside, 0.0)
    col = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(total + col, tl.sum(sums, 0), col < width)
