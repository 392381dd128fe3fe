"""3x3 convolutions with few input or output channels: first and last layers.

cuDNN reaches only a fifth of the memory bandwidth with them. Here such a convolution is
a matrix product on the tensor cores. `FEW` and `MANY` are the numbers of channels on
the two sides. A tap is here one of the 9 kernel positions of one of the few channels;
in matrices, the taps are padded to a power of two (TAPS):

- from few to many channels, the kernel gathers the neighborhood of each pixel as a
  matrix row with one column per tap (im2col), and multiplies it with the weights;
- from many to few channels, each pixel is first multiplied with all weights, which
  gives its contribution to each neighbor; a second kernel sums the contributions
  (col2im). The group norm and SiLU before the layer are part of the same kernels, so
  the activated feature map is never written to memory.

In the kernels, `k` is the index of a tap, and `tap` only its kernel position (0 to 8).
The arguments from `pixels` to R of `_to_few` and `_to_few_backward` are `Tiling.sizes`
(`group_norm.py`). A tile has all channels, so CHANNELS and C are both the number of
input channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.conv.nhwc import conv2d_input_grad
from reverie.kernels.launch import apply_autograd, can_launch, jit, num_programs
from reverie.kernels.norm.group_norm import sum_pixels, tile_by_pixels
from reverie.kernels.norm.group_norm_kernels import (
    factor_and_intercept,
    gradient_means,
    group_statistics,
    input_grad,
    load_norm,
    normalize_tile,
    store_pair,
    sum_parts,
)
from reverie.kernels.norm.rms_norm import silu_grad
from reverie.kernels.sums import sum_partials
from reverie.nets.residual import EPS, FrameConv, NormSilu

MAX_TAPS = 64
"""Maximum number of taps (9 per channel) on the side with few channels."""
MAX_CHANNELS = 128
"""Maximum number of channels on the other side: a tile holds all of them."""
WARPS = 4
"""Warps of a program."""
ROWS = 64
"""Pixels of a tile."""
BACKWARD_ROWS, BACKWARD_PROGRAMS_PER_SM = 32, 16
"""Pixels of a tile in the backward pass of `_NormConvToFew`, which holds more values
per pixel, and programs per multiprocessor."""
MAX_STEPS = 8
"""Maximum number of tiles per program."""
MAX_ELEMENTS = 2**30
"""Maximum number of elements of a tensor, because offsets are 32-bit."""


def conv_from_few(
    x: Float[Tensor, "b h w c"], conv: FrameConv
) -> Float[Tensor, "b h w c2"]:
    """Return `conv(x)` for an `x` with few channels."""
    weight, bias = conv.cast(x.dtype)
    return apply_autograd(_ConvFromFew, x, weight, bias)


def norm_conv_to_few(
    x: Float[Tensor, "b h w c"], norm: NormSilu, conv: FrameConv
) -> Float[Tensor, "b h w c2"]:
    """Return `conv(norm(x))` for a convolution with few output channels."""
    weight, bias = conv.cast(x.dtype)
    return apply_autograd(_NormConvToFew, x, norm.scale, norm.shift, weight, bias)


def is_supported(conv: FrameConv, few: int, many: int, x: Tensor) -> bool:
    """True if these kernels support a convolution with these numbers of channels."""
    return (
        conv.kernel == 3
        and conv.stride == 1
        and 9 * few <= MAX_TAPS
        and 16 <= many <= MAX_CHANNELS
        and triton.next_power_of_2(many) == many
        and 0 < x.numel() < MAX_ELEMENTS
        and can_launch(x.device, x.dtype)
    )


def _padded_taps(few: int) -> int:
    """Return the number of taps, padded for the tensor cores."""
    return 16 if 9 * few <= 16 else 32 if 9 * few <= 32 else MAX_TAPS


class _ConvFromFew(torch.autograd.Function):
    """Convolution with few input channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows, height, width, few = x.shape
        many, total = len(weight), rows * height * width
        out, padded = x.new_empty(rows, height, width, many), _zero_pad(x)
        many_stride, few_stride, y_stride, x_stride = weight.stride()
        tiles = triton.cdiv(total, ROWS)
        steps = triton.cdiv(tiles, num_programs(x.device, tiles, per_sm=16))
        # a power of two, so that few variants of the kernel are compiled
        steps = min(triton.next_power_of_2(steps), MAX_STEPS)
        _from_few[(triton.cdiv(tiles, steps),)](
            *(padded, weight, bias, out, total, height, width),
            *(few_stride, many_stride, y_stride, x_stride),
            *(few, _padded_taps(few), many, steps, ROWS),
            num_warps=WARPS,
        )
        ctx.save_for_backward(padded, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, bias = ctx.saved_tensors
        grad = grad.contiguous()
        rows, height, width, many = grad.shape
        few, total = padded.shape[-1], rows * height * width
        taps, tiles = _padded_taps(few), triton.cdiv(total, ROWS)
        programs = num_programs(grad.device, tiles, per_sm=8)
        partial = grad.new_empty(programs, taps + 1, many, dtype=torch.float32)
        _from_few_backward[(programs,)](
            *(padded, grad, partial, total, height, width, few, taps, many),
            *(triton.cdiv(tiles, programs), ROWS),
            num_warps=WARPS,
        )
        sums = sum_partials(partial)
        dweight = rearrange(
            sums[: 9 * few], "(y x i) o -> o i y x", y=3, x=3, i=few
        ).to(weight.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            x = padded[:, 1:-1, 1:-1].contiguous()
            dx = conv2d_input_grad(grad, x, weight)
        return dx, dweight, sums[taps].to(bias.dtype)


class _NormConvToFew(torch.autograd.Function):
    """Group norm, SiLU and a convolution with few output channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        x = x.contiguous()
        tiling, few = tile_by_pixels(x, ROWS), len(weight)
        rows, height, width, _ = x.shape
        sums, stats = sum_pixels(x, tiling)
        # float32, as nine contributions are summed
        taps = _padded_taps(few)
        contributions = x.new_empty(rows, height, width, taps, dtype=torch.float32)
        _to_few[tiling.grid](
            *(x, scale, shift, sums, stats, weight, contributions, EPS),
            *(*tiling.sizes, *weight.stride(), few, taps),
            num_warps=WARPS,
        )
        out = x.new_empty(rows, height, width, few)
        _sum_contributions[(triton.cdiv(out.numel(), 1024),)](
            *(contributions, bias, out, out.numel(), height, width, few, taps, 1024)
        )
        ctx.save_for_backward(x, scale, shift, stats, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, scale, shift, stats, weight, bias = ctx.saved_tensors
        tiling = tile_by_pixels(x, BACKWARD_ROWS, BACKWARD_PROGRAMS_PER_SM)
        few, many, (height, width) = len(weight), x.shape[-1], x.shape[1:3]
        matrix = _weight_matrix(weight).T.contiguous()
        taps = len(matrix)
        sums = x.new_empty(*tiling.grid, 2, many, dtype=torch.float32)
        dmatrix = x.new_empty(*tiling.grid, many, taps, dtype=torch.float32)
        saved = (x, scale, shift, stats, _zero_pad(grad), matrix, sums)
        sizes = (*tiling.sizes, height, width, few, taps)
        launch = _to_few_backward[tiling.grid]
        launch(*saved, dmatrix, None, *sizes, num_warps=WARPS)
        dx = torch.empty_like(x)
        launch(*saved, None, dx, *sizes, num_warps=WARPS)
        dshift, dscale = sum_partials(sums.flatten(0, 1))
        dmatrix = sum_partials(dmatrix.flatten(0, 1))
        dweight = rearrange(
            dmatrix[:, : 9 * few], "i (y x o) -> o i y x", y=3, x=3, o=few
        )
        dbias = grad.sum((0, 1, 2), dtype=torch.float32)
        return dx, dscale, dshift, dweight.to(weight.dtype), dbias.to(bias.dtype)


def _zero_pad(x: Tensor) -> Tensor:
    """Return feature maps with one pixel of zeros added on every side."""
    return F.pad(x, (0, 0, 1, 1, 1, 1)).contiguous()


def _weight_matrix(weight: Tensor) -> Tensor:
    """Return the weights as a matrix (many channels, padded taps)."""
    matrix = rearrange(weight, "o i y x -> i (y x o)")
    return F.pad(matrix, (0, _padded_taps(len(weight)) - matrix.shape[1])).contiguous()


@jit
def _load_neighborhoods(
    x, index, mask, height, width,
    SIGN: tl.constexpr, FEW: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Load neighborhoods of pixels of zero-padded maps, one row of TAPS per pixel.

    If SIGN is -1, the order of the kernel positions is reversed, as the gradient of a
    convolution needs it. `index` counts the pixels of all maps of the batch. For speed,
    offsets are 32-bit, and the zero padding makes bounds checks unnecessary.
    """
    k = tl.arange(0, TAPS)
    tap = k // FEW
    down, right = (tap // 3 - 1) * SIGN + 1, (tap % 3 - 1) * SIGN + 1
    offset = (down * (width + 2) + right) * FEW + k % FEW
    row, pixel = index // (height * width), index % (height * width)
    line = row * (height + 2) + pixel // width
    start = (line * (width + 2) + pixel % width) * FEW
    valid = mask[:, None] & (k < 9 * FEW)[None, :]
    return tl.load(x + (start[:, None] + offset[None, :]), valid, 0.0)


@jit
def _load_weights(
    weight, few_stride, many_stride, y_stride, x_stride, k, col, FEW: tl.constexpr
):
    """Load the weights of taps `k` and channels `col`; zero for padded taps.

    The layout is given by strides: a copy in another layout would take as long as the
    matrix product.
    """
    tap = k // FEW
    offset = k % FEW * few_stride + tap // 3 * y_stride + tap % 3 * x_stride
    return tl.load(weight + offset + col * many_stride, k < 9 * FEW, 0.0)


@jit
def _from_few(
    x, weight, bias, out, total, height, width,
    few_stride, many_stride, y_stride, x_stride,
    FEW: tl.constexpr, TAPS: tl.constexpr, MANY: tl.constexpr,
    STEPS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Convolve STEPS tiles of R pixels."""
    col, k = tl.arange(0, MANY)[None, :], tl.arange(0, TAPS)[:, None]
    kernel = _load_weights(
        weight, few_stride, many_stride, y_stride, x_stride, k, col, FEW
    )
    biases = tl.load(bias + col).to(tl.float32)
    for step in range(STEPS):
        tile = tl.program_id(0) * STEPS + step
        index = tile * R + tl.arange(0, R)
        mask = index < total
        columns = _load_neighborhoods(x, index, mask, height, width, 1, FEW, TAPS)
        y = tl.dot(columns, kernel, input_precision="ieee") + biases
        ptr = out + tile.to(tl.int64) * R * MANY
        offset = tl.arange(0, R)[:, None] * MANY + col
        tl.store(ptr + offset, y, mask[:, None])


@jit
def _from_few_backward(
    x, grad, partial, total, height, width,
    FEW: tl.constexpr, TAPS: tl.constexpr, MANY: tl.constexpr,
    STEPS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of the weight gradient (TAPS rows) and bias gradient."""
    col, k = tl.arange(0, MANY), tl.arange(0, TAPS)
    dmatrix = tl.zeros((TAPS, MANY), tl.float32)
    dbias = tl.zeros((R, MANY), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        index = tile * R + tl.arange(0, R)
        mask = index < total
        columns = _load_neighborhoods(x, index, mask, height, width, 1, FEW, TAPS)
        ptr = grad + tile.to(tl.int64) * R * MANY
        offset = tl.arange(0, R)[:, None] * MANY + col[None, :]
        dy = tl.load(ptr + offset, mask[:, None], 0.0)
        dmatrix = tl.dot(tl.trans(columns), dy, dmatrix, input_precision="ieee")
        dbias += dy.to(tl.float32)
    ptr = partial + tl.program_id(0).to(tl.int64) * (TAPS + 1) * MANY
    tl.store(ptr + k[:, None] * MANY + col[None, :], dmatrix)
    tl.store(ptr + TAPS * MANY + col, tl.sum(dbias, 0))


@jit
def _to_few(
    x, scale, shift, sums, stats, weight, contributions, eps, pixels,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    PER_GROUP: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    few_stride, many_stride, y_stride, x_stride,
    FEW: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Apply norm and SiLU; compute the contribution of each pixel through each tap."""
    row, part = tl.program_id(0), tl.program_id(1)
    col, k = tl.arange(0, C), tl.arange(0, TAPS)
    x += row.to(tl.int64) * pixels * C
    total, square = sum_parts(sums, row, PARTS, 2, C)
    first = tl.load(x + col).to(tl.float32)
    mean, rstd = group_statistics(
        first, None, total, square, col, eps, pixels, PER_GROUP, C
    )
    if part == 0:
        store_pair(stats + row * 2 * C + col, mean, rstd, C)
    factor, intercept = factor_and_intercept(mean, rstd, None, scale, shift, col)
    taps, channels = k[None, :], col[:, None]
    kernel = _load_weights(
        weight, few_stride, many_stride, y_stride, x_stride, taps, channels, FEW
    )
    for i in range(STEPS):
        pixel = (part * STEPS + i) * R + tl.arange(0, R)
        mask = (pixel < pixels)[:, None]
        v = tl.load(x + pixel[:, None] * C + col[None, :], mask, 0.0)
        z = v.to(tl.float32) * factor[None, :] + intercept[None, :]
        activation = (z * tl.sigmoid(z)).to(v.dtype)
        y = tl.dot(activation, kernel, input_precision="ieee")
        offset = (row.to(tl.int64) * pixels + pixel)[:, None] * TAPS + k[None, :]
        tl.store(contributions + offset, y, mask)


@jit
def _sum_contributions(
    contributions, bias, out, size, height, width,
    FEW: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the contributions of all neighbors to each pixel."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    pixel, channel = index // FEW, index % FEW
    y, x = pixel // width % height, pixel % width
    total = tl.load(bias + channel, mask, 0.0).to(tl.float32)
    for tap in tl.static_range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        inside = mask & (y + down >= 0) & (y + down < height)
        inside = inside & (x + right >= 0) & (x + right < width)
        source = (pixel + down * width + right) * TAPS + tap * FEW + channel
        total += tl.load(contributions + source, inside, 0.0)
    tl.store(out + index, total, mask)


@jit
def _to_few_backward(
    x, scale, shift, stats, dy, matrix, sums, dmatrix, dx, pixels,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    PER_GROUP: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    height, width, FEW: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Without `dx`, compute the gradients of shift, scale and weight; else that of `x`.

    The gradient of the activations is the product of neighborhoods of the output
    gradient with the kernel.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    start = row.to(tl.int64) * pixels * C
    col, k = tl.arange(0, C), tl.arange(0, TAPS)
    mean, rstd, gain, beta = load_norm(stats, None, scale, shift, row, col, C)
    kernel = tl.load(matrix + k[:, None] * C + col[None, :])
    if dx is None:
        dshift = tl.zeros((R, C), tl.float32)
        dscale = tl.zeros((R, C), tl.float32)
        dkernel = tl.zeros((C, TAPS), tl.float32)
    else:
        dshift, dscale = sum_parts(sums, row, PARTS, 2, C)
        mean_dz, mean_dzv = gradient_means(dshift, dscale, gain, pixels, PER_GROUP, C)
    for i in range(STEPS):
        pixel = (part * STEPS + i) * R + tl.arange(0, R)
        mask = pixel < pixels
        index = row * pixels + pixel
        columns = _load_neighborhoods(dy, index, mask, height, width, -1, FEW, TAPS)
        dz = tl.dot(columns, kernel, input_precision="ieee")
        offset = start + (pixel[:, None] * C + col[None, :])
        v = tl.load(x + offset, mask[:, None], 0.0)
        dtype = v.dtype
        v, z, gate = normalize_tile(v.to(tl.float32), mean, rstd, gain, beta)
        if dx is None:
            activation = tl.trans((z * gate).to(dtype))
            dkernel = tl.dot(activation, columns, dkernel, input_precision="ieee")
            dz *= silu_grad(z, gate)
            dshift += dz
            dscale += dz * v
        else:
            dz *= silu_grad(z, gate) * gain[None, :]
            dv = input_grad(dz, v, mean_dz, mean_dzv, rstd)
            tl.store(dx + offset, dv, mask[:, None])
    if dx is None:
        ptr = sums + (row * PARTS + part) * 2 * C + col
        store_pair(ptr, tl.sum(dshift, 0), tl.sum(dscale, 0), C)
        ptr = dmatrix + (row.to(tl.int64) * PARTS + part) * C * TAPS
        tl.store(ptr + col[:, None] * TAPS + k[None, :], dkernel)
