"""The image encoder on coarse grids: see `phases.py` for the convolutions.

A layer is one convolution and one kernel, which pools, adds the bias, normalizes,
activates, and leaves the result in the layout that the next convolution reads. What is
kept for the backward pass is the pooled map and which of the four phases won; where
phases are equal, the first one wins, as in the plain part.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.nets.blocks import Norm
from reverie.nets.conv import Conv, Encoder
from reverie.nets.fast.first_layer import first_layer, is_small
from reverie.nets.fast.launch import differentiable, programs
from reverie.nets.fast.norm_act import is_fusable, layer_norm_act
from reverie.nets.fast.phases import SIDE, phase_kernel
from reverie.nets.fast.sums import add_up

MANY = 96
"""Input channels from which a layer's convolution stays on the fine grid: there the
coarse one, with its 1.44 times more arithmetic, no longer pays. Measured on an H200:
64 to 96 channels take 1.83 ms on the coarse grid and 1.90 on the fine one, 96 to 128
take 0.91 and 0.82."""
ALIGNED = 16
"""The first layer's channels come in multiples of this, for the tensor cores."""


class FastEncoder(Encoder):
    def _vectors(self, obs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        x: Tensor = self.concat(obs, dtype)
        for i in range(self.config.layers):
            layer, norm = getattr(self, f"mlp{i}"), getattr(self, f"mlp{i}norm")
            x = layer_norm_act(layer, norm, self.act, x)
        return x

    def _images(self, images: list[Tensor], dtype: torch.dtype) -> Tensor:
        if not self._is_simple(images, dtype):
            return super()._images(images, dtype)
        last = len(self.config.mults) - 1
        coarse = [i == 0 or self._inputs(i) < MANY for i in range(last + 1)] + [False]
        x = self._first(images, dtype, to_phases=coarse[1])
        for i in range(1, last + 1):
            weight, bias = getattr(self, f"cnn{i}").cast(dtype)
            if coarse[i]:
                weight = phase_kernel(weight, 4 * len(weight), x.shape[-1])
            x = self._layer(i, x, weight, bias, coarse[i], coarse[i + 1])
        return x.reshape(*images[0].shape[:-3], -1)

    def _first(
        self, images: list[Tensor], dtype: torch.dtype, to_phases: bool
    ) -> Tensor:
        conv: Conv = getattr(self, "cnn0")  # noqa: B009
        norm: Norm = getattr(self, "cnn0norm")  # noqa: B009
        weight, bias = conv.cast(dtype)
        x = see(images, *self.canvas, dtype)
        kernel = phase_kernel(weight, 4 * len(bias), x.shape[-1])
        if is_small(weight.shape[1], len(bias), dtype):
            norms = norm.scale, norm.eps
            return first_layer(x, kernel, *norms, bias, to_phases=to_phases)
        return self._layer(0, x, kernel, bias, True, to_phases)

    def _layer(
        self, i: int, x: Tensor, kernel: Tensor, bias: Tensor, coarse: bool, fold: bool
    ) -> Tensor:
        """A convolution on the coarse or the fine grid, and all that follows it."""
        norm: Norm = getattr(self, f"cnn{i}norm")
        x = x.permute(0, 3, 1, 2)
        if coarse:
            x = F.conv2d(x, kernel, padding=1)
        else:
            x = differentiable(_Convolve, x, kernel)
        return pool_norm_act(
            *(x.permute(0, 2, 3, 1), norm.scale, norm.eps, bias),
            from_phases=coarse,
            to_phases=fold,
        )

    def _inputs(self, i: int) -> int:
        layer: Conv = getattr(self, f"cnn{i}")
        return layer.weight.shape[1]

    def _is_simple(self, images: list[Tensor], dtype: torch.dtype) -> bool:
        config = self.config
        norm: Norm = getattr(self, "cnn0norm")  # noqa: B009
        return (
            config.kernel == SIDE
            and not config.strided
            and not config.outer
            and all(image.dtype == torch.uint8 for image in images)
            and is_fusable(norm, self.act, dtype)
        )


def see(
    images: list[UInt8[Tensor, "*b _h _w _c"]],
    height: int,
    width: int,
    dtype: torch.dtype,
) -> Float[Tensor, "n h w c"]:
    """Images side by side on one canvas, centred, as phases of a coarse map."""
    rows = images[0].shape[:-3].numel()
    total = sum(image.shape[-1] for image in images)
    channels = triton.cdiv(4 * total, ALIGNED) * ALIGNED
    shape = (rows, height // 2, width // 2, channels)
    out = torch.empty(shape, dtype=dtype, device=images[0].device)
    offset, size = 0, width // 2 * channels
    for image in images if rows else ():
        _see[(rows, height // 2)](
            *(image.contiguous(), out, size, *image.shape[-3:-1]),
            *(channels, image.shape[-1], total, offset, offset == 0),
            triton.next_power_of_2(size),
        )
        offset += image.shape[-1]
    return out


def pool_norm_act(
    x: Float[Tensor, "b h w c"],
    scale: Float[Tensor, " C"],
    eps: float,
    bias: Float[Tensor, " C"],
    *,
    from_phases: bool,
    to_phases: bool,
) -> Float[Tensor, "b h2 w2 c2"]:
    """The largest of every 2 by 2 pixels, plus bias, normalized and activated."""
    flags = from_phases, to_phases
    return differentiable(_PoolNormAct, x, scale, bias, eps, *flags)


class _Convolve(torch.autograd.Function):
    """A 'same' convolution, computed as the gradient of another one.

    For which the library has the better kernels: 128 to 192 channels on 32x32 pixels
    take 1.8 ms that way on an H200, and 3.2 ms directly.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        mirrored = weight.flip(2, 3).transpose(0, 1)
        mirrored = mirrored.contiguous(memory_format=torch.channels_last)
        return F.conv_transpose2d(x, mirrored, padding=SIDE // 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        pad, one = [SIDE // 2, SIDE // 2], [1, 1]
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            *(grad, x, weight, None, one, pad, one, False, [0, 0], 1),
            [True, True, False],
        )
        return dx, dweight


class _PoolNormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        bias: Tensor,
        eps: float,
        from_phases: bool,
        to_phases: bool,
    ) -> Tensor:
        x, channels = x.contiguous(), len(scale)
        b, h, w, _ = x.shape
        if not from_phases:
            h, w = h // 2, w // 2
        y = x.new_empty(b, h, w, channels)
        keep = any(ctx.needs_input_grad)
        pooled = torch.empty_like(y) if keep else None
        winner = torch.empty_like(y, dtype=torch.uint8) if keep else None
        rows, (tall, wide, warps) = b * h * w, _tile(channels)
        if rows:
            _pool_forward[(triton.cdiv(rows, tall),)](
                *(x, bias, scale, y, pooled, winner, rows, w, channels, eps),
                *(from_phases, to_phases, tall, wide),
                num_warps=warps,
            )
        ctx.save_for_backward(pooled, winner, scale, bias)
        ctx.settings = x.shape, rows, w, eps, from_phases, to_phases
        if to_phases:
            return y.view(b, h // 2, w // 2, 4 * channels)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pooled, winner, scale, bias = ctx.saved_tensors
        shape, rows, w, eps, from_phases, to_phases = ctx.settings
        channels, grad = len(scale), grad.contiguous()
        dx = pooled.new_empty(shape)
        tall, wide, warps = _tile(channels)
        tiles = triton.cdiv(rows, tall)
        count = programs(dx.device, tiles, per_processor=8)
        partial = torch.empty(count, 2, channels, device=dx.device)
        _pool_backward[(count,)](
            *(pooled, winner, bias, scale, grad, dx, partial, rows, w, channels, eps),
            *(triton.cdiv(tiles, count), from_phases, to_phases, tall, wide),
            num_warps=warps,
        )
        dscale, dbias = add_up(partial)
        return dx, dscale.to(scale.dtype), dbias.to(bias.dtype), None, None, None


def _tile(channels: int) -> tuple[int, int, int]:
    """Rows and columns of one program's tile, and its warps."""
    wide = max(16, triton.next_power_of_2(channels))
    return max(1, 1024 // wide), wide, max(4, wide // 512)


@triton.jit
@no_type_check
def _see(
    image,
    out,
    size,
    height,
    width,
    CHANNELS: tl.constexpr,
    COLORS: tl.constexpr,
    TOTAL: tl.constexpr,
    OFFSET: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A coarse row of an image into its channels; the first image blanks the others."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    channel = place % CHANNELS
    phase, color = channel // TOTAL, channel % TOTAL - OFFSET
    y = tl.program_id(1) * 2 + phase // 2
    x = place // CHANNELS * 2 + phase % 2
    mine = (phase < 4) & (color >= 0) & (color < COLORS) & (place < size)
    seen = mine & (y < height) & (x < width)
    image += row * height * width * COLORS
    value = tl.load(image + (y * width + x) * COLORS + color, seen, 0)
    value = tl.where(seen, value.to(tl.float32) / 255 - 0.5, 0.0)
    out += (row * tl.num_programs(1) + tl.program_id(1)) * size
    if FIRST:
        tl.store(out + place, value, place < size)
    else:
        tl.store(out + place, value, mine)


@triton.jit
@no_type_check
def _fine(row, width, channels):
    """Where the first of a coarse pixel's four fine ones lies in a fine map."""
    return (row // width * (4 * width) + row % width * 2).to(tl.int64) * channels


@triton.jit
@no_type_check
def _folded(row, width, channels):
    """Where a pixel lies in the map that is twice as coarse, among its phases."""
    y, x = row // width, row % width
    place = (y // 2 * (width // 2) + x // 2) * 4 + y % 2 * 2 + x % 2
    return place.to(tl.int64) * channels


@triton.jit
@no_type_check
def _pool_forward(
    x,
    bias,
    scale,
    y,
    pooled,
    winner,
    rows,
    width,
    channels,
    eps,
    FROM_PHASES: tl.constexpr,
    TO_PHASES: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)[None, :]
    inside = (row < rows) & (col < channels)
    place = row.to(tl.int64) * channels + col
    if FROM_PHASES:
        source, below = row.to(tl.int64) * (4 * channels) + col, 2 * channels
    else:
        source, below = _fine(row, width, channels) + col, 2 * width * channels
    first = tl.load(x + source, inside, 0.0)
    second = tl.load(x + source + channels, inside, 0.0)
    third = tl.load(x + source + below, inside, 0.0)
    fourth = tl.load(x + source + below + channels, inside, 0.0)
    upper = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    lower = tl.maximum(third, fourth, propagate_nan=tl.PropagateNan.ALL)
    best = tl.maximum(upper, lower, propagate_nan=tl.PropagateNan.ALL)
    if pooled is not None:
        tl.store(pooled + place, best, inside)
        phase = tl.where(best == third, 2, 3)
        phase = tl.where(best == second, 1, phase)
        phase = tl.where(best == first, 0, phase)
        tl.store(winner + place, phase.to(tl.uint8), inside)
    v = best.to(tl.float32) + tl.load(bias + col, col < channels, 0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(v * v, 1)[:, None] / channels + eps)
    z = v * root * tl.load(scale + col, col < channels, 0.0).to(tl.float32)
    if TO_PHASES:
        place = _folded(row, width, channels) + col
    tl.store(y + place, z * tl.sigmoid(z), inside)


@triton.jit
@no_type_check
def _pool_backward(
    pooled,
    winner,
    bias,
    scale,
    dy,
    dx,
    partial,
    rows,
    width,
    channels,
    eps,
    STEPS: tl.constexpr,
    FROM_PHASES: tl.constexpr,
    TO_PHASES: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    col = tl.arange(0, C)[None, :]
    gain = tl.load(scale + col, col < channels, 0.0).to(tl.float32)
    shift = tl.load(bias + col, col < channels, 0.0).to(tl.float32)
    dgain = tl.zeros((R, C), tl.float32)
    dshift = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * R + tl.arange(0, R)[:, None]
        inside = (row < rows) & (col < channels)
        place = row.to(tl.int64) * channels + col
        v = tl.load(pooled + place, inside, 0.0).to(tl.float32) + shift
        phase = tl.load(winner + place, inside, 0)
        if TO_PHASES:
            place = _folded(row, width, channels) + col
        dv = tl.load(dy + place, inside, 0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(v * v, 1)[:, None] / channels + eps)
        v *= root
        z = v * gain
        open = tl.sigmoid(z)
        dv *= open * (1 + z * (1 - open))
        dgain += dv * v
        dv *= gain
        dv = (dv - v * (tl.sum(dv * v, 1)[:, None] / channels)) * root
        dv = tl.where(row < rows, dv, 0.0)
        dshift += dv
        if FROM_PHASES:
            target, below = row.to(tl.int64) * (4 * channels) + col, 2 * channels
        else:
            target, below = _fine(row, width, channels) + col, 2 * width * channels
        tl.store(dx + target, tl.where(phase == 0, dv, 0.0), inside)
        tl.store(dx + target + channels, tl.where(phase == 1, dv, 0.0), inside)
        target += below
        tl.store(dx + target, tl.where(phase == 2, dv, 0.0), inside)
        tl.store(dx + target + channels, tl.where(phase == 3, dv, 0.0), inside)
    here = partial + tl.program_id(0) * 2 * channels + tl.arange(0, C)
    tl.store(here, tl.sum(dgain, 0), tl.arange(0, C) < channels)
    tl.store(here + channels, tl.sum(dshift, 0), tl.arange(0, C) < channels)
