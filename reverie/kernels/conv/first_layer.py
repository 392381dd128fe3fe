"""The encoder's first layer (convolution, pool, norm, SiLU) as one kernel each way.

It has few input channels and the largest maps of the network, so it is limited by
memory bandwidth: a convolution and a pool as two kernels would exchange four times its
output. Here a program gathers the neighbourhoods of its half-resolution pixels,
multiplies them with the kernel of every sub-pixel (`space_to_depth.py`), keeps the
largest result, and applies norm and activation. Images get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.conv.max_pool import empty_pooled, load_pooled, output_offset
from reverie.kernels.launch import apply_autograd, block_size, jit, num_programs
from reverie.kernels.norm.rms_norm import load_affine, norm_rows, norm_rows_backward
from reverie.kernels.sums import sum_partials

INPUTS = 16
"""Input channels: four sub-pixels of up to four colors, zero-padded."""
MAX_UNITS = 32
"""Most output channels for which this is faster than a convolution and a pool; the
gradients of more do not fit a program's registers. Forward and backward with 32 take
0.61 ms on an H200, against 0.72; with 64, 2.2 against 1.3."""
ROWS = 128
"""Half-resolution pixels of one tile."""


def is_supported(colors: int, units: int, dtype: torch.dtype) -> bool:
    """True if these kernels can compute the layer; they multiply in half precision."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and 4 * colors <= INPUTS and units <= MAX_UNITS


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
        pooled, argmax = empty_pooled(ctx, y)
        if n:
            tiles = triton.cdiv(rows, ROWS)
            programs = num_programs(x.device, tiles, per_sm=64)
            _forward[(programs,)](
                *(x, matrix, bias, scale, y, pooled, argmax),
                *(rows, h, w, channels, eps, to_depth, triton.cdiv(tiles, programs)),
                *(ROWS, block_size(channels), INPUTS),
                num_warps=8,
                num_stages=1,
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
            num_warps=8,
            num_stages=1,
        )
        dkernel = sum_partials(dmatrix).view(4 * channels, 3, 3, INPUTS)
        dscale, dbias = sum_partials(partial)
        return (
            dkernel.permute(0, 3, 1, 2).to(x.dtype),
            *(dscale.to(scale.dtype), dbias.to(bias.dtype), None, None, None),
        )


@jit
def _neighbour(x, row, tap, j, rows, h, w, J: tl.constexpr):
    """Load channel `j` of the pixel in the direction of a tap; zero outside."""
    down, right = tap // 3 - 1, tap % 3 - 1
    line, place = row // w % h + down, row % w + right
    mask = (row < rows) & (line >= 0) & (line < h) & (place >= 0) & (place < w)
    return tl.load(x + (row + down * w + right).to(tl.int64) * J + j, mask, 0.0)


@jit
def _neighbourhood(x, row, rows, h, w, J: tl.constexpr):
    """Load eight taps side by side, and the ninth apart: widths are powers of two."""
    k, j = tl.arange(0, 8 * J)[None, :], tl.arange(0, J)[None, :]
    eight = _neighbour(x, row, k // J, k % J, rows, h, w, J)
    return eight, _neighbour(x, row, 8, j, rows, h, w, J)


@jit
def _convolve(eight, ninth, matrix, sub, channels, C: tl.constexpr, J: tl.constexpr):
    """Return the convolution's output at one sub-pixel."""
    col = tl.arange(0, C)[None, :]
    ptr = matrix + (sub * channels + col) * (9 * J)
    mask = col < channels
    value = tl.dot(eight, tl.load(ptr + tl.arange(0, 8 * J)[:, None], mask, 0.0))
    tail = tl.load(ptr + 8 * J + tl.arange(0, J)[:, None], mask, 0.0)
    return tl.dot(ninth, tail, value)


@jit
def _forward(
    x, matrix, bias, scale, out, pooled, argmax, rows, h, w, channels, eps,
    TO_DEPTH: tl.constexpr, STEPS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    col, gain, shift = load_affine(scale, bias, C, channels)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * R + tl.arange(0, R)[:, None]
        eight, ninth = _neighbourhood(x, row, rows, h, w, J)
        best = _convolve(eight, ninth, matrix, 0, channels, C, J)
        index = tl.zeros((R, C), tl.int32)
        for i in tl.static_range(1, 4):
            other = _convolve(eight, ninth, matrix, i, channels, C, J)
            index = tl.where(other > best, i, index)
            best = tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL)
        best = best.to(matrix.dtype.element_ty)
        mask = (row < rows) & (col < channels)
        if pooled is not None:
            offset = row.to(tl.int64) * channels + col
            tl.store(pooled + offset, best, mask)
            tl.store(argmax + offset, index.to(tl.uint8), mask)
        y = norm_rows(best.to(tl.float32) + shift, gain, channels, eps)
        tl.store(out + output_offset(row, w, channels, TO_DEPTH) + col, y, mask)


@jit
def _add_grad(eight, ninth, dv, index, sub, sum_eight, sum_ninth):
    """Add the gradient of one sub-pixel's kernel."""
    g = tl.where(index == sub, dv, 0.0)
    return tl.dot(eight, g, sum_eight), tl.dot(ninth, g, sum_ninth)


@jit
def _store_grad(ptr, sum_eight, sum_ninth, mask, J: tl.constexpr):
    tl.store(ptr + tl.arange(0, 8 * J)[:, None], sum_eight, mask)
    tl.store(ptr + 8 * J + tl.arange(0, J)[:, None], sum_ninth, mask)


@jit
def _backward(
    x, pooled, argmax, bias, scale, dy, dmatrix, partial, rows, h, w, channels, eps,
    TO_DEPTH: tl.constexpr, STEPS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    col, gain, shift = load_affine(scale, bias, C, channels)
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
            pooled, argmax, dy, shift, row, col, rows, w, channels, TO_DEPTH
        )
        eight, ninth = _neighbourhood(x, row, rows, h, w, J)
        eight, ninth = tl.trans(eight), tl.trans(ninth)
        dv, dgain = norm_rows_backward(v, dv, gain, channels, eps)
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
