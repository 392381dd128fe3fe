"""The decoder's last layer together with its loss, as one kernel each way.

The layer has few output channels on the largest map, so memory bandwidth limits it. In
the forward pass, a program convolves some half-resolution pixels (`space_to_depth.py`),
compares them with the stored image, and saves only the derivative of the error. In the
backward pass, a program gathers the derivatives around its pixels once, and computes
from them the gradient of the map and its part of the kernel's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.kernels.conv.space_to_depth import image_offset
from reverie.kernels.launch import apply_autograd, block_size, jit, num_programs
from reverie.kernels.sums import sum_partials

OUTPUTS = 16
"""Output channels: four sub-pixels of up to four colors, zero-padded."""
MAX_CHANNELS = 128
"""Most input channels that one program holds."""
ROWS = 128
"""Half-resolution pixels of one tile."""


def is_supported(channels: int, colors: int, dtype: torch.dtype) -> bool:
    """True if these kernels can compute the layer; they multiply in half precision."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and channels <= MAX_CHANNELS and 4 * colors <= OUTPUTS


def last_layer_loss(
    x: Float[Tensor, "n h w c"],
    kernel: Float[Tensor, "16 c 3 3"],
    bias: Float[Tensor, " C"],
    target: UInt8[Tensor, "n H W C"],
) -> Float[Tensor, " n"]:
    """Return the squared error of every image, predicted as sigmoids of the layer."""
    return apply_autograd(_LastLayerLoss, x, kernel, bias, target)


class _LastLayerLoss(torch.autograd.Function):
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
        slope = x.new_empty(n, h, w, OUTPUTS) if keep else None
        if n:
            _forward[(n, tiles)](
                *(x, matrix, bias, target, loss, slope, h, w, channels),
                *(*target.shape[1:], ROWS, block_size(channels), OUTPUTS),
                num_warps=4,
                num_stages=1,
            )
        ctx.save_for_backward(x, matrix, bias, slope)
        return loss.sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, bias, slope = ctx.saved_tensors
        n, h, w, channels = x.shape
        columns, tiles = block_size(channels), n * triton.cdiv(h * w, ROWS)
        programs = num_programs(x.device, tiles, per_sm=2 if columns <= 64 else 1)
        dx = torch.empty_like(x)
        dmatrix = torch.empty(programs, 9, OUTPUTS, channels, device=x.device)
        partial = torch.empty(programs, OUTPUTS, device=x.device)
        _backward[(programs,)](
            *(x, matrix, slope, grad.contiguous(), dx, dmatrix, partial),
            *(tiles, h, w, channels, triton.cdiv(tiles, programs)),
            *(ROWS, columns, OUTPUTS),
            num_warps=4 if columns <= 32 else 8,
            num_stages=1,
        )
        dkernel = sum_partials(dmatrix).view(3, 3, OUTPUTS, channels)
        dbias = sum_partials(partial)[: 4 * len(bias)].view(4, -1).sum(0)
        dkernel = dkernel.permute(2, 3, 0, 1).to(x.dtype)
        return dx, dkernel, dbias.to(bias.dtype), None


@jit
def _forward(
    x, matrix, bias, target, loss, slope, h, w, channels, height, width, colors,
    R: tl.constexpr, C: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)
    j = tl.arange(0, J)[None, :]
    x += image * h * w * channels
    v = tl.zeros((R, J), tl.float32)
    for tap in range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        line, place = pixel // w + down, pixel % w + right
        inside = (line >= 0) & (line < h) & (place >= 0) & (place < w)
        inside = inside & (col[None, :] < channels)
        offset = (pixel + down * w + right) * channels + col[None, :]
        neighbour = tl.load(x + offset, inside, 0.0)
        entry = (j * 9 + tap) * channels + col[:, None]
        weight = tl.load(matrix + entry, col[:, None] < channels, 0.0)
        v = tl.dot(neighbour, weight, v)
    sub, color = j // colors, j % colors
    v += tl.load(bias + color, sub < 4, 0.0).to(tl.float32)
    offset, mask = image_offset(pixel, sub, color, w, height, width, colors)
    mask = mask & (pixel < h * w)
    true = tl.load(target + image * height * width * colors + offset, mask, 0)
    pred = tl.sigmoid(v)
    error = tl.where(mask, pred - true.to(tl.float32) / 255, 0.0)
    tl.store(
        loss + image * tl.num_programs(1) + tl.program_id(1), tl.sum(error * error)
    )
    if slope is not None:
        offset = (image * h * w + pixel) * J + j
        tl.store(slope + offset, 2 * error * pred * (1 - pred), pixel < h * w)


@jit
def _load_slopes(slope, scale, pixel, tap, j, h, w, J: tl.constexpr):
    """Load the derivative of output `j` of the pixel that sees this one by a tap."""
    y, x = pixel // w - (tap // 3 - 1), pixel % w - (tap % 3 - 1)
    mask = (pixel < h * w) & (y >= 0) & (y < h) & (x >= 0) & (x < w) & (tap < 9)
    value = tl.load(slope + (y * w + x) * J + j, mask, 0.0).to(tl.float32)
    return (value * scale).to(slope.dtype.element_ty)


@jit
def _backward(
    x, matrix, slope, grad, dx, dmatrix, partial, tiles, h, w, channels,
    STEPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Eight taps side by side are one product, the ninth is another."""
    col = tl.arange(0, C)[None, :]
    k, j = tl.arange(0, 8 * J), tl.arange(0, J)
    valid = col < channels
    entry = ((k % J) * 9 + k // J)[:, None] * channels + col
    eight = tl.load(matrix + entry, valid, 0.0)
    ninth = tl.load(matrix + (j * 9 + 8)[:, None] * channels + col, valid, 0.0)
    sum_eight = tl.zeros((8 * J, C), tl.float32)
    sum_ninth = tl.zeros((J, C), tl.float32)
    dbias = tl.zeros((8 * J,), tl.float32)
    tiles_per_image = tl.cdiv(h * w, R)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        image = (tile // tiles_per_image).to(tl.int64)
        pixel = tile % tiles_per_image * R + tl.arange(0, R)[:, None]
        pixel = tl.where(tile < tiles, pixel, h * w)  # past the last tile: none
        scale = tl.load(grad + image, tile < tiles, 0.0)
        ptr = slope + image * h * w * J
        tap, output = (k // J)[None, :], (k % J)[None, :]
        g = _load_slopes(ptr, scale, pixel, tap, output, h, w, J)
        g9 = _load_slopes(ptr, scale, pixel, 8, j[None, :], h, w, J)
        dbias += tl.sum(g.to(tl.float32), 0)
        offset = (image * h * w + pixel) * channels + col
        mask = (pixel < h * w) & valid
        v = tl.load(x + offset, mask, 0.0)
        sum_eight = tl.dot(tl.trans(g), v, sum_eight)
        sum_ninth = tl.dot(tl.trans(g9), v, sum_ninth)
        tl.store(dx + offset, tl.dot(g9, ninth, tl.dot(g, eight)), mask)
    ptr = dmatrix + tl.program_id(0) * 9 * J * channels
    tl.store(ptr + k[:, None] * channels + col, sum_eight, valid)
    tl.store(ptr + (8 * J + j)[:, None] * channels + col, sum_ninth, valid)
    # only the center tap sees every pixel exactly once
    tl.store(partial + tl.program_id(0) * J + k % J, dbias, k // J == 4)
