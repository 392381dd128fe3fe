"""Sums over rows, and over the partial sums that the programs of a kernel wrote.

Each program writes one partial sum, so no atomics are needed and results are bitwise
reproducible. PyTorch's reduction is slow for many short rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import jit, num_programs

ROWS, COLUMNS = 512, 16
"""Rows and columns of a tile in `sum_partials`."""
TILE = 4096
"""Elements per tile in `sum_rows`."""


def sum_rows(x: Float[Tensor, "R C"]) -> Float[Tensor, " C"]:
    """Return the float32 sum over rows; the number of columns is a power of two."""
    rows, width = x.shape
    block_rows = max(1, TILE // width)
    tiles = triton.cdiv(rows, block_rows)
    programs = num_programs(x.device, tiles, per_sm=8)
    partial = x.new_empty(programs, width, dtype=torch.float32)
    _sum_rows[(programs,)](
        x.contiguous(), partial, rows, triton.cdiv(tiles, programs), width, block_rows
    )
    return sum_partials(partial)


def sum_partials(partial: Float[Tensor, " p *shape"]) -> Float[Tensor, "*shape"]:
    """Return the float32 sum over the first axis, which has one entry per program."""
    count, width = len(partial), partial[0].numel()
    total = torch.empty(partial.shape[1:], device=partial.device)
    grid, steps = (triton.cdiv(width, COLUMNS),), triton.cdiv(count, ROWS)
    _sum_partials[grid](partial, total, count, width, steps, ROWS, COLUMNS, num_warps=8)
    return total


@jit
def _sum_rows(
    x, partial, rows, STEPS: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr
):
    col = tl.arange(0, WIDTH)
    sums = tl.zeros((R, WIDTH), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile.to(tl.int64) * R + tl.arange(0, R)[:, None]
        offset = row * WIDTH + col[None, :]
        sums += tl.load(x + offset, row < rows, 0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0) * WIDTH + col, tl.sum(sums, 0))


@jit
def _sum_partials(
    partial, total, count, width,
    STEPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    sums = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        row = step * R + tl.arange(0, R)[:, None]
        mask = (row < count) & (col < width)
        sums += tl.load(partial + row.to(tl.int64) * width + col, mask, 0.0)
    col = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(total + col, tl.sum(sums, 0), col < width)
