"""2 x 2 max-pooling, bias, RMS norm and SiLU in one pass over a convolution's output.

Input and output are plain feature maps or space-to-depth maps (`space_to_depth.py`).
The pooled values and the positions of the maxima (0 to 3, left to right and top to
bottom) are saved for the backward pass. Of equal values, the first one is the maximum,
as in PyTorch.

In the kernels, `row` is the index of a pooled pixel in the batch, `col` a channel, and
`width` the width of the pooled map; a tile has R rows and C columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.conv.space_to_depth import space_to_depth_index
from reverie.kernels.launch import apply_autograd, jit, num_programs, tile_shape
from reverie.kernels.norm.rms_norm import (
    load_affine,
    norm_silu,
    norm_silu_backward,
    store_column_sums,
)
from reverie.kernels.sums import sum_partials


def max_pool_rms_norm_silu(
    x: Float[Tensor, "b h w c"],
    scale: Float[Tensor, " C"],
    eps: float,
    bias: Float[Tensor, " C"],
    *,
    from_depth: bool,
    to_depth: bool,
) -> Float[Tensor, "b h2 w2 c2"]:
    """Return `silu(rms_norm(max_pool(x) + bias) * scale)`.

    With `from_depth`, the input is a space-to-depth map; with `to_depth`, the output.
    """
    return apply_autograd(_MaxPool, x, scale, bias, eps, from_depth, to_depth)


class _MaxPool(torch.autograd.Function):
    """Max-pooling, bias, RMS norm and SiLU; see `max_pool_rms_norm_silu`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        bias: Tensor,
        eps: float,
        from_depth: bool,
        to_depth: bool,
    ) -> Tensor:
        x, channels = x.contiguous(), len(scale)
        b, h, w, _ = x.shape
        if not from_depth:
            h, w = h // 2, w // 2
        y = x.new_empty(b, h, w, channels)
        pooled, argmax = allocate_pooled(ctx, y)
        rows, (block_rows, columns, warps) = b * h * w, _tile(channels)
        if rows:
            _forward[(triton.cdiv(rows, block_rows),)](
                *(x, bias, scale, y, pooled, argmax, rows, w, channels, eps),
                *(from_depth, to_depth, block_rows, columns),
                num_warps=warps,
            )
        ctx.save_for_backward(pooled, argmax, scale, bias)
        ctx.settings = eps, from_depth, to_depth
        return y.view(b, h // 2, w // 2, -1) if to_depth else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pooled, argmax, scale, bias = ctx.saved_tensors
        eps, from_depth, to_depth = ctx.settings
        b, h, w, channels = pooled.shape
        shape = (b, h, w, 4 * channels) if from_depth else (b, 2 * h, 2 * w, channels)
        dx = pooled.new_empty(shape)
        rows, (block_rows, columns, warps) = b * h * w, _tile(channels)
        tiles = triton.cdiv(rows, block_rows)
        programs = num_programs(dx.device, tiles, per_sm=8)
        partial = torch.empty(programs, 2, channels, device=dx.device)
        _backward[(programs,)](
            *(pooled, argmax, bias, scale, grad.contiguous(), dx, partial),
            *(rows, w, channels, eps, triton.cdiv(tiles, programs)),
            *(from_depth, to_depth, block_rows, columns),
            num_warps=warps,
        )
        dscale, dbias = sum_partials(partial)
        return dx, dscale.to(scale.dtype), dbias.to(bias.dtype), None, None, None


def allocate_pooled(ctx: Any, y: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the maxima and their positions; None if no gradient is needed."""
    if not any(ctx.needs_input_grad):
        return None, None
    return torch.empty_like(y), torch.empty_like(y, dtype=torch.uint8)


def _tile(channels: int) -> tuple[int, int, int]:
    """Return rows and columns of a program's tile, and its number of warps."""
    rows, columns = tile_shape(channels)
    return rows, columns, max(4, columns // 512)


@jit
def _block_offsets(row, col, width, channels, FROM_DEPTH: tl.constexpr):
    """Return the input offset of a 2 x 2 block of pixels, and the offset between its
    rows. The two pixels of a row are `channels` apart in both layouts.
    """
    if FROM_DEPTH:
        return row.to(tl.int64) * (4 * channels) + col, 2 * channels
    else:
        first = (row // width * (4 * width) + row % width * 2).to(tl.int64) * channels
        return first + col, 2 * width * channels


@jit
def output_offset(row, width, channels, TO_DEPTH: tl.constexpr):
    """Return the offset of the first channel of a pooled pixel in the output."""
    if TO_DEPTH:
        row = space_to_depth_index(row, width)
    return row.to(tl.int64) * channels


@jit
def _forward(
    x, bias, scale, y, pooled, argmax, rows, width, channels, eps,
    FROM_DEPTH: tl.constexpr, TO_DEPTH: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Pool, add the bias, normalize and activate R pooled pixels per program."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    col, gain, biases = load_affine(scale, bias, C, channels)
    mask = (row < rows) & (col < channels)
    offset = row.to(tl.int64) * channels + col
    upper, row_stride = _block_offsets(row, col, width, channels, FROM_DEPTH)
    lower = upper + row_stride
    x0 = tl.load(x + upper, mask, 0.0)
    x1 = tl.load(x + upper + channels, mask, 0.0)
    x2 = tl.load(x + lower, mask, 0.0)
    x3 = tl.load(x + lower + channels, mask, 0.0)
    upper_max = tl.maximum(x0, x1, propagate_nan=tl.PropagateNan.ALL)
    lower_max = tl.maximum(x2, x3, propagate_nan=tl.PropagateNan.ALL)
    maximum = tl.maximum(upper_max, lower_max, propagate_nan=tl.PropagateNan.ALL)
    if pooled is not None:
        tl.store(pooled + offset, maximum, mask)
        position = tl.where(maximum == x2, 2, 3)
        position = tl.where(maximum == x1, 1, position)
        position = tl.where(maximum == x0, 0, position)
        tl.store(argmax + offset, position.to(tl.uint8), mask)
    out = norm_silu(maximum.to(tl.float32) + biases, gain, channels, eps)
    target = output_offset(row, width, channels, TO_DEPTH) + col
    tl.store(y + target, out, mask)


@jit
def load_pooled(
    pooled, argmax, dy, biases, row, col, rows, width, channels, TO_DEPTH: tl.constexpr
):
    """Load pooled values plus bias, their positions, and the gradient of the output.

    Also return the mask of valid elements.
    """
    mask = (row < rows) & (col < channels)
    offset = row.to(tl.int64) * channels + col
    v = tl.load(pooled + offset, mask, 0.0).to(tl.float32) + biases
    position = tl.load(argmax + offset, mask, 0)
    dy_offset = output_offset(row, width, channels, TO_DEPTH) + col
    return v, position, tl.load(dy + dy_offset, mask, 0.0).to(tl.float32), mask


@jit
def _backward(
    pooled, argmax, bias, scale, dy, dx, partial, rows, width, channels, eps,
    STEPS: tl.constexpr, FROM_DEPTH: tl.constexpr, TO_DEPTH: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the input, and partial sums of those of scale and bias.

    A program handles STEPS tiles.
    """
    col, gain, biases = load_affine(scale, bias, C, channels)
    dscale = tl.zeros((R, C), tl.float32)
    dbias = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * R + tl.arange(0, R)[:, None]
        v, position, dout, mask = load_pooled(
            pooled, argmax, dy, biases, row, col, rows, width, channels, TO_DEPTH
        )
        dv, dgain = norm_silu_backward(v, dout, gain, channels, eps)
        dscale += dgain
        dv = tl.where(row < rows, dv, 0.0)
        dbias += dv
        # the pixel with the maximum gets the gradient, the other three get zero
        upper, row_stride = _block_offsets(row, col, width, channels, FROM_DEPTH)
        lower = upper + row_stride
        tl.store(dx + upper, tl.where(position == 0, dv, 0.0), mask)
        tl.store(dx + upper + channels, tl.where(position == 1, dv, 0.0), mask)
        tl.store(dx + lower, tl.where(position == 2, dv, 0.0), mask)
        tl.store(dx + lower + channels, tl.where(position == 3, dv, 0.0), mask)
    store_column_sums(partial, dscale, dbias, channels, C)
