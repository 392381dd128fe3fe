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

from reverie.kernels.launch import programs

ROWS, COLUMNS = 512, 16
TILE = 4096
"""Entries a program adds at a time."""


def sum_rows(x: Float[Tensor, "R C"]) -> Float[Tensor, " C"]:
    """The sum over rows, in float32, for a number of columns that is a power of two."""
    rows, width = x.shape
    tall = max(1, TILE // width)
    tiles = triton.cdiv(rows, tall)
    count = programs(x.device, tiles, per_processor=8)
    partial = x.new_empty(count, width, dtype=torch.float32)
    _sum_rows[(count,)](
        x.contiguous(), partial, rows, triton.cdiv(tiles, count), width, tall
    )
    return add_up(partial)


def add_up(partial: Float[Tensor, "*any"]) -> Float[Tensor, "*rest"]:
    """The sum over the first axis."""
    count, width = len(partial), partial[0].numel()
    total = torch.empty(partial.shape[1:], device=partial.device)
    grid, steps = (triton.cdiv(width, COLUMNS),), triton.cdiv(count, ROWS)
    _add_up[grid](partial, total, count, width, steps, ROWS, COLUMNS, num_warps=8)
    return total


@triton.jit
@no_type_check
def _sum_rows(
    x, partial, rows, STEPS: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr
):
    col = tl.arange(0, WIDTH)
    sums = tl.zeros((TALL, WIDTH), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile.to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
        place = row * WIDTH + col[None, :]
        sums += tl.load(x + place, row < rows, 0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0) * WIDTH + col, tl.sum(sums, 0))


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
