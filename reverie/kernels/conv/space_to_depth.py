"""5x5 convolutions computed as 3x3 convolutions at half the resolution.

Space-to-depth moves each 2 x 2 block of pixels into the channels of one pixel at half
the resolution. Its four sub-pixels are numbered left to right and top to bottom; the
channels are ordered by sub-pixel first, then by channel. A tap is one position of a
convolution kernel, and `units` are output channels. Along one axis, tap y (0 to 4)
of the 5x5 kernel connects output sub-pixel p (0 or 1) to input sub-pixel q of the
half-resolution neighbor a (0 to 2), where `y + p = 2 a + q`. So each output sub-pixel
has its own 3x3 kernel:

- if the input is a space-to-depth map too (in the encoder, where max-pooling then takes
  the maximum of the sub-pixels), each weight of the 3x3 kernel is one tap or zero;
- if the input is a half-resolution map that would be upsampled by repeating pixels (in
  the decoder), each weight is the sum of the taps that read the same input pixel.

The 5x5 weight is the trained and saved parameter, and gets the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import apply_autograd, jit

KERNEL = 5
"""The supported kernel size."""
BLOCK = 1024
"""Weights per program."""


def space_to_depth_kernel(
    weight: Float[Tensor, "o i 5 5"], units: int, inputs: int
) -> Float[Tensor, "{units} {inputs} 3 3"]:
    """Return the kernel between two space-to-depth maps.

    `units` and `inputs` are its channel counts, which may include zero padding.
    """
    return apply_autograd(_HalfResolutionKernel, weight, units, inputs, False)


def upsample_kernel(
    weight: Float[Tensor, "o i 5 5"], units: int
) -> Float[Tensor, "{units} i 3 3"]:
    """Return the kernel for upsampling and convolution; outputs are space-to-depth.

    `units` is its number of output channels, which may include zero padding.
    """
    return apply_autograd(_HalfResolutionKernel, weight, units, weight.shape[1], True)


class _HalfResolutionKernel(torch.autograd.Function):
    """Compute the 3x3 kernel from the 5x5 kernel, for one of the two kinds of input."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, units: int, inputs: int, upsample: bool
    ) -> Tensor:
        ctx.shape, ctx.upsample = weight.shape, upsample
        taps = weight.permute(0, 2, 3, 1).contiguous()  # (o, 5, 5, i)
        kernel = taps.new_empty(units, 3, 3, inputs)
        grid = (triton.cdiv(kernel.numel(), BLOCK),)
        _forward[grid](
            *(taps, kernel, kernel.numel(), *weight.shape[:2], inputs, upsample, BLOCK)
        )
        return kernel.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.permute(0, 2, 3, 1).contiguous()
        units, channels, _, _ = ctx.shape
        taps = grad.new_empty(units, KERNEL, KERNEL, channels)
        grid = (triton.cdiv(taps.numel(), BLOCK),)
        _backward[grid](
            *(grad, taps, taps.numel(), units, channels),
            *(grad.shape[-1], ctx.upsample, BLOCK),
        )
        return taps.permute(0, 3, 1, 2), None, None, None


@jit
def _weight_index(channels, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return indices of weights, their output channel, row, column, input channel."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tap = index // channels
    return index, tap // (SIDE * SIDE), tap // SIDE % SIDE, tap % SIDE, index % channels


@jit
def _forward(
    taps, kernel, size, units, channels, inputs,
    UPSAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute every weight (a, b) of the 3x3 kernel from taps (y, x) of the 5x5 kernel.

    Along the vertical axis, y = 2 a + q - p; the horizontal axis is analogous. In the
    code, `sub` and `q` number the four sub-pixels of output and input. `units` and
    `channels` are the channel counts of the 5x5 kernel, `inputs` is the number of input
    channels of the 3x3 kernel.
    """
    index, unit, a, b, channel = _weight_index(inputs, 3, BLOCK)
    sub = unit // units  # sub-pixel of the output
    y, x = 2 * a - sub // 2, 2 * b - sub % 2
    source = unit % units * 25
    mask = (index < size) & (sub < 4)
    if UPSAMPLE:
        value = tl.zeros((BLOCK,), tl.float32)
        for q in tl.static_range(4):
            tap_y, tap_x = y + q // 2, x + q % 2
            inside = mask & (tap_y >= 0) & (tap_y < 5) & (tap_x >= 0) & (tap_x < 5)
            tap = (source + tap_y * 5 + tap_x) * channels + channel
            value += tl.load(taps + tap, inside, 0.0)
    else:
        q = channel // channels  # sub-pixel of the input
        y, x = y + q // 2, x + q % 2
        mask = mask & (q < 4) & (y >= 0) & (y < 5) & (x >= 0) & (x < 5)
        source = (source + y * 5 + x) * channels + channel % channels
        value = tl.load(taps + source, mask, 0.0)
    tl.store(kernel + index, value, index < size)


@jit
def _backward(
    kernel, taps, size, units, channels, inputs,
    UPSAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of every tap over the four output sub-pixels that use it.

    `kernel` and `taps` are the gradients of the 3x3 and of the 5x5 kernel.
    """
    index, unit, y, x, channel = _weight_index(channels, 5, BLOCK)
    value = tl.zeros((BLOCK,), tl.float32)
    for sub in tl.static_range(4):
        row, col = y + sub // 2, x + sub % 2  # 2 a + q
        entry = ((sub * units + unit) * 9 + row // 2 * 3 + col // 2) * inputs + channel
        if not UPSAMPLE:
            entry += (row % 2 * 2 + col % 2) * channels
        value += tl.load(kernel + entry, index < size, 0.0)
    tl.store(taps + index, value, index < size)


@jit
def space_to_depth_index(pixel, width):
    """Return the index of a pixel among the sub-pixels of the space-to-depth map."""
    y, x = pixel // width, pixel % width
    return (y // 2 * (width // 2) + x // 2) * 4 + y % 2 * 2 + x % 2


@jit
def image_offset(pixel, sub, color, map_width, height, width, colors):
    """Return the offset of a sub-pixel's color in an image, and a mask.

    The mask is false for sub-pixels outside of the image, which may be smaller than the
    space-to-depth map.
    """
    y = pixel // map_width * 2 + sub // 2
    x = pixel % map_width * 2 + sub % 2
    inside = (sub < 4) & (y < height) & (x < width)
    return (y * width + x) * colors + color, inside
