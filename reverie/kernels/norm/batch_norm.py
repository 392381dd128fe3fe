"""Batch norm and ELU in two kernels each way, for maps whose channels lie together.

One kernel sums over all pixels, one applies. For the backward pass nothing needs to be
kept but the map that came in: the activation is made again, in the kernels that read
the map anyway. A bias in front of a norm changes nothing but the running mean, so the
convolutions of the networks (`nets/strided.py`) run without theirs.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from reverie.kernels.conv import im2col
from reverie.kernels.launch import apply_autograd, can_launch, num_programs
from reverie.kernels.sums import sum_partials
from reverie.nets.strided import ImageDecoder, ImageEncoder

TILE = 4096
"""Entries a program works on at a time."""
WARPS = 8
WIDEST = 1024
"""The most channels that one program holds."""
PER_PROCESSOR = 8
"""Programs to keep each processor busy with."""


class FastImageEncoder(ImageEncoder):
    """The same network; see the top of this file."""

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n E"]:
        if not (self.training and _fits(self)):
            return super().forward(x)
        for i in range(self.layers):
            conv, norm = getattr(self, f"conv{i}"), getattr(self, f"norm{i}")
            if _is_narrow(conv) and not x.requires_grad:
                x = im2col.halve(x.to(_precision(x)), conv.weight)
            else:
                x = F.conv2d(x, conv.weight, None, conv.stride, conv.padding)
            x = batch_norm_elu(x, norm, conv.bias)
        return x.flatten(1)


class FastImageDecoder(ImageDecoder):
    """The same network; see the top of this file."""

    def forward(self, x: Float[Tensor, "n E"]) -> Float[Tensor, "n c h w"]:
        if not (self.training and _fits(self)):
            return super().forward(x)
        x = x[..., None, None].contiguous(memory_format=torch.channels_last)
        for i in range(self.layers - 1):
            conv, norm = getattr(self, f"conv{i}"), getattr(self, f"norm{i}")
            x = F.conv_transpose2d(x, conv.weight, None, conv.stride, conv.padding)
            x = batch_norm_elu(x, norm, conv.bias)
        last = getattr(self, f"conv{self.layers - 1}")
        if _is_narrow(last):
            image = im2col.double(x.to(_precision(x)), last.weight)
            return torch.add(image, last.bias.to(image.dtype)[:, None, None])
        picture: Tensor = last(x)
        return picture


def _is_narrow(conv: nn.Conv2d | nn.ConvTranspose2d) -> bool:
    """Whether a picture is on one side of the layer, and `patches.py` takes it."""
    form = conv.kernel_size[0], conv.stride[0], conv.padding[0]
    colors = conv.weight.shape[1]  # of either kind
    return form == (4, 2, 1) and colors <= im2col.COLORS


def _precision(x: Tensor) -> torch.dtype:
    """What a convolution would be computed in here."""
    kind = x.device.type
    return (
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    )


def _fits(net: nn.Module) -> bool:
    weight = next(net.parameters())  # of the first convolution
    units = max(weight.shape[:2])
    narrow = triton.next_power_of_2(units) == units <= WIDEST
    return narrow and can_launch(weight.device, weight.dtype)


def batch_norm_elu(
    x: Float[Tensor, "n c h w"], norm: nn.BatchNorm2d, bias: Tensor | None
) -> Float[Tensor, "n c h w"]:
    """Normalize what is in the batch as `norm` does in training, then activate.

    `bias` is what should have been added before; its gradient is zero.
    """
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    return apply_autograd(_NormElu, x, norm.weight, norm.bias, bias, norm)


class _NormElu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        bias: Tensor | None,
        norm: nn.BatchNorm2d,
    ) -> Tensor:
        x = x.permute(0, 2, 3, 1).contiguous()
        sizes, active = _Sizes(x), torch.empty_like(x)
        sums = x.new_empty(sizes.count, 2, sizes.channels, dtype=torch.float32)
        stats = torch.empty_like(sums[0])
        _sum[(sizes.count,)](x, sums, *sizes.numbers, num_warps=WARPS)
        running = (norm.running_mean, norm.running_var, norm.momentum, norm.eps)
        _apply[(sizes.count,)](
            *(x, sum_partials(sums), scale, shift, bias, stats, *running, active),
            *sizes.numbers,
            num_warps=WARPS,
        )
        ctx.save_for_backward(x, stats, scale, shift)
        ctx.has_bias = bias is not None
        return active.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, stats, scale, shift = ctx.saved_tensors
        slope = slope.permute(0, 2, 3, 1).contiguous()
        sizes, dx = _Sizes(x), torch.empty_like(x)
        sums = x.new_empty(sizes.count, 2, sizes.channels, dtype=torch.float32)
        given = (x, slope, stats, scale, shift)
        _sum_back[(sizes.count,)](*given, sums, *sizes.numbers, num_warps=WARPS)
        total = sum_partials(sums)
        _apply_back[(sizes.count,)](*given, total, dx, *sizes.numbers, num_warps=WARPS)
        dbias = torch.zeros_like(scale) if ctx.has_bias else None
        return dx.permute(0, 3, 1, 2), total[1], total[0], dbias, None


class _Sizes:
    """How the pixels of all maps are shared among programs."""

    def __init__(self, x: Tensor):
        self.channels = x.shape[-1]
        self.pixels = x.numel() // self.channels
        self.tall = max(1, TILE // self.channels)
        tiles = triton.cdiv(self.pixels, self.tall)
        self.share = triton.cdiv(tiles, num_programs(x.device, tiles, PER_PROCESSOR))
        self.count = triton.cdiv(tiles, self.share)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.pixels, self.share, self.channels, self.tall)


@triton.jit
@no_type_check
def _sum(x, sums, pixels, share, C: tl.constexpr, R: tl.constexpr):
    """Sums of entries and squares, as seen from the first pixel: they stay small."""
    program = tl.program_id(0)
    col = tl.arange(0, C)[None, :]
    origin = tl.load(x + col).to(tl.float32)
    first = tl.zeros((R, C), tl.float32)
    second = tl.zeros((R, C), tl.float32)
    for i in range(share):
        row = ((program * share + i) * R + tl.arange(0, R)[:, None]).to(tl.int64)
        inside = (row < pixels) & (col < C)
        v = tl.load(x + row * C + col, inside, 0.0).to(tl.float32)
        v = tl.where(inside, v - origin, 0.0)
        first += v
        second += v * v
    at = sums + program * 2 * C + tl.arange(0, C)
    tl.store(at, tl.sum(first, 0))
    tl.store(at + C, tl.sum(second, 0))


@triton.jit
@no_type_check
def _apply(
    x,
    sums,
    scale,
    shift,
    bias,
    stats,
    running_mean,
    running_var,
    momentum,
    eps,
    active,
    pixels,
    share,
    C: tl.constexpr,
    R: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.arange(0, C)
    mean = tl.load(sums + col) / pixels
    var = tl.maximum(tl.load(sums + C + col) / pixels - mean * mean, 0.0)
    mean += tl.load(x + col).to(tl.float32)
    root = 1 / tl.sqrt(var + eps)
    if program == 0:
        tl.store(stats + col, mean)
        tl.store(stats + C + col, root)
        seen = mean
        if bias is not None:
            seen += tl.load(bias + col)
        old = tl.load(running_mean + col)
        tl.store(running_mean + col, old + momentum * (seen - old))
        old = tl.load(running_var + col)
        fair = var * (pixels / tl.maximum(pixels - 1.0, 1.0))
        tl.store(running_var + col, old + momentum * (fair - old))
    factor = tl.load(scale + col) * root
    offset = tl.load(shift + col) - mean * factor
    for i in range(share):
        row = ((program * share + i) * R + tl.arange(0, R)[:, None]).to(tl.int64)
        inside = (row < pixels) & (col < C)[None, :]
        at = row * C + col[None, :]
        v = tl.load(x + at, inside, 0.0).to(tl.float32)
        v = v * factor[None, :] + offset[None, :]
        v = tl.where(v > 0, v, tl.exp(tl.minimum(v, 0.0)) - 1)
        tl.store(active + at, v.to(active.dtype.element_ty), inside)


@triton.jit
@no_type_check
def _slope(x, slope, at, inside, mean, root, factor, offset):
    """The normalized entries, and the gradient where they were activated."""
    v = tl.load(x + at, inside, 0.0).to(tl.float32)
    y = v * factor[None, :] + offset[None, :]
    d = tl.load(slope + at, inside, 0.0).to(tl.float32)
    d *= tl.where(y > 0, 1.0, tl.exp(tl.minimum(y, 0.0)))
    return (v - mean[None, :]) * root[None, :], d


@triton.jit
@no_type_check
def _sum_back(
    x, slope, stats, scale, shift, sums, pixels, share, C: tl.constexpr, R: tl.constexpr
):
    program = tl.program_id(0)
    col = tl.arange(0, C)
    mean, root = tl.load(stats + col), tl.load(stats + C + col)
    factor = tl.load(scale + col) * root
    offset = tl.load(shift + col) - mean * factor
    first = tl.zeros((R, C), tl.float32)
    second = tl.zeros((R, C), tl.float32)
    for i in range(share):
        row = ((program * share + i) * R + tl.arange(0, R)[:, None]).to(tl.int64)
        inside = (row < pixels) & (col < C)[None, :]
        at = row * C + col[None, :]
        normal, d = _slope(x, slope, at, inside, mean, root, factor, offset)
        first += d
        second += d * normal
    to = sums + program * 2 * C + col
    tl.store(to, tl.sum(first, 0))
    tl.store(to + C, tl.sum(second, 0))


@triton.jit
@no_type_check
def _apply_back(
    x,
    slope,
    stats,
    scale,
    shift,
    sums,
    dx,
    pixels,
    share,
    C: tl.constexpr,
    R: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.arange(0, C)
    mean, root = tl.load(stats + col), tl.load(stats + C + col)
    factor = tl.load(scale + col) * root
    offset = tl.load(shift + col) - mean * factor
    first, second = tl.load(sums + col) / pixels, tl.load(sums + C + col) / pixels
    for i in range(share):
        row = ((program * share + i) * R + tl.arange(0, R)[:, None]).to(tl.int64)
        inside = (row < pixels) & (col < C)[None, :]
        at = row * C + col[None, :]
        normal, d = _slope(x, slope, at, inside, mean, root, factor, offset)
        d = factor[None, :] * (d - first[None, :] - normal * second[None, :])
        tl.store(dx + at, d.to(dx.dtype.element_ty), inside)
