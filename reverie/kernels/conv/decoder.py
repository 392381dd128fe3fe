"""The image decoder on coarse grids: see `phases.py` for the convolutions.

A layer is one convolution and one kernel, which adds the bias, normalizes, activates,
and lays the phases out as the finer map. The last layer's phases are never laid out for
training: a kernel compares them with the image as it was stored, and sums the squared
error of every image.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.conv.last_layer import is_small, last_layer_loss
from reverie.kernels.conv.space_to_depth import SIDE, upsampled_kernel
from reverie.kernels.launch import apply_autograd, num_programs
from reverie.kernels.norm.rms_norm import (
    is_fusable,
    linear_norm_act,
    rms_norm_silu,
    rms_norm_silu_depth_to_space,
)
from reverie.kernels.sums import sum_partials
from reverie.nets.blocks import Norm
from reverie.nets.conv import Decoder
from reverie.nets.distributions import Output

ALIGNED = 16
"""The last layer's channels come in multiples of this, for the tensor cores."""
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
            x = rms_norm_silu_depth_to_space(x, norm.scale, norm.eps, bias)
        weight, bias = self.imgout.cast(dtype)
        units = triton.cdiv(4 * len(bias), ALIGNED) * ALIGNED
        canvas = Canvas(x, upsampled_kernel(weight, units), bias)
        outs: dict[str, Output] = {}
        offset = 0
        for key, space in self.images.items():
            outs[key] = Picture(canvas, batch, space.shape, offset)
            offset += space.shape[2]
        return outs

    def _smallest(self, deter: Tensor, stoch: Tensor) -> Float[Tensor, "b h w c"]:
        """The map that the first convolution sees."""
        if not self.config.bspace:
            feat = torch.cat([stoch, deter], -1)
            norm = self.spacenorm
            return rms_norm_silu(self.space(feat), norm.scale, norm.eps)
        x = linear_norm_act(self.sp1, self.sp1norm, self.act, stoch)
        weight0, bias0 = self.sp0.cast(deter.dtype)
        weight1, bias1 = self.sp2.cast(deter.dtype)
        rows = deter.reshape(len(deter), len(weight0), -1).transpose(0, 1)
        norm = self.spnorm
        return apply_autograd(
            *(_Space, torch.bmm(rows, weight0), F.linear(x, weight1), bias0, bias1),
            *(norm.scale, norm.eps, self.smallest),
        )

    def _is_simple(self, dtype: torch.dtype) -> bool:
        config = self.config
        norm = self.spnorm if config.bspace else self.spacenorm
        return (
            config.kernel == SIDE
            and not config.strided
            and not config.outer
            and config.standard == "none"
            and is_fusable(norm, self.act, dtype)
        )


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1)


class Canvas:
    """What all images are drawn on: the last layer, before it is computed."""

    def __init__(
        self,
        x: Float[Tensor, "n h w c"],
        kernel: Float[Tensor, "o c 3 3"],
        bias: Float[Tensor, " C"],
    ):
        self.x, self.kernel, self.bias = x, kernel, bias

    @cached_property
    def phases(self) -> Float[Tensor, "n h w o"]:
        """The drawing as phases of a coarse map, before bias and sigmoid."""
        return _convolve(self.x, self.kernel)


class Picture:
    """Some channels of a canvas, compared with true pixels by squared error.

    The canvas may be larger than the image, at the bottom and right.
    """

    def __init__(
        self, canvas: Canvas, batch: torch.Size, shape: tuple[int, ...], offset: int
    ):
        self.canvas, self.batch, self.shape, self.offset = canvas, batch, shape, offset

    def pred(self) -> Float[Tensor, "*b h w c"]:
        height, width, channels = self.shape
        total = len(self.canvas.bias)
        x = rearrange(
            self.canvas.phases[..., : 4 * total].float(),
            "n h w (y x c) -> n (h y) (w x) c",
            y=2,
            x=2,
        )
        x = torch.sigmoid(x + self.canvas.bias.float())
        x = x[:, :height, :width, self.offset : self.offset + channels]
        return x.reshape(*self.batch, *self.shape)

    def loss(self, target: Tensor) -> Float[Tensor, "*b"]:
        if target.dtype != torch.uint8:
            error = self.pred() - target.float() / 255
            return error.square().flatten(-3).sum(-1)
        target = target.reshape(-1, *self.shape)
        x, kernel, bias = self.canvas.x, self.canvas.kernel, self.canvas.bias
        alone = self.shape[-1] == len(bias)
        if alone and is_small(x.shape[-1], len(bias), x.dtype):
            loss = last_layer_loss(x, kernel, bias, target)
        else:
            phases = self.canvas.phases
            loss = apply_autograd(_Compare, phases, bias, target, self.offset)
        return loss.reshape(self.batch)


class _Space(torch.autograd.Function):
    """The smallest map from its two halves, each before its bias.

    The first is (blocks, rows, pixels, channels of a block), the second is
    (rows, pixels, channels); their biases likewise, without rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x0: Tensor,
        x1: Tensor,
        bias0: Tensor,
        bias1: Tensor,
        scale: Tensor,
        eps: float,
        shape: tuple[int, int, int],
    ) -> Tensor:
        x0, x1 = x0.contiguous(), x1.contiguous()
        h, w, channels = shape
        y = torch.empty_like(x1)
        ctx.settings = len(x1), h * w, channels, channels // len(x0), eps
        if len(x1):
            tall, wide = _square(channels)
            grid = (triton.cdiv(len(x1) * h * w, tall),)
            inputs = (x0, x1, bias0, bias1, scale, y)
            _space[grid](*inputs, *ctx.settings, tall, wide)
        ctx.save_for_backward(x0, x1, bias0, bias1, scale)
        return y.view(-1, h, w, channels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x0, x1, bias0, bias1, scale = ctx.saved_tensors
        rows, pixels, channels, _, _ = ctx.settings
        dx0, dx1 = torch.empty_like(x0), torch.empty_like(x1)
        tall, wide = _square(channels)
        tiles = triton.cdiv(rows * pixels, tall)
        count = num_programs(x0.device, tiles)
        partial = torch.empty(count, channels, device=x0.device)
        _space_backward[(count,)](
            *(x0, x1, bias0, bias1, scale, grad.contiguous(), dx0, dx1, partial),
            *(*ctx.settings, triton.cdiv(tiles, count), tall, wide),
        )
        dbias = dx1.sum(0, dtype=torch.float32)
        blocked = dbias.view(pixels, len(x0), -1).transpose(0, 1).reshape(-1)
        return (
            *(dx0, dx1, blocked.to(bias0.dtype), dbias.to(bias1.dtype)),
            *(sum_partials(partial).to(scale.dtype), None, None),
        )


def _square(channels: int) -> tuple[int, int]:
    wide = max(16, triton.next_power_of_2(channels))
    return max(1, 1024 // wide), wide


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
        dbias = sum_partials(partial)[: 4 * len(bias)].view(4, -1).sum(0)
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
def _halves(x0, x1, bias0, bias1, row, col, inside, rows, pixels, channels, each):
    """The sum of both halves with their biases, and where they lie."""
    b, pixel = row // pixels, row % pixels
    block, unit = col // each, col % each
    place0 = ((block * rows + b) * pixels + pixel) * each + unit
    place1 = row * channels + col
    v = tl.load(x0 + place0, inside, 0.0).to(tl.float32)
    v += tl.load(x1 + place1, inside, 0.0).to(tl.float32)
    shift = (block * pixels + pixel) * each + unit
    v += tl.load(bias0 + shift, inside, 0.0).to(tl.float32)
    v += tl.load(bias1 + pixel * channels + col, inside, 0.0).to(tl.float32)
    return v, place0, place1


@triton.jit
@no_type_check
def _space(
    x0,
    x1,
    bias0,
    bias1,
    scale,
    y,
    rows,
    pixels,
    channels,
    each,
    eps,
    R: tl.constexpr,
    C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)[None, :]
    inside = (row < rows * pixels) & (col < channels)
    v, _, place = _halves(
        x0, x1, bias0, bias1, row, col, inside, rows, pixels, channels, each
    )
    root = tl.rsqrt(tl.sum(v * v, 1)[:, None] / channels + eps)
    z = v * root * tl.load(scale + col, col < channels, 0.0).to(tl.float32)
    tl.store(y + place, z * tl.sigmoid(z), inside)


@triton.jit
@no_type_check
def _space_backward(
    x0,
    x1,
    bias0,
    bias1,
    scale,
    dy,
    dx0,
    dx1,
    partial,
    rows,
    pixels,
    channels,
    each,
    eps,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    col = tl.arange(0, C)[None, :]
    gain = tl.load(scale + col, col < channels, 0.0).to(tl.float32)
    dgain = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile.to(tl.int64) * R + tl.arange(0, R)[:, None]
        inside = (row < rows * pixels) & (col < channels)
        v, place0, place1 = _halves(
            x0, x1, bias0, bias1, row, col, inside, rows, pixels, channels, each
        )
        dv = tl.load(dy + place1, inside, 0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(v * v, 1)[:, None] / channels + eps)
        v *= root
        z = v * gain
        open = tl.sigmoid(z)
        dv *= open * (1 + z * (1 - open))
        dgain += dv * v
        dv *= gain
        dv = (dv - v * (tl.sum(dv * v, 1)[:, None] / channels)) * root
        tl.store(dx0 + place0, dv, inside)
        tl.store(dx1 + place1, dv, inside)
    col = tl.arange(0, C)
    here = partial + tl.program_id(0) * channels + col
    tl.store(here, tl.sum(dgain, 0), col < channels)


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
