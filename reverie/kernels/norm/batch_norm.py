"""Batch norm with ELU for channels-last feature maps.

Forward and backward pass have two kernels each: one sums over all pixels, the other
applies the norm or computes the gradient. Only the input is saved; the backward kernels
recompute the activation from it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from reverie.kernels.launch import apply_autograd, jit, num_programs
from reverie.kernels.norm.group_norm_kernels import store_pair
from reverie.kernels.norm.rms_norm import store_column_sums
from reverie.kernels.sums import sum_partials

TILE = 4096
"""Elements of a tile."""
WARPS = 8
"""Warps of a program."""
MAX_CHANNELS = 1024
"""Maximum number of channels; a tile has all channels of its pixels."""
PROGRAMS_PER_SM = 8
"""Maximum number of programs per multiprocessor (SM)."""


def batch_norm_elu(
    x: Float[Tensor, "n c h w"], norm: nn.BatchNorm2d, bias: Tensor | None
) -> Float[Tensor, "n c h w"]:
    """Return `elu(norm(x + bias))` in training mode; update the running statistics.

    The norm subtracts the mean, so a bias before it affects only the running mean: it
    is not added to `x`, and its gradient is zero.
    """
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    return apply_autograd(_BatchNormELU, x, norm.weight, norm.bias, bias, norm)


class _BatchNormELU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        bias: Tensor | None,
        norm: nn.BatchNorm2d,
    ) -> Tensor:
        x = x.permute(0, 2, 3, 1).contiguous()
        activation, (grid, sizes) = torch.empty_like(x), _tiling(x)
        sums = x.new_empty(*grid, 2, x.shape[-1], dtype=torch.float32)
        stats = torch.empty_like(sums[0])
        _sum[grid](x, sums, *sizes, num_warps=WARPS)
        running = (norm.running_mean, norm.running_var, norm.momentum, norm.eps)
        _apply[grid](
            *(x, sum_partials(sums), scale, shift, bias, stats, *running, activation),
            *sizes,
            num_warps=WARPS,
        )
        ctx.save_for_backward(x, stats, scale, shift)
        ctx.has_bias = bias is not None
        return activation.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, stats, scale, shift = ctx.saved_tensors
        dx, (grid, sizes) = torch.empty_like(x), _tiling(x)
        sums = x.new_empty(*grid, 2, x.shape[-1], dtype=torch.float32)
        saved = (x, grad.permute(0, 2, 3, 1).contiguous(), stats, scale, shift)
        _sum_backward[grid](*saved, sums, *sizes, num_warps=WARPS)
        total = sum_partials(sums)
        _apply_backward[grid](*saved, total, dx, *sizes, num_warps=WARPS)
        dbias = torch.zeros_like(scale) if ctx.has_bias else None
        return dx.permute(0, 3, 1, 2), total[1], total[0], dbias, None


def _tiling(x: Tensor) -> tuple[tuple[int], tuple[int, ...]]:
    """Return the grid of the kernels and their size arguments.

    The size arguments are the pixels of `x`, the tiles per program (`steps`), the
    channels (`C`), and the pixels per tile (`R`).
    """
    channels = x.shape[-1]
    pixels, block_pixels = x.numel() // channels, max(1, TILE // channels)
    tiles = triton.cdiv(pixels, block_pixels)
    steps = triton.cdiv(tiles, num_programs(x.device, tiles, PROGRAMS_PER_SM))
    return (triton.cdiv(tiles, steps),), (pixels, steps, channels, block_pixels)


@jit
def _tile(i, pixels, steps, col, C: tl.constexpr, R: tl.constexpr):
    """Return the offsets of tile `i` of this program, and a mask of valid pixels.

    A program has `steps` tiles, and a tile has R pixels with C channels each.
    """
    tile = tl.program_id(0) * steps + i
    row = (tile * R + tl.arange(0, R)[:, None]).to(tl.int64)
    return row * C + col[None, :], (row < pixels) & (col < C)[None, :]


@jit
def _load_norm(stats, scale, shift, col, C: tl.constexpr):
    """Return mean, rstd, and the factor and intercept of the norm.

    The output of the norm is `factor * x + intercept`.
    """
    mean, rstd = tl.load(stats + col), tl.load(stats + C + col)
    factor = tl.load(scale + col) * rstd
    return mean, rstd, factor, tl.load(shift + col) - mean * factor


@jit
def _load_normed(x, dy, offset, mask, mean, rstd, factor, intercept):
    """Return the normalized input, and the gradient of the norm's output.

    `dy` is the gradient of the ELU's output.
    """
    v = tl.load(x + offset, mask, 0.0).to(tl.float32)
    y = v * factor[None, :] + intercept[None, :]
    d = tl.load(dy + offset, mask, 0.0).to(tl.float32)
    d *= tl.where(y > 0, 1.0, tl.exp(tl.minimum(y, 0.0)))
    return (v - mean[None, :]) * rstd[None, :], d


@jit
def _sum(x, sums, pixels, steps, C: tl.constexpr, R: tl.constexpr):
    """Sum the differences from the first pixel and their squares.

    Squares of the values themselves would lose precision if the mean is large.
    """
    col = tl.arange(0, C)
    origin = tl.load(x + col).to(tl.float32)
    total = tl.zeros((R, C), tl.float32)
    square = tl.zeros((R, C), tl.float32)
    for i in range(steps):
        offset, mask = _tile(i, pixels, steps, col, C, R)
        v = tl.load(x + offset, mask, 0.0).to(tl.float32)
        v = tl.where(mask, v - origin[None, :], 0.0)
        total += v
        square += v * v
    store_column_sums(sums, total, square, C, C)


@jit
def _apply(
    x, sums, scale, shift, bias, stats, running_mean, running_var, momentum, eps, out,
    pixels, steps, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Apply norm and ELU. The first program also writes the batch statistics to `stats`
    and updates the running statistics."""
    col = tl.arange(0, C)
    mean = tl.load(sums + col) / pixels
    var = tl.maximum(tl.load(sums + C + col) / pixels - mean * mean, 0.0)
    mean += tl.load(x + col).to(tl.float32)
    rstd = 1 / tl.sqrt(var + eps)
    if tl.program_id(0) == 0:
        store_pair(stats + col, mean, rstd, C)
        batch_mean = mean
        if bias is not None:
            batch_mean += tl.load(bias + col)
        old = tl.load(running_mean + col)
        tl.store(running_mean + col, old + momentum * (batch_mean - old))
        old = tl.load(running_var + col)
        unbiased = var * (pixels / tl.maximum(pixels - 1.0, 1.0))
        tl.store(running_var + col, old + momentum * (unbiased - old))
    factor = tl.load(scale + col) * rstd
    intercept = tl.load(shift + col) - mean * factor
    for i in range(steps):
        offset, mask = _tile(i, pixels, steps, col, C, R)
        v = tl.load(x + offset, mask, 0.0).to(tl.float32)
        v = v * factor[None, :] + intercept[None, :]
        v = tl.where(v > 0, v, tl.exp(tl.minimum(v, 0.0)) - 1)
        tl.store(out + offset, v.to(out.dtype.element_ty), mask)


@jit
def _sum_backward(
    x, dy, stats, scale, shift, sums, pixels, steps, C: tl.constexpr, R: tl.constexpr
):
    """Compute this program's partial sums of the gradients of shift and scale."""
    col = tl.arange(0, C)
    mean, rstd, factor, intercept = _load_norm(stats, scale, shift, col, C)
    dshift = tl.zeros((R, C), tl.float32)
    dscale = tl.zeros((R, C), tl.float32)
    for i in range(steps):
        offset, mask = _tile(i, pixels, steps, col, C, R)
        v, d = _load_normed(x, dy, offset, mask, mean, rstd, factor, intercept)
        dshift += d
        dscale += d * v
    store_column_sums(sums, dshift, dscale, C, C)


@jit
def _apply_backward(
    x, dy, stats, scale, shift, sums, dx,
    pixels, steps, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the input. `sums` has the gradients of shift and scale,
    which are sums over all pixels."""
    col = tl.arange(0, C)
    mean, rstd, factor, intercept = _load_norm(stats, scale, shift, col, C)
    mean_d, mean_dv = tl.load(sums + col) / pixels, tl.load(sums + C + col) / pixels
    for i in range(steps):
        offset, mask = _tile(i, pixels, steps, col, C, R)
        v, d = _load_normed(x, dy, offset, mask, mean, rstd, factor, intercept)
        d = factor[None, :] * (d - mean_d[None, :] - v * mean_dv[None, :])
        tl.store(dx + offset, d.to(dx.dtype.element_ty), mask)
