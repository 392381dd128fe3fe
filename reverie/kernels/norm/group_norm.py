"""Group norm, activation and convolution in a row, for maps `(rows, h, w, c)`.

A norm is two kernels, one that sums and one that applies, each with several programs
per map so that a few maps fill the GPU too. For the backward pass nothing needs to be
kept but the map that came in: the activation is made again, in the kernel that reads
the map anyway.

Where there is less to do, launching kernels is what takes time, and then a program does
all of it for some groups of one map: small maps are read once, and of a few large ones
the second reading finds them in the cache.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.launch import can_launch, num_programs
from reverie.kernels.norm.cluster_group_norm import launch as cluster_group_norm
from reverie.kernels.sums import sum_partials
from reverie.nets.residual import EPS, GROUPS

TILE = 2048
"""Entries a program works on at a time: eight for each thread, as memory likes it, and
few enough registers for several programs on a processor."""
WARPS = 8
WIDEST = 1024
"""The most channels that one program holds."""
MOST_PARTS = 16
"""The most programs that share a map."""
PER_PROCESSOR = 8
"""Programs to keep each processor busy with."""
WHOLE = 4096
"""Entries of a map that a program holds when it works on whole groups."""
STAGES: tl.constexpr = tl.constexpr(3)
"""Pieces of a map that are on their way from memory while one is worked on, and it."""
SECTOR = 32
"""Bytes that lie together in memory: fewer at a time are not worth reading."""
FEW_ROWS = 256
"""Maps up to which large ones are worth less programs."""


class Groups(NamedTuple):
    """How programs share maps of which each does whole groups: grid and sizes."""

    rows: int
    pixels: int
    channels: int
    wide: int  # channels of a program
    tall: int  # pixels it holds
    share: int  # how often it takes so many

    @property
    def grid(self) -> tuple[int, int]:
        return (self.rows, self.channels // self.wide)

    @property
    def numbers(self) -> tuple[int, ...]:
        per = self.channels // GROUPS
        return (self.pixels, self.share, self.channels, self.wide, per, self.tall)

    @property
    def warps(self) -> int:
        return 8 if self.wide * self.tall > 2048 else 4


def whole_groups(x: Tensor) -> Groups | None:
    """How to share these maps by groups, if that is the better way."""
    rows, height, width, channels = x.shape
    pixels = height * width
    narrow = min(channels, max(SECTOR // x.element_size(), channels // GROUPS))
    tall = triton.next_power_of_2(pixels)
    if narrow * tall > WHOLE:
        if rows > FEW_ROWS:
            return None
        tall = WHOLE // narrow
    wide = narrow
    enough = num_programs(x.device, rows * channels, 2)
    while 2 * wide * tall <= WHOLE and rows * channels // (2 * wide) >= enough:
        wide *= 2
    wide = min(wide, channels)
    return Groups(rows, pixels, channels, wide, tall, triton.cdiv(pixels, tall))


def fits(x: Tensor, *channels: int) -> bool:
    """Whether the kernels take such maps, with these numbers of channels."""
    powers = all(triton.next_power_of_2(c) == c and c <= WIDEST for c in channels)
    return powers and x.numel() > 0 and can_launch(x.device, x.dtype)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    pad = weight.shape[-1] // 2
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=pad).permute(0, 2, 3, 1)


def convolve_back(grad: Tensor, x: Tensor, weight: Tensor, of_input: bool) -> Tensor:
    """The gradient of `convolve`, either of its input or of its weight."""
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


class Sizes:
    """How a batch of maps is shared among programs."""

    def __init__(self, x: Tensor, tall: int | None = None, per_sm: int = PER_PROCESSOR):
        self.rows, height, width, self.channels = x.shape
        self.pixels = height * width
        self.tall = tall or max(1, TILE // self.channels)
        tiles = triton.cdiv(self.pixels, self.tall)
        wanted = num_programs(x.device, self.rows * tiles, per_sm)
        # a power of two, so that few kinds of kernels have to be built
        parts = triton.next_power_of_2(triton.cdiv(wanted, self.rows))
        self.split = min(tiles, parts, MOST_PARTS)
        self.share = triton.cdiv(tiles, self.split)
        self.grid = (self.rows, self.split)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.pixels, self.share, self.split, self.channels, GROUPS, self.tall)


def sum_up(x: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Sums over parts of each map, and room for what they say about the whole."""
    sums = x.new_empty(*sizes.grid, 2, sizes.channels, dtype=torch.float32)
    stats = x.new_empty(sizes.rows, 2, sizes.channels, dtype=torch.float32)
    _sum[sizes.grid](x, sums, *sizes.numbers, num_warps=WARPS)
    return sums, stats


def normalize(
    x: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """The activation of a map, and what the norm measured: mean and 1 / deviation."""
    plan = cluster_group_norm.plan_for(x, bias, cluster_group_norm.FORWARD)
    if plan is not None:
        try:
            return cluster_group_norm.normalize(x, bias, scale, shift, plan)
        except nvrtc.Unavailable as error:
            cluster_group_norm.refuse(error)
    active, groups = torch.empty_like(x), whole_groups(x)
    if groups is not None:
        stats = x.new_empty(groups.rows, 2, groups.channels, dtype=torch.float32)
        _norm[groups.grid](
            *(x, bias, scale, shift, stats, active, EPS, *groups.numbers),
            num_warps=groups.warps,
        )
        return active, stats
    sizes = Sizes(x)
    sums, stats = sum_up(x, sizes)
    _apply[sizes.grid](
        *(x, bias, scale, shift, sums, stats, active, EPS, *sizes.numbers),
        num_warps=WARPS,
    )
    return active, stats


class Slopes(NamedTuple):
    """Gradients of a norm and the convolution behind it."""

    x: Tensor
    scale: Tensor
    shift: Tensor
    weight: Tensor
    bias: Tensor  # the one before the norm
    more: Tensor  # the sum over all pixels of what was added


def slopes(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    stats: Tensor,
    weight: Tensor,
    more: Tensor | None = None,
) -> Slopes:
    """Go back through `conv(norm(x + bias))`; `more` is added to the gradient of x."""
    slope = convolve_back(grad, x, weight, of_input=True).contiguous()
    plan = cluster_group_norm.plan_for(x, bias, cluster_group_norm.BACKWARD)
    if plan is not None:
        kept = (x, bias, scale, shift, stats)
        try:
            active, sums = cluster_group_norm.go_back(*kept, slope, more, plan)
        except nvrtc.Unavailable as error:
            cluster_group_norm.refuse(error)
        else:
            dweight = convolve_back(grad, active, weight, of_input=False)
            dshift, dscale, dbias, dmore = sum_partials(sums)
            return Slopes(slope, dscale, dshift, dweight, dbias, dmore)
    groups, active = whole_groups(x), torch.empty_like(x)
    if groups is not None and groups.share == 1:
        dx = torch.empty_like(x)
        sums = x.new_empty(groups.rows, 4, groups.channels, dtype=torch.float32)
        _norm_back[groups.grid](
            *(x, bias, scale, shift, stats, slope, more, active, dx, sums),
            *groups.numbers,
            num_warps=groups.warps,
        )
        dweight = convolve_back(grad, active, weight, of_input=False)
        dshift, dscale, dbias, dmore = sum_partials(sums)
        return Slopes(dx, dscale, dshift, dweight, dbias, dmore)
    sizes = Sizes(x)
    sums = x.new_empty(*sizes.grid, 4, sizes.channels, dtype=torch.float32)
    _sum_back[sizes.grid](
        *(x, bias, scale, shift, stats, slope, active, sums, *sizes.numbers),
        num_warps=WARPS,
    )
    dweight = convolve_back(grad, active, weight, of_input=False)
    dx = active  # no longer needed; its memory is
    _apply_back[sizes.grid](
        *(x, bias, scale, shift, stats, slope, sums, more, dx, *sizes.numbers),
        num_warps=WARPS,
    )
    dshift, dscale, dbias, dmore = sum_partials(sums.flatten(0, 1))
    return Slopes(dx, dscale, dshift, dweight, dbias, dmore)


@triton.jit
@no_type_check
def grouped(v, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
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
    for i in tl.range(0, SHARE, num_stages=STAGES):
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
def measure(
    x,
    bias,
    sums,
    stats,
    row,
    part,
    eps,
    pixels,
    SPLIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Mean and 1 / deviation of a map (at x) plus bias, which the first part keeps."""
    col = tl.arange(0, CHANNELS)
    total = tl.zeros((CHANNELS,), tl.float32)
    square = tl.zeros((CHANNELS,), tl.float32)
    for i in range(SPLIT):
        at = sums + (row * SPLIT + i) * 2 * CHANNELS + col
        total += tl.load(at)
        square += tl.load(at + CHANNELS)
    mean = total / pixels  # less the first pixel
    own = square - total * mean  # squared deviations from the channel's own mean
    mean += tl.load(x + col).to(tl.float32)
    if bias is not None:
        mean += tl.load(bias + col).to(tl.float32)
    middle = grouped(mean, CHANNELS, GROUPS) / (CHANNELS // GROUPS)
    away = mean - middle
    spread = grouped(own + pixels * away * away, CHANNELS, GROUPS)
    root = tl.rsqrt(spread / (pixels * (CHANNELS // GROUPS)) + eps)
    if part == 0:
        tl.store(stats + row * 2 * CHANNELS + col, middle)
        tl.store(stats + row * 2 * CHANNELS + CHANNELS + col, root)
    return middle, root


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
    middle, root = measure(
        here, bias, sums, stats, row, part, eps, pixels, SPLIT, CHANNELS, GROUPS
    )
    if bias is not None:
        middle -= tl.load(bias + col).to(tl.float32)
    gain = root * tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32) - middle * gain
    for i in tl.range(0, SHARE, num_stages=STAGES):
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
    for i in tl.range(0, SHARE, num_stages=STAGES):
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
    at = sums + (row * SPLIT + part) * 4 * CHANNELS + col
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
    pixels,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
):
    """The gradient of the map, and the sums over pixels of its two parts."""
    row, part = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, CHANNELS)
    start_of_row = row.to(tl.int64) * pixels * CHANNELS
    dlift = tl.zeros((CHANNELS,), tl.float32)
    dgain = tl.zeros((CHANNELS,), tl.float32)
    for i in range(SPLIT):
        at = sums + (row * SPLIT + i) * 4 * CHANNELS + col
        dlift += tl.load(at)
        dgain += tl.load(at + CHANNELS)
    middle = tl.load(stats + row * 2 * CHANNELS + col)
    root = tl.load(stats + row * 2 * CHANNELS + CHANNELS + col)
    if bias is not None:
        middle -= tl.load(bias + col).to(tl.float32)
    gain = tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32)
    count = pixels * (CHANNELS // GROUPS)
    level = grouped(dlift * gain, CHANNELS, GROUPS) / count
    tilt = grouped(dgain * gain, CHANNELS, GROUPS) / count
    own = tl.zeros((TALL, CHANNELS), tl.float32)
    other = tl.zeros((TALL, CHANNELS), tl.float32)
    for i in tl.range(0, SHARE, num_stages=STAGES):
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
        if bias is not None:
            own += dv
        if more is not None:
            extra = tl.load(more + place, inside, 0.0).to(tl.float32)
            other += extra
            dv += extra
        tl.store(dx + place, dv, inside)
    at = sums + ((row * SPLIT + part) * 4 + 2) * CHANNELS + col
    tl.store(at, tl.sum(own, 0))
    tl.store(at + CHANNELS, tl.sum(other, 0))


@triton.jit
@no_type_check
def _norm(
    x,
    bias,
    scale,
    shift,
    stats,
    out,
    eps,
    pixels,
    SHARE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
    PER: tl.constexpr,
    TALL: tl.constexpr,
):
    """Everything at once for some groups of one map."""
    row, part = tl.program_id(0), tl.program_id(1)
    col = part * WIDE + tl.arange(0, WIDE)
    start_of_row = row.to(tl.int64) * pixels * CHANNELS
    here = x + start_of_row
    first = tl.load(here + col).to(tl.float32)
    total = tl.zeros((TALL, WIDE), tl.float32)
    square = tl.zeros((TALL, WIDE), tl.float32)
    for i in tl.range(0, SHARE, num_stages=STAGES):
        pixel = i * TALL + tl.arange(0, TALL)[:, None]
        inside = pixel < pixels
        v = tl.load(here + pixel * CHANNELS + col[None, :], inside, 0.0).to(tl.float32)
        v = tl.where(inside, v - first[None, :], 0.0)
        total += v
        square += v * v
    sums = tl.sum(total, 0)
    mean = sums / pixels  # less the first pixel
    own = tl.sum(square, 0) - sums * mean
    mean += first
    if bias is not None:
        mean += tl.load(bias + col).to(tl.float32)
    middle = grouped(mean, WIDE, WIDE // PER) / PER
    away = mean - middle
    spread = grouped(own + pixels * away * away, WIDE, WIDE // PER)
    root = tl.rsqrt(spread / (pixels * PER) + eps)
    tl.store(stats + row * 2 * CHANNELS + col, middle)
    tl.store(stats + row * 2 * CHANNELS + CHANNELS + col, root)
    if bias is not None:
        middle -= tl.load(bias + col).to(tl.float32)
    gain = root * tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32) - middle * gain
    for i in tl.range(0, SHARE, num_stages=STAGES):
        pixel = i * TALL + tl.arange(0, TALL)[:, None]
        inside = pixel < pixels
        place = pixel * CHANNELS + col[None, :]
        v = tl.load(here + place, inside, 0.0).to(tl.float32)
        z = v * gain[None, :] + lift[None, :]
        tl.store(out + start_of_row + place, z * tl.sigmoid(z), inside)


@triton.jit
@no_type_check
def _norm_back(
    x,
    bias,
    scale,
    shift,
    stats,
    slope,
    more,
    out,
    dx,
    sums,
    pixels,
    SHARE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
    PER: tl.constexpr,
    TALL: tl.constexpr,
):
    """Everything at once on the way back, for groups that a program holds."""
    row, part = tl.program_id(0), tl.program_id(1)
    col = part * WIDE + tl.arange(0, WIDE)
    middle = tl.load(stats + row * 2 * CHANNELS + col)
    root = tl.load(stats + row * 2 * CHANNELS + CHANNELS + col)
    if bias is not None:
        middle -= tl.load(bias + col).to(tl.float32)
    gain = tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32)
    pixel = tl.arange(0, TALL)[:, None]
    inside = pixel < pixels
    start_of_row = row.to(tl.int64) * pixels * CHANNELS
    place = start_of_row + pixel * CHANNELS + col[None, :]
    v = tl.load(x + place, inside, 0.0).to(tl.float32)
    v = (v - middle[None, :]) * root[None, :]
    z = v * gain[None, :] + lift[None, :]
    open = tl.sigmoid(z)
    tl.store(out + place, z * open, inside)
    dz = tl.load(slope + place, inside, 0.0).to(tl.float32)
    dz *= open * (1 + z * (1 - open))
    dlift, dgain = tl.sum(dz, 0), tl.sum(dz * v, 0)
    count = pixels * PER
    level = grouped(dlift * gain, WIDE, WIDE // PER) / count
    tilt = grouped(dgain * gain, WIDE, WIDE // PER) / count
    dv = (dz * gain[None, :] - level[None, :] - v * tilt[None, :]) * root[None, :]
    dv = tl.where(inside, dv, 0.0)
    at = sums + row * 4 * CHANNELS + col
    tl.store(at, dlift)
    tl.store(at + CHANNELS, dgain)
    tl.store(at + 2 * CHANNELS, tl.sum(dv, 0))
    if more is not None:
        extra = tl.load(more + place, inside, 0.0).to(tl.float32)
        tl.store(at + 3 * CHANNELS, tl.sum(extra, 0))
        dv += extra
    else:
        tl.store(at + 3 * CHANNELS, dlift * 0)
    tl.store(dx + place, dv, inside)
