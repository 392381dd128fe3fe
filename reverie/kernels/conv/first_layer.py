"""The encoder's first layer (convolution, max-pool, norm, SiLU) as one forward kernel
and one backward kernel.

The layer has few input channels and the largest feature map of the network, so memory
bandwidth limits it: separate kernels for convolution and pooling would exchange a
tensor four times as large as the output. Here a program gathers the neighborhoods of
its half-resolution pixels, multiplies them with the kernels of all sub-pixels
(`space_to_depth.py`), keeps the maximum, and applies norm and activation. Images get no
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.conv.max_pool import allocate_pooled, load_pooled, output_offset
from reverie.kernels.launch import (
    apply_autograd,
    block_size,
    jit,
    num_programs,
    supports_large_tiles,
)
from reverie.kernels.norm.rms_norm import load_affine, norm_silu, norm_silu_backward
from reverie.kernels.sums import sum_partials

INPUTS = 16
"""Input channels: four sub-pixels of up to four colors, zero-padded. In the kernels, J
is this number and `j` the index of a channel."""
MAX_UNITS = 32
"""Maximum number of output channels for which this is faster than separate convolution
and pooling; gradients of more do not fit into registers. Forward and backward with 32
channels take 0.61 ms on an H200 (separately 0.72 ms), with 64 channels 2.2 ms (1.3)."""
ROWS = 128
"""Half-resolution pixels of one tile."""


def is_supported(colors: int, units: int, like: Tensor) -> bool:
    """True if these kernels support the layer for the dtype and device of `like`.

    They need half precision and large tiles.
    """
    half = like.dtype in (torch.bfloat16, torch.float16)
    fits = 4 * colors <= INPUTS and units <= MAX_UNITS
    return half and fits and supports_large_tiles(like.device)


def first_layer(
    x: Float[Tensor, "n h w 16"],
    kernel: Float[Tensor, "o 16 3 3"],
    scale: Float[Tensor, " C"],
    eps: float,
    bias: Float[Tensor, " C"],
    *,
    to_depth: bool,
) -> Float[Tensor, "n h2 w2 c2"]:
    """Convolve a space-to-depth image; then pool, normalize and activate.

    With `to_depth`, the output is a space-to-depth map.
    """
    return apply_autograd(_FirstLayer, kernel, scale, bias, x, eps, to_depth)


class _FirstLayer(torch.autograd.Function):
    """Convolution, max-pooling, norm and SiLU; see `first_layer`."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Tensor,
        scale: Tensor,
        bias: Tensor,
        x: Tensor,
        eps: float,
        to_depth: bool,
    ) -> Tensor:
        n, h, w, _ = x.shape
        channels, rows = len(scale), n * h * w
        matrix = kernel.permute(0, 2, 3, 1).contiguous()  # (4 C, 3, 3, 16)
        y = x.new_empty(n, h, w, channels)
        pooled, argmax = allocate_pooled(ctx, y)
        if n:
            tiles = triton.cdiv(rows, ROWS)
            programs = num_programs(x.device, tiles, per_sm=8)
            _forward[(programs,)](
                *(x, matrix, bias, scale, y, pooled, argmax),
                *(rows, h, w, channels, eps, to_depth, triton.cdiv(tiles, programs)),
                *(ROWS, block_size(channels), INPUTS, _needs_int64(x)),
                num_warps=4,
                num_stages=2,
            )
        ctx.save_for_backward(x, pooled, argmax, scale, bias)
        ctx.eps, ctx.to_depth = eps, to_depth
        return y.view(n, h // 2, w // 2, -1) if to_depth else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, pooled, argmax, scale, bias = ctx.saved_tensors
        n, h, w, channels = pooled.shape
        tiles = triton.cdiv(n * h * w, ROWS)
        programs = num_programs(x.device, tiles, per_sm=2)
        dmatrix = torch.empty(programs, 4 * channels, 9 * INPUTS, device=x.device)
        partial = torch.empty(programs, 2, channels, device=x.device)
        _backward[(programs,)](
            *(x, pooled, argmax, bias, scale, grad.contiguous(), dmatrix, partial),
            *(n * h * w, h, w, channels, ctx.eps, ctx.to_depth),
            *(triton.cdiv(tiles, programs), ROWS, block_size(channels), INPUTS),
            _needs_int64(x),
            num_warps=8,
            num_stages=1,
        )
        dkernel = sum_partials(dmatrix).view(4 * channels, 3, 3, INPUTS)
        dscale, dbias = sum_partials(partial)
        return (
            dkernel.permute(0, 3, 1, 2).to(x.dtype),
            *(dscale.to(scale.dtype), dbias.to(bias.dtype), None, None, None),
        )


def _needs_int64(x: Tensor) -> bool:
    """True if offsets in `x` need 64 bits, which are slower to compute."""
    return x.numel() >= 2**31


@jit
def _neighbor(x, row, tap, j, rows, h, w, J: tl.constexpr, INT64: tl.constexpr):
    """Load channel `j` of the neighbor at a tap of the 3x3 kernel; zero outside."""
    down, right = tap // 3 - 1, tap % 3 - 1
    pixel_y, pixel_x = row // w % h + down, row % w + right
    mask = (pixel_y >= 0) & (pixel_y < h) & (pixel_x >= 0) & (pixel_x < w)
    mask = mask & (row < rows)
    pixel = row + down * w + right
    if INT64:
        pixel = pixel.to(tl.int64)
    return tl.load(x + pixel * J + j, mask, 0.0)


@jit
def _neighborhood(x, row, rows, h, w, J: tl.constexpr, INT64: tl.constexpr):
    """Load the first eight taps as one tile and the ninth as another.

    Triton needs tile widths that are powers of two. `J` is the number of input
    channels.
    """
    k, j = tl.arange(0, 8 * J)[None, :], tl.arange(0, J)[None, :]
    eight = _neighbor(x, row, k // J, k % J, rows, h, w, J, INT64)
    return eight, _neighbor(x, row, 8, j, rows, h, w, J, INT64)


@jit
def _load_matrix(matrix, channels, C: tl.constexpr, J: tl.constexpr):
    """Load the kernels of all sub-pixels as columns: eight taps, and the ninth."""
    k = tl.arange(0, 4 * C)[None, :]
    sub, col = k // C, k % C
    ptr = matrix + (sub * channels + col) * (9 * J)
    eight = tl.load(ptr + tl.arange(0, 8 * J)[:, None], col < channels, 0.0)
    ninth = tl.load(ptr + 8 * J + tl.arange(0, J)[:, None], col < channels, 0.0)
    return eight, ninth


@jit
def _sub_pixels(value, R: tl.constexpr, C: tl.constexpr):
    """Split columns into the outputs of the four sub-pixels."""
    value = tl.permute(tl.reshape(value, (R, 2, 2, C)), (0, 3, 1, 2))
    left, right = tl.split(value)
    first, third = tl.split(left)
    second, fourth = tl.split(right)
    return first, second, third, fourth


@jit
def _update_max(best, index, other, sub: tl.constexpr):
    """Return the maximum of `best` and `other`, and the sub-pixel that it came from."""
    index = tl.where(other > best, sub, index)
    return tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL), index


@jit
def _forward(
    x, matrix, bias, scale, out, pooled, argmax, rows,
    h: tl.constexpr, w: tl.constexpr, channels: tl.constexpr, eps,
    TO_DEPTH: tl.constexpr, STEPS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, J: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Convolve, pool, normalize and activate; `matrix` has one row per output channel.

    Names with `eight` and `ninth` are the first eight and the last tap of the kernel.
    """
    col, gain, biases = load_affine(scale, bias, C, channels)
    # one product for all sub-pixels, because tensor cores are faster on wide matrices
    matrix_eight, matrix_ninth = _load_matrix(matrix, channels, C, J)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * R + tl.arange(0, R)[:, None]
        eight, ninth = _neighborhood(x, row, rows, h, w, J, INT64)
        value = tl.dot(ninth, matrix_ninth, tl.dot(eight, matrix_eight))
        best, second, third, fourth = _sub_pixels(value, R, C)
        index = tl.zeros((R, C), tl.int32)
        best, index = _update_max(best, index, second, 1)
        best, index = _update_max(best, index, third, 2)
        best, index = _update_max(best, index, fourth, 3)
        best = best.to(matrix.dtype.element_ty)
        mask = (row < rows) & (col < channels)
        if pooled is not None:
            offset = row.to(tl.int64) * channels + col
            tl.store(pooled + offset, best, mask)
            tl.store(argmax + offset, index.to(tl.uint8), mask)
        y = norm_silu(best.to(tl.float32) + biases, gain, channels, eps)
        tl.store(out + output_offset(row, w, channels, TO_DEPTH) + col, y, mask)


@jit
def _add_grad(eight, ninth, dv, index, sub, sum_eight, sum_ninth):
    """Add the gradient of one sub-pixel's kernel.

    Only half-resolution pixels whose maximum is this sub-pixel contribute.
    """
    g = tl.where(index == sub, dv, 0.0)
    return tl.dot(eight, g, sum_eight), tl.dot(ninth, g, sum_ninth)


@jit
def _store_grad(ptr, sum_eight, sum_ninth, mask, J: tl.constexpr):
    """Store the gradient of one sub-pixel's kernel."""
    tl.store(ptr + tl.arange(0, 8 * J)[:, None], sum_eight, mask)
    tl.store(ptr + 8 * J + tl.arange(0, J)[:, None], sum_ninth, mask)


@jit
def _backward(
    x, pooled, argmax, bias, scale, dy, dmatrix, partial, rows, h, w, channels, eps,
    TO_DEPTH: tl.constexpr, STEPS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, J: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of the gradients of the kernel, scale and bias.

    `eight0` to `eight3` and `ninth0` to `ninth3` are the sums for the four sub-pixels.
    """
    col, gain, biases = load_affine(scale, bias, C, channels)
    dscale = tl.zeros((1, C), tl.float32)
    dbias = tl.zeros((1, C), tl.float32)
    eight0, ninth0 = tl.zeros((8 * J, C), tl.float32), tl.zeros((J, C), tl.float32)
    eight1, ninth1 = tl.zeros((8 * J, C), tl.float32), tl.zeros((J, C), tl.float32)
    eight2, ninth2 = tl.zeros((8 * J, C), tl.float32), tl.zeros((J, C), tl.float32)
    eight3, ninth3 = tl.zeros((8 * J, C), tl.float32), tl.zeros((J, C), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * R + tl.arange(0, R)[:, None]
        v, index, dv, _ = load_pooled(
            pooled, argmax, dy, biases, row, col, rows, w, channels, TO_DEPTH
        )
        eight, ninth = _neighborhood(x, row, rows, h, w, J, INT64)
        eight, ninth = tl.trans(eight), tl.trans(ninth)
        dv, dgain = norm_silu_backward(v, dv, gain, channels, eps)
        dscale += tl.sum(dgain, 0)[None, :]
        dbias += tl.sum(dv, 0)[None, :]
        dv = dv.to(pooled.dtype.element_ty)
        eight0, ninth0 = _add_grad(eight, ninth, dv, index, 0, eight0, ninth0)
        eight1, ninth1 = _add_grad(eight, ninth, dv, index, 1, eight1, ninth1)
        eight2, ninth2 = _add_grad(eight, ninth, dv, index, 2, eight2, ninth2)
        eight3, ninth3 = _add_grad(eight, ninth, dv, index, 3, eight3, ninth3)
    size: tl.constexpr = 9 * J
    mask = col < channels
    ptr = dmatrix + (tl.program_id(0) * 4 * channels + col) * size
    _store_grad(ptr, eight0, ninth0, mask, J)
    _store_grad(ptr + channels * size, eight1, ninth1, mask, J)
    _store_grad(ptr + 2 * channels * size, eight2, ninth2, mask, J)
    _store_grad(ptr + 3 * channels * size, eight3, ninth3, mask, J)
    ptr = partial + tl.program_id(0) * 2 * channels + col
    tl.store(ptr, dscale, mask)
    tl.store(ptr + channels, dbias, mask)
