"""A 5x5 convolution on a fine grid as a 3x3 convolution on the coarse one.

Every coarse pixel holds four fine ones, its phases, numbered left to right and top to
bottom. Channels of a coarse map are ordered phase first, then the fine map's channels.
Along one axis, tap y of a 5-tap kernel takes output phase p from input phase q of the
coarse neighbour a, where `y + p = 2 a + q`. So the four phases of the output need one
coarse 3x3 kernel each, and:

- if the input is a fine map too, folded into phases (an encoder's layer, whose max-pool
  then takes the largest phase), each of its entries is one tap or zero;
- if the input is a coarse map, repeated to the fine grid (a decoder's layer), the taps
  that meet the same coarse pixel add up.

Gradients reach the 5x5 weight, which is what is trained and saved.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import apply_autograd

SIDE = 5
"""The kernel that this works for."""
BLOCK = 1024


def phase_kernel(
    weight: Float[Tensor, "o i 5 5"], units: int, inputs: int
) -> Float[Tensor, "{units} {inputs} 3 3"]:
    """From phases to phases; `units` and `inputs` may be padded with zeros."""
    return apply_autograd(_Coarse, weight, units, inputs, True)


def upsampled_kernel(
    weight: Float[Tensor, "o i 5 5"], units: int
) -> Float[Tensor, "{units} i 3 3"]:
    """From a coarse map to phases; `units` may be padded with zeros."""
    return apply_autograd(_Coarse, weight, units, weight.shape[1], False)


class _Coarse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, units: int, inputs: int, phased: bool
    ) -> Tensor:
        ctx.shape, ctx.phased = weight.shape, phased
        taps = weight.permute(0, 2, 3, 1).contiguous()  # (o, 5, 5, i)
        coarse = taps.new_empty(units, 3, 3, inputs)
        grid = (triton.cdiv(coarse.numel(), BLOCK),)
        _gather[grid](
            *(taps, coarse, coarse.numel(), *weight.shape[:2], inputs, phased, BLOCK)
        )
        return coarse.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        coarse = grad.permute(0, 2, 3, 1).contiguous()
        units, inputs, _, _ = ctx.shape
        taps = coarse.new_empty(units, SIDE, SIDE, inputs)
        grid = (triton.cdiv(taps.numel(), BLOCK),)
        _scatter[grid](
            *(coarse, taps, taps.numel(), units, inputs),
            *(coarse.shape[-1], ctx.phased, BLOCK),
        )
        return taps.permute(0, 3, 1, 2), None, None, None


@triton.jit
@no_type_check
def _gather(
    taps,
    coarse,
    size,
    units,
    channels,
    inputs,
    PHASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every coarse entry from its taps."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = place % inputs
    a, b = place // inputs // 3 % 3, place // inputs % 3
    unit = place // inputs // 9
    phase = unit // units
    y, x = 2 * a - phase // 2, 2 * b - phase % 2
    source = unit % units * 25
    inside = (place < size) & (phase < 4)
    if PHASED:
        side = channel // channels
        y, x = y + side // 2, x + side % 2
        inside = inside & (side < 4) & (y >= 0) & (y < 5) & (x >= 0) & (x < 5)
        source = (source + y * 5 + x) * channels + channel % channels
        value = tl.load(taps + source, inside, 0.0)
    else:
        value = tl.zeros((BLOCK,), tl.float32)
        for side in tl.static_range(4):
            u, v = y + side // 2, x + side % 2
            hit = inside & (u >= 0) & (u < 5) & (v >= 0) & (v < 5)
            entry = (source + u * 5 + v) * channels + channel
            value += tl.load(taps + entry, hit, 0.0)
    tl.store(coarse + place, value, place < size)


@triton.jit
@no_type_check
def _scatter(
    coarse,
    taps,
    size,
    units,
    channels,
    inputs,
    PHASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every tap's gradient from the four phases that it serves."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = place % channels
    y, x = place // channels // 5 % 5, place // channels % 5
    unit = place // channels // 25
    value = tl.zeros((BLOCK,), tl.float32)
    for phase in tl.static_range(4):
        u, v = y + phase // 2, x + phase % 2
        entry = ((phase * units + unit) * 9 + u // 2 * 3 + v // 2) * inputs + channel
        if PHASED:
            entry += (u % 2 * 2 + v % 2) * channels
        value += tl.load(coarse + entry, place < size, 0.0)
    tl.store(taps + place, value, place < size)
