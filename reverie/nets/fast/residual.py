"""Residual blocks in which a norm, an activation and the bias before them are one pass.

A norm is two kernels, one that sums and one that applies, each with several programs
per map so that a few maps fill the GPU too. With the convolution behind it, it forms
one step, which keeps nothing but the map that came in: the backward pass makes the
activation again, in the kernel that reads the map anyway. Biases of the convolutions
inside a block are never added by themselves: the next norm or the sum at the end of the
block does it, and the kernels that go back sum up their gradients on the way.

Doubling the side of a map and convolving is a transposed convolution with 4x4 kernels
at half the resolution, which has 2.25 times less arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.nets.fast.launch import can_launch, differentiable, programs
from reverie.nets.residual import (
    EPS,
    GROUPS,
    Conv,
    Double,
    FrameDecoder,
    FrameEncoder,
    NormSilu,
    Residual,
)

TILE = 4096
"""Entries a program works on at a time."""
WARPS = 8
WIDEST = 1024
"""The most channels that one program holds."""
MOST_PARTS = 16
"""The most programs that share a map."""
PER_PROCESSOR = 8
"""Programs to keep each processor busy with."""


class FastResidual(Residual):
    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w c2"]:
        if not is_fusable(x, self.norm0, self.norm1):
            return super().forward(x)
        norms = (self.norm0.scale, self.norm0.shift, self.norm1.scale, self.norm1.shift)
        weight, last = self.conv1.cast(x.dtype)
        convs = (*self.conv0.cast(x.dtype), weight)
        if self.skip is None:
            return differentiable(_Block, x, *norms, *convs, last, None)
        weight, more = self.skip.cast(x.dtype)
        return differentiable(_Block, x, *norms, *convs, last + more, weight)


class FastFrameEncoder(FrameEncoder):
    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b r s latent"]:
        return _through(self, x)


class FastFrameDecoder(FrameDecoder):
    def forward(self, x: Float[Tensor, "b r s f"]) -> Float[Tensor, "b h w c"]:
        return _through(self, x)


class FastDouble(Double):
    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        if not can_launch(x.device, x.dtype):
            return super().forward(x)
        weight, bias = self.conv.shadow or (self.conv.weight, self.conv.bias)
        weight = doubling_kernel(weight.float()).to(x.dtype)
        bias = bias.to(x.dtype)
        x = x.permute(0, 3, 1, 2)
        y = F.conv_transpose2d(x, weight, bias, stride=2, padding=1)
        return y.permute(0, 2, 3, 1)


def doubling_kernel(weight: Float[Tensor, "o i 3 3"]) -> Float[Tensor, "i o 4 4"]:
    """What a 3x3 kernel on a doubled map is to each pixel of the map itself.

    Along one axis, a pixel reaches four of the finer ones; the middle two see it twice.
    """
    left, centre, right = weight.unbind(-1)
    wide = torch.stack([right, centre + right, left + centre, left], -1)
    above, middle, below = wide.unbind(-2)
    tall = torch.stack([below, middle + below, above + middle, above], -2)
    return tall.transpose(0, 1).contiguous(memory_format=torch.channels_last)


def is_fusable(x: Tensor, *norms: NormSilu) -> bool:
    """Whether the kernels take these maps."""
    widths = [len(norm.scale) for norm in norms]
    fits = all(w <= WIDEST and triton.next_power_of_2(w) == w for w in widths)
    return fits and x.numel() > 0 and can_launch(x.device, x.dtype)


def norm_conv(
    x: Float[Tensor, "b h w c"], norm: NormSilu, conv: Conv
) -> Float[Tensor, "b h w c2"]:
    """`conv(norm(x))`."""
    weight, bias = conv.cast(x.dtype)
    return differentiable(_NormConv, x, norm.scale, norm.shift, weight) + bias


def _through(net: FrameEncoder | FrameDecoder, x: Tensor) -> Tensor:
    """All layers; the last norm goes with the last convolution."""
    *layers, norm, conv = net.layers
    for layer in layers:
        x = layer(x)
    assert isinstance(norm, NormSilu)
    assert isinstance(conv, Conv)
    if not is_fusable(x, norm):
        out: Tensor = conv(norm(x))
        return out
    return norm_conv(x, norm, conv)


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    pad = weight.shape[-1] // 2
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=pad).permute(0, 2, 3, 1)


def _convolve_back(grad: Tensor, x: Tensor, weight: Tensor, of_input: bool) -> Tensor:
    """The gradient of `_convolve`, either of its input or of its weight."""
    pad = weight.shape[-1] // 2
    found = torch.ops.aten.convolution_backward(
        grad.permute(0, 3, 1, 2),
        x.permute(0, 3, 1, 2),
        weight,
        None,
        [1, 1],
        [pad, pad],
        [1, 1],
        False,
        [0, 0],
        1,
        [of_input, not of_input, False],
    )
    out: Tensor = found[0].permute(0, 2, 3, 1) if of_input else found[1]
    return out


class _Sizes:
    """How a batch of maps is shared among programs."""

    def __init__(self, x: Tensor):
        self.rows, height, width, self.channels = x.shape
        self.pixels = height * width
        self.tall = max(1, TILE // self.channels)
        tiles = triton.cdiv(self.pixels, self.tall)
        wanted = programs(x.device, self.rows * tiles, PER_PROCESSOR)
        # a power of two, so that few kinds of kernels have to be built
        parts = triton.next_power_of_2(triton.cdiv(wanted, self.rows))
        self.split = min(tiles, parts, MOST_PARTS)
        self.share = triton.cdiv(tiles, self.split)
        self.grid = (self.rows, self.split)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.pixels, self.share, self.split, self.channels, GROUPS, self.tall)


def _normalize(
    x: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """The activation of a map, and what the norm measured: mean and 1 / deviation."""
    sizes, active = _Sizes(x), torch.empty_like(x)
    sums = x.new_empty(*sizes.grid, 2, sizes.channels, dtype=torch.float32)
    stats = x.new_empty(sizes.rows, 2, sizes.channels, dtype=torch.float32)
    _sum[sizes.grid](x, sums, *sizes.numbers, num_warps=WARPS)
    _apply[sizes.grid](
        *(x, bias, scale, shift, sums, stats, active, EPS, *sizes.numbers),
        num_warps=WARPS,
    )
    return active, stats


class _Slopes(NamedTuple):
    """Gradients of a norm and the convolution behind it."""

    x: Tensor
    scale: Tensor
    shift: Tensor
    weight: Tensor
    bias: Tensor  # the one before the norm, or if there is none, the sum of `more`


def _slopes(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    stats: Tensor,
    weight: Tensor,
    more: Tensor | None = None,
) -> _Slopes:
    """Go back through `conv(norm(x + bias))`; `more` is added to the gradient of x."""
    sizes = _Sizes(x)
    slope = _convolve_back(grad, x, weight, of_input=True).contiguous()
    sums = x.new_empty(*sizes.grid, 2, sizes.channels, dtype=torch.float32)
    active = torch.empty_like(x)
    _sum_back[sizes.grid](
        *(x, bias, scale, shift, stats, slope, active, sums, *sizes.numbers),
        num_warps=WARPS,
    )
    dweight = _convolve_back(grad, active, weight, of_input=False)
    dx = active  # no longer needed; its memory is
    dbias = x.new_empty(*sizes.grid, sizes.channels, dtype=torch.float32)
    _apply_back[sizes.grid](
        *(x, bias, scale, shift, stats, slope, sums, more, dx, dbias),
        *sizes.numbers,
        num_warps=WARPS,
    )
    dshift, dscale = sums.sum((0, 1))
    return _Slopes(dx, dscale, dshift, dweight, dbias.sum((0, 1)))


class _NormConv(torch.autograd.Function):
    """`conv(norm(x))`, without the bias of the convolution."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor
    ) -> Tensor:
        x = x.contiguous()
        active, stats = _normalize(x, None, scale, shift)
        ctx.save_for_backward(x, scale, shift, stats, weight)
        return _convolve(active, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, scale, shift, stats, weight = ctx.saved_tensors
        back = _slopes(grad.contiguous(), x, None, scale, shift, stats, weight)
        return back.x, back.scale, back.shift, back.weight


class _Block(torch.autograd.Function):
    """A residual block; `last` is the bias of all that is summed at its end."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale0: Tensor,
        shift0: Tensor,
        scale1: Tensor,
        shift1: Tensor,
        weight0: Tensor,
        bias0: Tensor,
        weight1: Tensor,
        last: Tensor,
        skip: Tensor | None,
    ) -> Tensor:
        x = x.contiguous()
        active, stats0 = _normalize(x, None, scale0, shift0)
        middle = _convolve(active, weight0).contiguous()
        del active
        active, stats1 = _normalize(middle, bias0, scale1, shift1)
        ctx.save_for_backward(
            *(x, scale0, shift0, stats0, weight0),
            *(middle, bias0, scale1, shift1, stats1, weight1),
            *(last, skip),
        )
        y = _convolve(active, weight1).contiguous()
        beside = x if skip is None else _convolve(x, skip).contiguous()
        _join[(triton.cdiv(y.numel(), TILE),)](
            *(beside, y, last, y, y.numel(), len(last), TILE), num_warps=WARPS
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, last, skip = ctx.saved_tensors
        x, scale0, shift0, stats0, weight0 = saved[:5]
        middle, bias0, scale1, shift1, stats1, weight1 = saved[5:]
        grad = grad.contiguous()
        back1 = _slopes(grad, middle, bias0, scale1, shift1, stats1, weight1)
        dskip, beside = None, grad
        if skip is not None:
            dskip = _convolve_back(grad, x, skip, of_input=False)
            beside = _convolve_back(grad, x, skip, of_input=True).contiguous()
        back0 = _slopes(back1.x, x, None, scale0, shift0, stats0, weight0, more=beside)
        dlast = back0.bias
        if skip is not None:
            dlast = grad.sum((0, 1, 2), dtype=torch.float32)
        return (
            *(back0.x, back0.scale, back0.shift, back1.scale, back1.shift),
            *(back0.weight, back1.bias.to(bias0.dtype), back1.weight),
            *(dlast.to(last.dtype), dskip),
        )


@triton.jit
@no_type_check
def _join(left, right, bias, out, size, channels, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < size
    total = tl.load(left + at, mask, 0.0).to(tl.float32)
    total += tl.load(right + at, mask, 0.0).to(tl.float32)
    total += tl.load(bias + at % channels, mask, 0.0).to(tl.float32)
    tl.store(out + at, total, mask)


@triton.jit
@no_type_check
def _grouped(v, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """For each channel the sum over its group."""
    sums = tl.sum(tl.reshape(v, (GROUPS, CHANNELS // GROUPS)), 1)
    wide = tl.broadcast_to(sums[:, None], (GROUPS, CHANNELS // GROUPS))
    return tl.reshape(wide, (CHANNELS,))


@triton.jit
@no_type_check
def _sum(
    x,
    sums,
    pixels,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
):
    """Sums and squares of each channel, less the first pixel's value.

    Maps may be almost constant; so, their values must not be squared as they are.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, CHANNELS)[None, :]
    here = x + row.to(tl.int64) * pixels * CHANNELS
    first = tl.load(here + col).to(tl.float32)
    total = tl.zeros((TALL, CHANNELS), tl.float32)
    square = tl.zeros((TALL, CHANNELS), tl.float32)
    for i in range(SHARE):
        pixel = (part * SHARE + i) * TALL + tl.arange(0, TALL)[:, None]
        inside = pixel < pixels
        v = tl.load(here + pixel * CHANNELS + col, inside, 0.0).to(tl.float32)
        v = tl.where(inside, v - first, 0.0)
        total += v
        square += v * v
    at = sums + (row * SPLIT + part) * 2 * CHANNELS + tl.arange(0, CHANNELS)
    tl.store(at, tl.sum(total, 0))
    tl.store(at + CHANNELS, tl.sum(square, 0))


@triton.jit
@no_type_check
def _apply(
    x,
    bias,
    scale,
    shift,
    sums,
    stats,
    out,
    eps,
    pixels,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
):
    """Finish mean and deviation, keep them, normalize and activate."""
    row, part = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, CHANNELS)
    start_of_row = row.to(tl.int64) * pixels * CHANNELS
    here = x + start_of_row
    total = tl.zeros((CHANNELS,), tl.float32)
    square = tl.zeros((CHANNELS,), tl.float32)
    for i in range(SPLIT):
        at = sums + (row * SPLIT + i) * 2 * CHANNELS + col
        total += tl.load(at)
        square += tl.load(at + CHANNELS)
    offset = tl.zeros((CHANNELS,), tl.float32)
    if bias is not None:
        offset += tl.load(bias + col).to(tl.float32)
    mean = total / pixels  # less the first pixel
    own = square - total * mean  # squared deviations from the channel's own mean
    mean += tl.load(here + col).to(tl.float32) + offset
    middle = _grouped(mean, CHANNELS, GROUPS) / (CHANNELS // GROUPS)
    away = mean - middle
    spread = _grouped(own + pixels * away * away, CHANNELS, GROUPS)
    root = tl.rsqrt(spread / (pixels * (CHANNELS // GROUPS)) + eps)
    if part == 0:
        tl.store(stats + row * 2 * CHANNELS + col, middle)
        tl.store(stats + row * 2 * CHANNELS + CHANNELS + col, root)
    gain = root * tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32)
    lift += (offset - middle) * gain
    for i in range(SHARE):
        pixel = (part * SHARE + i) * TALL + tl.arange(0, TALL)[:, None]
        inside = pixel < pixels
        place = pixel * CHANNELS + col[None, :]
        v = tl.load(here + place, inside, 0.0).to(tl.float32)
        z = v * gain[None, :] + lift[None, :]
        tl.store(out + start_of_row + place, z * tl.sigmoid(z), inside)


@triton.jit
@no_type_check
def _sum_back(
    x,
    bias,
    scale,
    shift,
    stats,
    slope,
    out,
    sums,
    pixels,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
):
    """Gradients of shift and scale of each map, and the activation once more."""
    row, part = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, CHANNELS)
    start_of_row = row.to(tl.int64) * pixels * CHANNELS
    middle = tl.load(stats + row * 2 * CHANNELS + col)
    root = tl.load(stats + row * 2 * CHANNELS + CHANNELS + col)
    if bias is not None:
        middle -= tl.load(bias + col).to(tl.float32)
    gain = tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32)
    dlift = tl.zeros((TALL, CHANNELS), tl.float32)
    dgain = tl.zeros((TALL, CHANNELS), tl.float32)
    for i in range(SHARE):
        pixel = (part * SHARE + i) * TALL + tl.arange(0, TALL)[:, None]
        inside = pixel < pixels
        place = start_of_row + pixel * CHANNELS + col[None, :]
        v = tl.load(x + place, inside, 0.0).to(tl.float32)
        v = (v - middle[None, :]) * root[None, :]
        z = v * gain[None, :] + lift[None, :]
        open = tl.sigmoid(z)
        tl.store(out + place, z * open, inside)
        dz = tl.load(slope + place, inside, 0.0).to(tl.float32)
        dz *= open * (1 + z * (1 - open))
        dlift += dz
        dgain += dz * v
    at = sums + (row * SPLIT + part) * 2 * CHANNELS + col
    tl.store(at, tl.sum(dlift, 0))
    tl.store(at + CHANNELS, tl.sum(dgain, 0))


@triton.jit
@no_type_check
def _apply_back(
    x,
    bias,
    scale,
    shift,
    stats,
    slope,
    sums,
    more,
    dx,
    dbias,
    pixels,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
):
    """The gradient of the map, and the sum over pixels of it, or of `more`."""
    row, part = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, CHANNELS)
    start_of_row = row.to(tl.int64) * pixels * CHANNELS
    dlift = tl.zeros((CHANNELS,), tl.float32)
    dgain = tl.zeros((CHANNELS,), tl.float32)
    for i in range(SPLIT):
        at = sums + (row * SPLIT + i) * 2 * CHANNELS + col
        dlift += tl.load(at)
        dgain += tl.load(at + CHANNELS)
    middle = tl.load(stats + row * 2 * CHANNELS + col)
    root = tl.load(stats + row * 2 * CHANNELS + CHANNELS + col)
    if bias is not None:
        middle -= tl.load(bias + col).to(tl.float32)
    gain = tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32)
    count = pixels * (CHANNELS // GROUPS)
    level = _grouped(dlift * gain, CHANNELS, GROUPS) / count
    tilt = _grouped(dgain * gain, CHANNELS, GROUPS) / count
    total = tl.zeros((TALL, CHANNELS), tl.float32)
    for i in range(SHARE):
        pixel = (part * SHARE + i) * TALL + tl.arange(0, TALL)[:, None]
        inside = pixel < pixels
        place = start_of_row + pixel * CHANNELS + col[None, :]
        v = tl.load(x + place, inside, 0.0).to(tl.float32)
        v = (v - middle[None, :]) * root[None, :]
        z = v * gain[None, :] + lift[None, :]
        open = tl.sigmoid(z)
        dz = tl.load(slope + place, inside, 0.0).to(tl.float32)
        dz *= open * (1 + z * (1 - open)) * gain[None, :]
        dv = (dz - level[None, :] - v * tilt[None, :]) * root[None, :]
        dv = tl.where(inside, dv, 0.0)
        if more is not None:
            extra = tl.load(more + place, inside, 0.0).to(tl.float32)
            tl.store(dx + place, dv + extra, inside)
            total += extra
        else:
            tl.store(dx + place, dv, inside)
            total += dv
    if (bias is not None) or (more is not None):
        tl.store(dbias + (row * SPLIT + part) * CHANNELS + col, tl.sum(total, 0))
