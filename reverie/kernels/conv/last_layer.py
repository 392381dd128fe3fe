"""The decoder's last layer together with its loss, as one forward kernel and one
backward kernel.

The layer has few output channels and the largest feature map, so memory bandwidth
limits it. In the forward pass, a program convolves some half-resolution pixels
(`space_to_depth.py`), compares them with the stored image, and saves only the
derivative of the squared error (`output_grad`). In the backward pass, a program gathers
the derivatives in the neighborhood of its pixels, and computes from them the gradient
of the layer's input and a partial sum of the kernel's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.kernels.conv.space_to_depth import image_offset
from reverie.kernels.launch import (
    apply_autograd,
    block_size,
    jit,
    num_programs,
    supports_large_tiles,
)
from reverie.kernels.sums import sum_partials

OUTPUTS = 16
"""Output channels: four sub-pixels of up to four colors, zero-padded. In the kernels, J
is this number and `j` the index of a channel."""
MAX_CHANNELS = 128
"""Maximum number of input channels, which one program holds."""
ROWS = 128
"""Half-resolution pixels of one tile."""


def is_supported(channels: int, colors: int, like: Tensor) -> bool:
    """True if these kernels support the layer for the dtype and device of `like`.

    They need half precision and large tiles.
    """
    half = like.dtype in (torch.bfloat16, torch.float16)
    fits = channels <= MAX_CHANNELS and 4 * colors <= OUTPUTS
    return half and fits and supports_large_tiles(like.device)


def last_layer_loss(
    x: Float[Tensor, "n h w c"],
    kernel: Float[Tensor, "16 c 3 3"],
    bias: Float[Tensor, " C"],
    target: UInt8[Tensor, "n H W C"],
) -> Float[Tensor, " n"]:
    """Return the squared error of each image: sigmoid of the output against the target.

    Targets are scaled to [0, 1].
    """
    return apply_autograd(_LastLayerLoss, x, kernel, bias, target)


class _LastLayerLoss(torch.autograd.Function):
    """Convolution, bias, sigmoid and squared error; see `last_layer_loss`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor, target: Tensor
    ) -> Tensor:
        x, target = x.contiguous(), target.contiguous()
        n, h, w, channels = x.shape
        matrix = kernel.permute(0, 2, 3, 1).contiguous()  # (16, 3, 3, c)
        tiles = triton.cdiv(h * w, ROWS)
        loss = torch.zeros(n, tiles, device=x.device)
        needs_grad = any(ctx.needs_input_grad)
        output_grad = x.new_empty(n, h, w, OUTPUTS) if needs_grad else None
        if n:
            _forward[(n, tiles)](
                *(x, matrix, bias, target, loss, output_grad, h, w, channels),
                *(*target.shape[1:], ROWS, block_size(channels), OUTPUTS),
                num_warps=4,
                num_stages=1,
            )
        ctx.save_for_backward(x, matrix, bias, output_grad)
        return loss.sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, bias, output_grad = ctx.saved_tensors
        n, h, w, channels = x.shape
        columns, tiles = block_size(channels), n * triton.cdiv(h * w, ROWS)
        programs = num_programs(x.device, tiles, per_sm=2 if columns <= 64 else 1)
        dx = torch.empty_like(x)
        dmatrix = torch.empty(programs, 9, OUTPUTS, channels, device=x.device)
        dbias = torch.empty(programs, OUTPUTS, device=x.device)
        _backward[(programs,)](
            *(x, matrix, output_grad, grad.contiguous(), dx, dmatrix, dbias),
            *(tiles, h, w, channels, triton.cdiv(tiles, programs)),
            *(ROWS, columns, OUTPUTS),
            num_warps=4 if columns <= 32 else 8,
            num_stages=1,
        )
        dkernel = sum_partials(dmatrix).view(3, 3, OUTPUTS, channels)
        dbias = sum_partials(dbias)[: 4 * len(bias)].view(4, -1).sum(0)
        dkernel = dkernel.permute(2, 3, 0, 1).to(x.dtype)
        return dx, dkernel, dbias.to(bias.dtype), None


@jit
def _forward(
    x, matrix, bias, target, loss, output_grad, h, w, channels, height, width, colors,
    R: tl.constexpr, C: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Convolve R pixels of one image and store the sum of their squared errors.

    `h` and `w` are the size of the half-resolution map, `height` and `width` that of
    the image.
    """
    image = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)
    j = tl.arange(0, J)[None, :]
    x += image * h * w * channels
    v = tl.zeros((R, J), tl.float32)
    for tap in range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        pixel_y, pixel_x = pixel // w + down, pixel % w + right
        inside = (pixel_y >= 0) & (pixel_y < h) & (pixel_x >= 0) & (pixel_x < w)
        inside = inside & (col[None, :] < channels)
        offset = (pixel + down * w + right) * channels + col[None, :]
        neighbor = tl.load(x + offset, inside, 0.0)
        entry = (j * 9 + tap) * channels + col[:, None]
        weight = tl.load(matrix + entry, col[:, None] < channels, 0.0)
        v = tl.dot(neighbor, weight, v)
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
    if output_grad is not None:
        offset = (image * h * w + pixel) * J + j
        tl.store(output_grad + offset, 2 * error * pred * (1 - pred), pixel < h * w)


@jit
def _load_output_grads(output_grad, scale, pixel, tap, j, h, w, J: tl.constexpr):
    """Load the gradient of output channel `j` at the output pixel `(y, x)` that reads
    the input `pixel` with this tap."""
    y, x = pixel // w - (tap // 3 - 1), pixel % w - (tap % 3 - 1)
    mask = (pixel < h * w) & (y >= 0) & (y < h) & (x >= 0) & (x < w) & (tap < 9)
    value = tl.load(output_grad + (y * w + x) * J + j, mask, 0.0).to(tl.float32)
    return (value * scale).to(output_grad.dtype.element_ty)


@jit
def _backward(
    x, matrix, output_grad, grad, dx, dmatrix, dbias, tiles, h, w, channels,
    STEPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Compute all gradients, for `J` output channels.

    Eight taps are one matrix product, the ninth is another (see `first_layer.py`).
    """
    col = tl.arange(0, C)[None, :]
    k, j = tl.arange(0, 8 * J), tl.arange(0, J)
    valid = col < channels
    entry = ((k % J) * 9 + k // J)[:, None] * channels + col
    eight = tl.load(matrix + entry, valid, 0.0)
    ninth = tl.load(matrix + (j * 9 + 8)[:, None] * channels + col, valid, 0.0)
    sum_eight = tl.zeros((8 * J, C), tl.float32)
    sum_ninth = tl.zeros((J, C), tl.float32)
    sum_bias = tl.zeros((8 * J,), tl.float32)
    tiles_per_image = tl.cdiv(h * w, R)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        image = (tile // tiles_per_image).to(tl.int64)
        pixel = tile % tiles_per_image * R + tl.arange(0, R)[:, None]
        pixel = tl.where(tile < tiles, pixel, h * w)  # out of range after the last tile
        scale = tl.load(grad + image, tile < tiles, 0.0)
        ptr = output_grad + image * h * w * J
        tap, output = (k // J)[None, :], (k % J)[None, :]
        grads = _load_output_grads(ptr, scale, pixel, tap, output, h, w, J)
        grads_ninth = _load_output_grads(ptr, scale, pixel, 8, j[None, :], h, w, J)
        sum_bias += tl.sum(grads.to(tl.float32), 0)
        offset = (image * h * w + pixel) * channels + col
        mask = (pixel < h * w) & valid
        v = tl.load(x + offset, mask, 0.0)
        sum_eight = tl.dot(tl.trans(grads), v, sum_eight)
        sum_ninth = tl.dot(tl.trans(grads_ninth), v, sum_ninth)
        dv = tl.dot(grads_ninth, ninth, tl.dot(grads, eight))
        tl.store(dx + offset, dv, mask)
    ptr = dmatrix + tl.program_id(0) * 9 * J * channels
    tl.store(ptr + k[:, None] * channels + col, sum_eight, valid)
    tl.store(ptr + (8 * J + j)[:, None] * channels + col, sum_ninth, valid)
    # for the bias, use the center tap, which reads every output pixel exactly once
    tl.store(dbias + tl.program_id(0) * J + k % J, sum_bias, k // J == 4)
