"""3x3 convolutions that have few channels on one side: the first and last of a network.

Libraries are slow at them (a fifth of what the memory allows). With k = 9 * few taps,
the neighbourhood of a pixel is a row of a matrix that a kernel gathers from the narrow
map as it goes, and the convolution is a matrix product on the tensor cores:

- from few to many channels, the product of those rows with the weights is the result;
- from many to few, each pixel is first multiplied with all weights, giving what it
  contributes to each of its neighbours, and a second kernel adds up contributions. The
  norm and activation before such a layer happen in the same kernels, so that the active
  map never exists.
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

from reverie.kernels.launch import apply_autograd, can_launch, num_programs
from reverie.kernels.norm.group_norm import (
    Sizes,
    convolve_back,
    grouped,
    measure,
    sum_up,
)
from reverie.kernels.sums import sum_partials
from reverie.nets.residual import EPS, Conv, NormSilu

MOST_TAPS = 64
"""Taps up to which a convolution counts as narrow."""
MOST_CHANNELS = 128
"""Channels of the wide side that a program's tile has room for."""
WARPS = 4
TALL = 64
"""Pixels that a program works on at a time."""
SHORT, MANY_PROGRAMS = 32, 16
"""Pixels, and programs per processor, on the way back through a norm, where a program
holds much more of each pixel."""
MOST_STEPS = 8
"""The most times it does."""
MOST_ENTRIES = 2**30
"""Of a map, since places in it are numbers of 32 bits."""


def from_few(x: Float[Tensor, "b h w c"], conv: Conv) -> Float[Tensor, "b h w c2"]:
    """`conv(x)`, for few channels in `x`."""
    weight, bias = conv.cast(x.dtype)
    return apply_autograd(_FromFew, x, weight, bias)


def norm_to_few(
    x: Float[Tensor, "b h w c"], norm: NormSilu, conv: Conv
) -> Float[Tensor, "b h w c2"]:
    """`conv(norm(x))`, for few channels in the result."""
    weight, bias = conv.cast(x.dtype)
    return apply_autograd(_NormToFew, x, norm.scale, norm.shift, weight, bias)


def is_narrow(conv: Conv, few: int, many: int, x: Tensor) -> bool:
    """Whether these kernels take a convolution between so many channels."""
    return (
        conv.kernel == 3
        and conv.stride == 1
        and 9 * few <= MOST_TAPS
        and 16 <= many <= MOST_CHANNELS
        and triton.next_power_of_2(many) == many
        and 0 < x.numel() < MOST_ENTRIES
        and can_launch(x.device, x.dtype)
    )


def _taps(few: int) -> int:
    """Columns of a neighbourhood, padded to what tensor cores take."""
    return 16 if 9 * few <= 16 else 32 if 9 * few <= 32 else MOST_TAPS


class _FromFew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows, height, width, few = x.shape
        many, total = len(weight), rows * height * width
        out, framed = x.new_empty(rows, height, width, many), _framed(x)
        to_many, to_few, down, right = weight.stride()
        tiles = triton.cdiv(total, TALL)
        steps = triton.cdiv(tiles, num_programs(x.device, tiles, per_sm=16))
        steps = min(triton.next_power_of_2(steps), MOST_STEPS)  # few kinds to build
        _from_few[(triton.cdiv(tiles, steps),)](
            *(framed, weight, bias, out, total, height, width),
            *(to_few, to_many, down, right, few, _taps(few), many, steps, TALL),
            num_warps=WARPS,
        )
        ctx.save_for_backward(framed, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        framed, weight, bias = ctx.saved_tensors
        grad = grad.contiguous()
        rows, height, width, many = grad.shape
        few, total = framed.shape[-1], rows * height * width
        taps, tiles = _taps(few), triton.cdiv(total, TALL)
        count = num_programs(grad.device, tiles, per_sm=8)
        partial = grad.new_empty(count, taps + 1, many, dtype=torch.float32)
        _from_few_back[(count,)](
            *(framed, grad, partial, total, height, width, few, taps, many),
            *(triton.cdiv(tiles, count), TALL),
            num_warps=WARPS,
        )
        sums = sum_partials(partial)
        dweight = rearrange(
            sums[: 9 * few], "(y x i) o -> o i y x", y=3, x=3, i=few
        ).to(weight.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            x = framed[:, 1:-1, 1:-1].contiguous()
            dx = convolve_back(grad, x, weight, of_input=True)
        return dx, dweight, sums[taps].to(bias.dtype)


class _NormToFew(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        x = x.contiguous()
        sizes, few = Sizes(x, TALL), len(weight)
        rows, height, width, _ = x.shape
        sums, stats = sum_up(x, sizes)
        # what pixels contribute is kept in float32, since nine of them are added up
        parts = x.new_empty(rows, height, width, _taps(few), dtype=torch.float32)
        _to_few[sizes.grid](
            *(x, scale, shift, sums, stats, weight, parts, EPS, *sizes.numbers),
            *(*weight.stride(), few, parts.shape[-1]),
            num_warps=WARPS,
        )
        out = x.new_empty(rows, height, width, few)
        _gather[(triton.cdiv(out.numel(), 1024),)](
            *(parts, bias, out, out.numel(), height, width, few, parts.shape[-1], 1024)
        )
        ctx.save_for_backward(x, scale, shift, stats, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, scale, shift, stats, weight, bias = ctx.saved_tensors
        framed, sizes = _framed(grad), Sizes(x, SHORT, MANY_PROGRAMS)
        few, many, (height, width) = len(weight), x.shape[-1], x.shape[1:3]
        matrix = _matrix(weight).T.contiguous()
        taps = len(matrix)
        sums = x.new_empty(*sizes.grid, 2, many, dtype=torch.float32)
        dmatrix = x.new_empty(*sizes.grid, many, taps, dtype=torch.float32)
        _to_few_sum_back[sizes.grid](
            *(x, scale, shift, stats, framed, matrix, sums, dmatrix, *sizes.numbers),
            *(height, width, few, taps),
            num_warps=WARPS,
        )
        dx = torch.empty_like(x)
        _to_few_apply_back[sizes.grid](
            *(x, scale, shift, stats, framed, matrix, sums, dx, *sizes.numbers),
            *(height, width, few, taps),
            num_warps=WARPS,
        )
        dshift, dscale = sum_partials(sums.flatten(0, 1))
        dmatrix = sum_partials(dmatrix.flatten(0, 1))
        dweight = rearrange(
            dmatrix[:, : 9 * few], "i (y x o) -> o i y x", y=3, x=3, o=few
        )
        dbias = grad.sum((0, 1, 2), dtype=torch.float32)
        return dx, dscale, dshift, dweight.to(weight.dtype), dbias.to(bias.dtype)


def _framed(x: Tensor) -> Tensor:
    """Maps with a frame of zeros, one pixel wide."""
    return F.pad(x, (0, 0, 1, 1, 1, 1)).contiguous()


def _matrix(weight: Tensor) -> Tensor:
    """From a pixel to what it contributes by each tap, to each of few channels."""
    matrix = rearrange(weight, "o i y x -> i (y x o)")
    return F.pad(matrix, (0, _taps(len(weight)) - matrix.shape[1])).contiguous()


@triton.jit
@no_type_check
def _columns(
    x,
    at,
    inside,
    height,
    width,
    SIDE: tl.constexpr,
    FEW: tl.constexpr,
    TAPS: tl.constexpr,
):
    """The neighbourhoods of pixels of padded maps; with a side of -1, mirrored.

    Thousands of them are read per program, so places are numbers of 32 bits, and the
    frame of zeros around each map takes the place of comparisons.
    """
    k = tl.arange(0, TAPS)
    tap = k // FEW
    down, right = (tap // 3 - 1) * SIDE + 1, (tap % 3 - 1) * SIDE + 1
    offset = (down * (width + 2) + right) * FEW + k % FEW
    row, pixel = at // (height * width), at % (height * width)
    above = row * (height + 2) + pixel // width
    place = (above * (width + 2) + pixel % width) * FEW
    real = inside[:, None] & (k < 9 * FEW)[None, :]
    return tl.load(x + (place[:, None] + offset[None, :]), real, 0.0)


@triton.jit
@no_type_check
def _weights(weight, to_few, to_many, down, right, k, col, FEW: tl.constexpr):
    """Of taps k and many channels, two tensors that span a matrix; zero after 9 taps.

    They are read from where they are: preparing them would take as long as using them.
    """
    tap = k // FEW
    place = k % FEW * to_few + tap // 3 * down + tap % 3 * right + col * to_many
    return tl.load(weight + place, k < 9 * FEW, 0.0)


@triton.jit
@no_type_check
def _from_few(
    x,
    weight,
    bias,
    out,
    total,
    height,
    width,
    to_few,
    to_many,
    down,
    right,
    FEW: tl.constexpr,
    TAPS: tl.constexpr,
    MANY: tl.constexpr,
    STEPS: tl.constexpr,
    TALL: tl.constexpr,
):
    col, k = tl.arange(0, MANY), tl.arange(0, TAPS)
    taps, cols = k[:, None], col[None, :]
    kernel = _weights(weight, to_few, to_many, down, right, taps, cols, FEW)
    lift = tl.load(bias + col).to(tl.float32)[None, :]
    for step in range(STEPS):
        tile = tl.program_id(0) * STEPS + step
        at = tile * TALL + tl.arange(0, TALL)
        inside = at < total
        columns = _columns(x, at, inside, height, width, 1, FEW, TAPS)
        y = tl.dot(columns, kernel, input_precision="ieee") + lift
        there = out + tile.to(tl.int64) * TALL * MANY
        place = tl.arange(0, TALL)[:, None] * MANY + col[None, :]
        tl.store(there + place, y, inside[:, None])


@triton.jit
@no_type_check
def _from_few_back(
    x,
    grad,
    partial,
    total,
    height,
    width,
    FEW: tl.constexpr,
    TAPS: tl.constexpr,
    MANY: tl.constexpr,
    STEPS: tl.constexpr,
    TALL: tl.constexpr,
):
    col, k = tl.arange(0, MANY), tl.arange(0, TAPS)
    dmatrix = tl.zeros((TAPS, MANY), tl.float32)
    dbias = tl.zeros((TALL, MANY), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        at = tile * TALL + tl.arange(0, TALL)
        inside = at < total
        columns = _columns(x, at, inside, height, width, 1, FEW, TAPS)
        there = grad + tile.to(tl.int64) * TALL * MANY
        place = tl.arange(0, TALL)[:, None] * MANY + col[None, :]
        slope = tl.load(there + place, inside[:, None], 0.0)
        dmatrix = tl.dot(tl.trans(columns), slope, dmatrix, input_precision="ieee")
        dbias += slope.to(tl.float32)
    here = partial + tl.program_id(0).to(tl.int64) * (TAPS + 1) * MANY
    tl.store(here + k[:, None] * MANY + col[None, :], dmatrix)
    tl.store(here + TAPS * MANY + col, tl.sum(dbias, 0))


@triton.jit
@no_type_check
def _to_few(
    x,
    scale,
    shift,
    sums,
    stats,
    weight,
    parts,
    eps,
    pixels,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
    to_few,
    to_many,
    down,
    right,
    FEW: tl.constexpr,
    TAPS: tl.constexpr,
):
    """What each active pixel contributes by each tap."""
    row, part = tl.program_id(0), tl.program_id(1)
    col, k = tl.arange(0, CHANNELS), tl.arange(0, TAPS)
    here = x + row.to(tl.int64) * pixels * CHANNELS
    middle, root = measure(
        here, None, sums, stats, row, part, eps, pixels, SPLIT, CHANNELS, GROUPS
    )
    gain = root * tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32) - middle * gain
    taps, cols = k[None, :], col[:, None]
    kernel = _weights(weight, to_few, to_many, down, right, taps, cols, FEW)
    for i in range(SHARE):
        pixel = (part * SHARE + i) * TALL + tl.arange(0, TALL)
        inside = (pixel < pixels)[:, None]
        v = tl.load(here + pixel[:, None] * CHANNELS + col[None, :], inside, 0.0)
        z = v.to(tl.float32) * gain[None, :] + lift[None, :]
        active = (z * tl.sigmoid(z)).to(v.dtype)
        y = tl.dot(active, kernel, input_precision="ieee")
        place = (row.to(tl.int64) * pixels + pixel)[:, None] * TAPS + k[None, :]
        tl.store(parts + place, y, inside)


@triton.jit
@no_type_check
def _gather(
    parts,
    bias,
    out,
    size,
    height,
    width,
    FEW: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up what reaches each pixel."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    at, channel = place // FEW, place % FEW
    y, z = at // width % height, at % width
    total = tl.load(bias + channel, inside, 0.0).to(tl.float32)
    for tap in tl.static_range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        real = inside & (y + down >= 0) & (y + down < height)
        real = real & (z + right >= 0) & (z + right < width)
        source = (at + down * width + right) * TAPS + tap * FEW + channel
        total += tl.load(parts + source, real, 0.0)
    tl.store(out + place, total, inside)


@triton.jit
@no_type_check
def _to_few_sum_back(
    x,
    scale,
    shift,
    stats,
    grad,
    matrix,
    sums,
    dmatrix,
    pixels,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
    height,
    width,
    FEW: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Gradients of shift and scale of each map, and of the weights."""
    row, part = tl.program_id(0), tl.program_id(1)
    start_of_row = row.to(tl.int64) * pixels * CHANNELS
    col, k = tl.arange(0, CHANNELS), tl.arange(0, TAPS)
    middle = tl.load(stats + row * 2 * CHANNELS + col)
    root = tl.load(stats + row * 2 * CHANNELS + CHANNELS + col)
    gain = tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32)
    kernel = tl.load(matrix + k[:, None] * CHANNELS + col[None, :])
    dlift = tl.zeros((TALL, CHANNELS), tl.float32)
    dgain = tl.zeros((TALL, CHANNELS), tl.float32)
    dkernel = tl.zeros((CHANNELS, TAPS), tl.float32)
    for i in range(SHARE):
        pixel = (part * SHARE + i) * TALL + tl.arange(0, TALL)
        inside = pixel < pixels
        at = row * pixels + pixel
        columns = _columns(grad, at, inside, height, width, -1, FEW, TAPS)
        dz = tl.dot(columns, kernel, input_precision="ieee")
        place = start_of_row + (pixel[:, None] * CHANNELS + col[None, :])
        v = tl.load(x + place, inside[:, None], 0.0)
        kind = v.dtype
        v = (v.to(tl.float32) - middle[None, :]) * root[None, :]
        z = v * gain[None, :] + lift[None, :]
        open = tl.sigmoid(z)
        active = (z * open).to(kind)
        dkernel = tl.dot(tl.trans(active), columns, dkernel, input_precision="ieee")
        dz *= open * (1 + z * (1 - open))
        dlift += dz
        dgain += dz * v
    here = sums + (row * SPLIT + part) * 2 * CHANNELS + col
    tl.store(here, tl.sum(dlift, 0))
    tl.store(here + CHANNELS, tl.sum(dgain, 0))
    here = dmatrix + (row.to(tl.int64) * SPLIT + part) * CHANNELS * TAPS
    tl.store(here + col[:, None] * TAPS + k[None, :], dkernel)


@triton.jit
@no_type_check
def _to_few_apply_back(
    x,
    scale,
    shift,
    stats,
    grad,
    matrix,
    sums,
    dx,
    pixels,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
    height,
    width,
    FEW: tl.constexpr,
    TAPS: tl.constexpr,
):
    """The gradient of the map."""
    row, part = tl.program_id(0), tl.program_id(1)
    start_of_row = row.to(tl.int64) * pixels * CHANNELS
    col, k = tl.arange(0, CHANNELS), tl.arange(0, TAPS)
    dlift = tl.zeros((CHANNELS,), tl.float32)
    dgain = tl.zeros((CHANNELS,), tl.float32)
    for i in range(SPLIT):
        here = sums + (row * SPLIT + i) * 2 * CHANNELS + col
        dlift += tl.load(here)
        dgain += tl.load(here + CHANNELS)
    middle = tl.load(stats + row * 2 * CHANNELS + col)
    root = tl.load(stats + row * 2 * CHANNELS + CHANNELS + col)
    gain = tl.load(scale + col).to(tl.float32)
    lift = tl.load(shift + col).to(tl.float32)
    count = pixels * (CHANNELS // GROUPS)
    level = grouped(dlift * gain, CHANNELS, GROUPS) / count
    tilt = grouped(dgain * gain, CHANNELS, GROUPS) / count
    kernel = tl.load(matrix + k[:, None] * CHANNELS + col[None, :])
    for i in range(SHARE):
        pixel = (part * SHARE + i) * TALL + tl.arange(0, TALL)
        inside = pixel < pixels
        at = row * pixels + pixel
        columns = _columns(grad, at, inside, height, width, -1, FEW, TAPS)
        dz = tl.dot(columns, kernel, input_precision="ieee")
        place = start_of_row + (pixel[:, None] * CHANNELS + col[None, :])
        v = tl.load(x + place, inside[:, None], 0.0).to(tl.float32)
        v = (v - middle[None, :]) * root[None, :]
        z = v * gain[None, :] + lift[None, :]
        open = tl.sigmoid(z)
        dz *= open * (1 + z * (1 - open)) * gain[None, :]
        dv = (dz - level[None, :] - v * tilt[None, :]) * root[None, :]
        tl.store(dx + place, dv, inside[:, None])
