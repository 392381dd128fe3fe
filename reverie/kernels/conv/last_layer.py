"""The decoder's last layer together with its loss, as one kernel each way.

The layer has few output channels on the largest map, so it is bound by memory. Forward,
a program convolves some coarse pixels (see `phases.py`), compares them with the stored
image, and keeps nothing but the slope of the error. Backward, a program gathers the
slopes around its pixels once, and has from them both the gradient of the map and its
share in the gradient of the kernel.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.kernels.launch import apply_autograd, num_programs
from reverie.kernels.sums import sum_partials

PHASED = 16
"""Output channels: room for four phases of up to four colors."""
CHANNELS = 128
"""The most input channels that one program holds."""
ROWS = 128
"""Coarse pixels of one tile."""


def is_small(channels: int, colors: int, dtype: torch.dtype) -> bool:
    """Whether these kernels take the layer. Their products are in half precision."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and channels <= CHANNELS and 4 * colors <= PHASED


def last_layer_loss(
    x: Float[Tensor, "n h w c"],
    kernel: Float[Tensor, "16 c 3 3"],
    bias: Float[Tensor, " C"],
    target: UInt8[Tensor, "n H W C"],
) -> Float[Tensor, " n"]:
    """The squared error of every image, whose pixels are sigmoids of the layer."""
    return apply_autograd(_LastLayer, x, kernel, bias, target)


class _LastLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor, target: Tensor
    ) -> Tensor:
        x, target = x.contiguous(), target.contiguous()
        n, h, w, channels = x.shape
        matrix = kernel.permute(0, 2, 3, 1).contiguous()  # (16, 3, 3, c)
        tiles = triton.cdiv(h * w, ROWS)
        loss = torch.zeros(n, tiles, device=x.device)
        keep = any(ctx.needs_input_grad)
        slope = x.new_empty(n, h, w, PHASED) if keep else None
        if n:
            _last_layer_forward[(n, tiles)](
                *(
                    x,
                    matrix,
                    bias,
                    target,
                    loss,
                    slope,
                    h,
                    w,
                    channels,
                    *target.shape[1:],
                ),
                *(ROWS, _wide(channels), PHASED),
                num_warps=4,
                num_stages=1,
            )
        ctx.save_for_backward(x, matrix, bias, slope)
        return loss.sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, bias, slope = ctx.saved_tensors
        n, h, w, channels = x.shape
        wide, tiles = _wide(channels), n * triton.cdiv(h * w, ROWS)
        count = num_programs(x.device, tiles, per_sm=2 if wide <= 64 else 1)
        dx = torch.empty_like(x)
        dmatrix = torch.empty(count, 9, PHASED, channels, device=x.device)
        partial = torch.empty(count, PHASED, device=x.device)
        _last_layer_backward[(count,)](
            *(x, matrix, slope, grad.contiguous(), dx, dmatrix, partial),
            *(tiles, h, w, channels, triton.cdiv(tiles, count)),
            *(ROWS, wide, PHASED),
            num_warps=4 if wide <= 32 else 8,
            num_stages=1,
        )
        dkernel = sum_partials(dmatrix).view(3, 3, PHASED, channels).permute(2, 3, 0, 1)
        dbias = sum_partials(partial)[: 4 * len(bias)].view(4, -1).sum(0)
        return dx, dkernel.to(x.dtype), dbias.to(bias.dtype), None


def _wide(channels: int) -> int:
    return max(16, int(triton.next_power_of_2(channels)))


@triton.jit
@no_type_check
def _last_layer_forward(
    x,
    matrix,
    bias,
    target,
    loss,
    slope,
    h,
    w,
    channels,
    height,
    width,
    colors,
    R: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * R + tl.arange(0, R)[:, None]
    y, z = pixel // w, pixel % w
    col = tl.arange(0, C)
    j = tl.arange(0, J)[None, :]
    x += image * h * w * channels
    v = tl.zeros((R, J), tl.float32)
    for tap in range(9):
        dy, dz = tap // 3 - 1, tap % 3 - 1
        inside = (y + dy >= 0) & (y + dy < h) & (z + dz >= 0) & (z + dz < w)
        inside = inside & (col[None, :] < channels)
        place = (pixel + dy * w + dz) * channels + col[None, :]
        near = tl.load(x + place, inside, 0.0)
        entry = (j * 9 + tap) * channels + col[:, None]
        v = tl.dot(near, tl.load(matrix + entry, col[:, None] < channels, 0.0), v)
    phase, color = j // colors, j % colors
    v += tl.load(bias + color, phase < 4, 0.0).to(tl.float32)
    y, z = y * 2 + phase // 2, z * 2 + phase % 2
    inside = (pixel < h * w) & (phase < 4) & (y < height) & (z < width)
    target += image * height * width * colors
    true = tl.load(target + (y * width + z) * colors + color, inside, 0)
    guess = tl.sigmoid(v)
    error = tl.where(inside, guess - true.to(tl.float32) / 255, 0.0)
    tl.store(
        loss + image * tl.num_programs(1) + tl.program_id(1), tl.sum(error * error)
    )
    if slope is not None:
        place = (image * h * w + pixel) * J + j
        tl.store(slope + place, 2 * error * guess * (1 - guess), pixel < h * w)


@triton.jit
@no_type_check
def _slopes(slope, scale, pixel, tap, j, h, w, J: tl.constexpr):
    """The slope of output `j` of the pixel that sees this one through a tap."""
    y, x = pixel // w - (tap // 3 - 1), pixel % w - (tap % 3 - 1)
    inside = (pixel < h * w) & (y >= 0) & (y < h) & (x >= 0) & (x < w) & (tap < 9)
    value = tl.load(slope + (y * w + x) * J + j, inside, 0.0).to(tl.float32)
    return (value * scale).to(slope.dtype.element_ty)


@triton.jit
@no_type_check
def _last_layer_backward(
    x,
    matrix,
    slope,
    grad,
    dx,
    dmatrix,
    partial,
    tiles,
    h,
    w,
    channels,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
):
    """Eight taps side by side make one product, the ninth another."""
    col = tl.arange(0, C)[None, :]
    k = tl.arange(0, 8 * J)
    j = tl.arange(0, J)
    known = col < channels
    entry = ((k % J) * 9 + k // J)[:, None] * channels + col
    most = tl.load(matrix + entry, known, 0.0)
    rest = tl.load(matrix + (j * 9 + 8)[:, None] * channels + col, known, 0.0)
    dmost = tl.zeros((8 * J, C), tl.float32)
    drest = tl.zeros((J, C), tl.float32)
    sums = tl.zeros((8 * J,), tl.float32)
    each = tl.cdiv(h * w, R)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        image = (tile // each).to(tl.int64)
        pixel = tile % each * R + tl.arange(0, R)[:, None]
        pixel = tl.where(tile < tiles, pixel, h * w)  # past the end, there are none
        scale = tl.load(grad + image, tile < tiles, 0.0)
        here = slope + image * h * w * J
        g = _slopes(here, scale, pixel, (k // J)[None, :], (k % J)[None, :], h, w, J)
        g8 = _slopes(here, scale, pixel, 8, j[None, :], h, w, J)
        sums += tl.sum(g.to(tl.float32), 0)
        place = (image * h * w + pixel) * channels + col
        inside = (pixel < h * w) & known
        v = tl.load(x + place, inside, 0.0)
        dmost = tl.dot(tl.trans(g), v, dmost)
        drest = tl.dot(tl.trans(g8), v, drest)
        dv = tl.dot(g8, rest, tl.dot(g, most))
        tl.store(dx + place, dv, inside)
    here = dmatrix + tl.program_id(0) * 9 * J * channels
    tl.store(here + k[:, None] * channels + col, dmost, known)
    tl.store(here + (8 * J + j)[:, None] * channels + col, drest, known)
    # only the tap in the middle sees every pixel once
    tl.store(partial + tl.program_id(0) * J + k % J, sums, k // J == 4)
