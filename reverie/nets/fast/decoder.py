"""The image decoder on coarse grids: see `phases.py` for the convolutions.

A layer is one convolution and one kernel, which adds the bias, normalizes, activates,
and lays the phases out as the finer map. The last layer's phases are never laid out for
training: a kernel compares them with the image as it was stored, and sums the squared
error of every image.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from reverie.nets.blocks import Norm
from reverie.nets.conv import Decoder
from reverie.nets.fast.launch import differentiable
from reverie.nets.fast.norm_act import (
    is_fusable,
    layer_norm_act,
    norm_act,
    unfold_norm_act,
)
from reverie.nets.fast.phases import SIDE, upsampled_kernel
from reverie.nets.outs import Output

ALIGNED = 8
"""Channels come in multiples of this for the tensor cores."""
TILE = 2048


class FastDecoder(Decoder):
    def _draw(self, deter: Tensor, stoch: Tensor) -> dict[str, Output]:
        if not self._is_simple(deter.dtype):
            return super()._draw(deter, stoch)
        batch, dtype = deter.shape[:-1], deter.dtype
        x = self._smallest(deter.flatten(0, -2), stoch.flatten(0, -2))
        for i in reversed(range(len(self.config.mults) - 1)):
            norm: Norm = getattr(self, f"conv{i}norm")
            weight, bias = getattr(self, f"conv{i}").cast(dtype)
            x = _convolve(x, upsampled_kernel(weight, 4 * len(bias)))
            x = unfold_norm_act(x, norm.scale, norm.eps, bias)
        weight, bias = self.imgout.cast(dtype)
        units = triton.cdiv(4 * len(bias), ALIGNED) * ALIGNED
        x = _convolve(x, upsampled_kernel(weight, units))
        outs: dict[str, Output] = {}
        offset = 0
        for key, space in self.images.items():
            outs[key] = Picture(x, bias, batch, space.shape, offset)
            offset += space.shape[2]
        return outs

    def _smallest(self, deter: Tensor, stoch: Tensor) -> Float[Tensor, "b h w c"]:
        """The map that the first convolution sees."""
        if not self.config.bspace:
            feat = torch.cat([stoch, deter], -1)
            norm = self.spacenorm
            return norm_act(self.space(feat), norm.scale, norm.eps)
        h, w, _ = self.smallest
        x0 = rearrange(
            self.sp0(deter),
            "b (g h w c) -> b h w (g c)",
            h=h,
            w=w,
            g=self.config.bspace,
        )
        x1 = self.sp2(layer_norm_act(self.sp1, self.sp1norm, self.act, stoch))
        return norm_act(x0 + x1, self.spnorm.scale, self.spnorm.eps)

    def _is_simple(self, dtype: torch.dtype) -> bool:
        config = self.config
        norm = self.spnorm if config.bspace else self.spacenorm
        return (
            config.kernel == SIDE
            and not config.strided
            and not config.outer
            and is_fusable(norm, self.act, dtype)
        )


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1)


class Picture:
    """Some channels of a drawn image, compared with true pixels by squared error.

    The drawing is kept as the phases of a coarse map, before bias and sigmoid; it may
    be larger than the image, at the bottom and right.
    """

    def __init__(
        self,
        phases: Float[Tensor, "n h w c"],
        bias: Float[Tensor, " C"],
        batch: torch.Size,
        shape: tuple[int, ...],
        offset: int,
    ):
        self.phases, self.bias, self.batch = phases, bias, batch
        self.shape, self.offset = shape, offset

    def pred(self) -> Float[Tensor, "*b h w c"]:
        height, width, channels = self.shape
        total = len(self.bias)
        x = rearrange(
            self.phases[..., : 4 * total].float(),
            "n h w (y x c) -> n (h y) (w x) c",
            y=2,
            x=2,
        )
        x = torch.sigmoid(x + self.bias.float())
        x = x[:, :height, :width, self.offset : self.offset + channels]
        return x.reshape(*self.batch, *self.shape)

    def loss(self, target: Tensor) -> Float[Tensor, "*b"]:
        if target.dtype != torch.uint8:
            error = self.pred() - target.float() / 255
            return error.square().flatten(-3).sum(-1)
        target = target.reshape(-1, *self.shape)
        loss = differentiable(_Compare, self.phases, self.bias, target, self.offset)
        return loss.reshape(self.batch)


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, phases: Tensor, bias: Tensor, target: Tensor, offset: int
    ) -> Tensor:
        phases, target = phases.contiguous(), target.contiguous()
        loss = torch.empty(len(phases), device=phases.device)
        if len(phases):
            sizes = _sizes(phases, bias, target, offset)
            _compare[(len(phases),)](phases, bias, target, loss, *sizes)
        ctx.save_for_backward(phases, bias, target)
        ctx.offset = offset
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        phases, bias, target = ctx.saved_tensors
        n, _, _, channels = phases.shape
        dphases = torch.empty_like(phases)
        partial = torch.empty(n, channels, device=phases.device)
        if n:
            sizes = _sizes(phases, bias, target, ctx.offset)
            inputs = (phases, bias, target, grad.contiguous(), dphases, partial)
            _compare_backward[(n,)](*inputs, *sizes)
        dbias = partial.sum(0)[: 4 * len(bias)].view(4, -1).sum(0)
        return dphases, dbias.to(bias.dtype), None, None


def _sizes(
    phases: Tensor, bias: Tensor, target: Tensor, offset: int
) -> tuple[int, ...]:
    _, h, w, channels = phases.shape
    columns = max(16, triton.next_power_of_2(channels))
    rows = max(1, TILE // columns)
    steps = triton.cdiv(h * w, rows)
    image = target.shape[1:]
    return (h * w, w, channels, len(bias), *image, offset, steps, rows, columns)


@triton.jit
@no_type_check
def _place(pixel, col, width, total, offset, HEIGHT, WIDTH, CHANNELS):
    """Where a phase's entry lies in its image, if it does, and its color."""
    phase, color = col // total, col % total - offset
    y = pixel // width * 2 + phase // 2
    x = pixel % width * 2 + phase % 2
    mine = (phase < 4) & (color >= 0) & (color < CHANNELS) & (y < HEIGHT) & (x < WIDTH)
    return (y * WIDTH + x) * CHANNELS + color, mine


@triton.jit
@no_type_check
def _compare(
    phases,
    bias,
    target,
    loss,
    pixels,
    width,
    channels,
    total,
    height_true,
    width_true,
    channels_true,
    offset,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    phases += row * pixels * channels
    target += row * height_true * width_true * channels_true
    col = tl.arange(0, C)[None, :]
    shift = tl.load(bias + col % total, col < 4 * total, 0.0).to(tl.float32)
    sums = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        pixel = step * R + tl.arange(0, R)[:, None]
        place, mine = _place(
            pixel, col, width, total, offset, height_true, width_true, channels_true
        )
        mine = mine & (pixel < pixels)
        v = tl.load(phases + pixel * channels + col, mine, 0.0).to(tl.float32)
        true = tl.load(target + place, mine, 0).to(tl.float32) / 255
        error = tl.where(mine, tl.sigmoid(v + shift) - true, 0.0)
        sums += error * error
    tl.store(loss + row, tl.sum(sums))


@triton.jit
@no_type_check
def _compare_backward(
    phases,
    bias,
    target,
    grad,
    dphases,
    partial,
    pixels,
    width,
    channels,
    total,
    height_true,
    width_true,
    channels_true,
    offset,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    phases += row * pixels * channels
    dphases += row * pixels * channels
    target += row * height_true * width_true * channels_true
    col = tl.arange(0, C)[None, :]
    shift = tl.load(bias + col % total, col < 4 * total, 0.0).to(tl.float32)
    twice = 2 * tl.load(grad + row)
    sums = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        pixel = step * R + tl.arange(0, R)[:, None]
        place, mine = _place(
            pixel, col, width, total, offset, height_true, width_true, channels_true
        )
        mine = mine & (pixel < pixels)
        v = tl.load(phases + pixel * channels + col, mine, 0.0).to(tl.float32)
        true = tl.load(target + place, mine, 0).to(tl.float32) / 255
        guess = tl.sigmoid(v + shift)
        dv = tl.where(mine, twice * (guess - true) * guess * (1 - guess), 0.0)
        sums += dv
        inside = (pixel < pixels) & (col < channels)
        tl.store(dphases + pixel * channels + col, dv, inside)
    col = tl.arange(0, C)
    tl.store(partial + row * channels + col, tl.sum(sums, 0), col < channels)
