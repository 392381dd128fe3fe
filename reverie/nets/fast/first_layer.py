"""The encoder's first layer as one kernel each way, straight from stored pixels.

It has few input channels and the largest maps of the whole network, so it is bound by
memory: convolution and pool as two kernels would exchange four times its output. Here a
program gathers the 6x6 patches that its coarse pixels see, multiplies them with the
kernel of every phase (see `phases.py`), keeps the largest, and goes on to the
activation. Backward, it gathers the patches again. Images get no gradient.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.nets.fast.launch import differentiable, programs

COLORS = 0
"""The most colors whose patches fit into one tile."""
UNITS = 128
"""The most channels that one program holds."""
ROWS = 128
"""Coarse pixels of one tile."""


def is_small(image: Tensor, units: int, dtype: torch.dtype) -> bool:
    """Whether these kernels take the layer. Their products are in half precision."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and image.shape[-1] <= COLORS and units <= UNITS


def first_layer(
    image: UInt8[Tensor, "n h w c"],
    height: int,
    width: int,
    kernel: Float[Tensor, "o i 3 3"],
    scale: Float[Tensor, " C"],
    eps: float,
    bias: Float[Tensor, " C"],
    *,
    to_phases: bool,
) -> Float[Tensor, "n h2 w2 c2"]:
    """Convolve, pool, normalize and activate an image on a canvas of the given size."""
    size = (height // 2, width // 2)
    return differentiable(
        _FirstLayer, kernel, scale, bias, image.contiguous(), size, eps, to_phases
    )


class _FirstLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Tensor,
        scale: Tensor,
        bias: Tensor,
        image: Tensor,
        size: tuple[int, int],
        eps: float,
        to_phases: bool,
    ) -> Tensor:
        (n, *_), (h, w), channels = image.shape, size, len(scale)
        matrix = kernel.permute(0, 2, 3, 1).contiguous()
        y = matrix.new_empty(n, h, w, channels)
        keep = any(ctx.needs_input_grad)
        pooled = torch.empty_like(y) if keep else None
        winner = torch.empty_like(y, dtype=torch.uint8) if keep else None
        ctx.settings = (n * h * w, h, w, *image.shape[1:], channels, eps)
        wide, deep = _tile(image, channels)
        if n:
            count, steps = _share(image, n * h * w, 2)
            _first_layer_forward[(count,)](
                *(image, matrix, bias, scale, y, pooled, winner, *ctx.settings),
                *(to_phases, steps, ROWS, wide, deep),
                num_warps=8,
            )
        ctx.save_for_backward(image, pooled, winner, scale, bias)
        ctx.to_phases = to_phases
        return y.view(n, h // 2, w // 2, -1) if to_phases else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, pooled, winner, scale, bias = ctx.saved_tensors
        channels, colors = len(scale), image.shape[-1]
        wide, deep = _tile(image, channels)
        count, steps = _share(image, ctx.settings[0], 1)
        size = 36 * colors
        dmatrix = torch.empty(count, 4 * channels, size, device=image.device)
        partial = torch.empty(count, 2, channels, device=image.device)
        # the gradients of four phases are more than one program can hold
        passes = 1 if wide <= 64 else 2
        _first_layer_backward[(count, passes)](
            *(image, pooled, winner, bias, scale, grad.contiguous(), dmatrix, partial),
            *(*ctx.settings, ctx.to_phases, passes, steps, ROWS, wide, deep),
            num_warps=8 if wide <= 32 else 16,
        )
        dkernel = dmatrix.sum(0).view(4 * channels, 3, 3, 4 * colors)
        dscale, dbias = partial.sum(0)
        return (
            *(dkernel.permute(0, 3, 1, 2).to(pooled.dtype), dscale.to(scale.dtype)),
            *(dbias.to(bias.dtype), None, None, None, None),
        )


def _share(image: Tensor, rows: int, per_processor: int) -> tuple[int, int]:
    """How many programs there are, and how many tiles each of them takes."""
    tiles = triton.cdiv(rows, ROWS)
    count = programs(image.device, tiles, per_processor)
    return count, triton.cdiv(tiles, count)


def _tile(image: Tensor, channels: int) -> tuple[int, int]:
    """Columns of an output tile, and of a tile of patches."""
    wide = max(16, triton.next_power_of_2(channels))
    return wide, max(16, triton.next_power_of_2(36 * image.shape[-1]))


@triton.jit
@no_type_check
def _patches(image, row, rows, h, w, height, width, colors, K: tl.constexpr):
    """The 6x6 patch around every coarse pixel, centred, in the order of the kernel."""
    k = tl.arange(0, K)[None, :]
    tap, phase, color = k // (4 * colors), k // colors % 4, k % colors
    dy, dx = tap // 3 * 2 - 2 + phase // 2, tap % 3 * 2 - 2 + phase % 2
    y, x = row // w % h * 2, row % w * 2
    start = ((row // (h * w)).to(tl.int64) * height + y) * width + x
    place = start * colors + ((dy * width + dx) * colors + color)
    inside = (dy >= -y) & (dy < height - y) & (dx >= -x) & (dx < width - x)
    inside = inside & (k < 36 * colors) & (row < rows)
    value = tl.load(image + place, inside, 0).to(tl.float32)
    return tl.where(inside, value * (1 / 255) - 0.5, 0.0)


@triton.jit
@no_type_check
def _folded(row, w, channels, TO_PHASES: tl.constexpr):
    """Where a pixel's channels begin, as it is or among the phases of a coarser map."""
    row = row.to(tl.int64)
    if TO_PHASES:
        y, x = row // w, row % w
        row = (y // 2 * (w // 2) + x // 2) * 4 + y % 2 * 2 + x % 2
    return row * channels


@triton.jit
@no_type_check
def _first_layer_forward(
    image,
    matrix,
    bias,
    scale,
    out,
    pooled,
    winner,
    rows,
    h,
    w,
    height,
    width,
    colors,
    channels,
    eps,
    TO_PHASES: tl.constexpr,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
):
    col = tl.arange(0, C)[None, :]
    size = 36 * colors
    k = tl.arange(0, K)[:, None]
    known = (k < size) & (col < channels)
    entry = matrix + col * size + k
    zero = tl.load(entry, known, 0.0)
    one = tl.load(entry + channels * size, known, 0.0)
    two = tl.load(entry + 2 * channels * size, known, 0.0)
    three = tl.load(entry + 3 * channels * size, known, 0.0)
    gain = tl.load(scale + col, col < channels, 0.0).to(tl.float32)
    shift = tl.load(bias + col, col < channels, 0.0).to(tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * R + tl.arange(0, R)[:, None]
        a = _patches(image, row, rows, h, w, height, width, colors, K)
        a = a.to(matrix.dtype.element_ty)
        best = tl.dot(a, zero)
        phase = tl.zeros((R, C), tl.int32)
        other = tl.dot(a, one)
        phase = tl.where(other > best, 1, phase)
        best = tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL)
        other = tl.dot(a, two)
        phase = tl.where(other > best, 2, phase)
        best = tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL)
        other = tl.dot(a, three)
        phase = tl.where(other > best, 3, phase)
        best = tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL)
        kept = best.to(matrix.dtype.element_ty)
        inside = (row < rows) & (col < channels)
        if pooled is not None:
            place = row.to(tl.int64) * channels + col
            tl.store(pooled + place, kept, inside)
            tl.store(winner + place, phase.to(tl.uint8), inside)
        v = kept.to(tl.float32) + shift
        root = tl.rsqrt(tl.sum(v * v, 1)[:, None] / channels + eps)
        z = v * root * gain
        place = _folded(row, w, channels, TO_PHASES) + col
        tl.store(out + place, z * tl.sigmoid(z), inside)


@triton.jit
@no_type_check
def _first_layer_backward(
    image,
    pooled,
    winner,
    bias,
    scale,
    dy,
    dmatrix,
    partial,
    rows,
    h,
    w,
    height,
    width,
    colors,
    channels,
    eps,
    TO_PHASES: tl.constexpr,
    PASSES: tl.constexpr,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
):
    col = tl.arange(0, C)[None, :]
    gain = tl.load(scale + col, col < channels, 0.0).to(tl.float32)
    shift = tl.load(bias + col, col < channels, 0.0).to(tl.float32)
    dgain = tl.zeros((1, C), tl.float32)
    dshift = tl.zeros((1, C), tl.float32)
    zero = tl.zeros((K, C), tl.float32)
    one = tl.zeros((K, C), tl.float32)
    if PASSES == 1:
        two = tl.zeros((K, C), tl.float32)
        three = tl.zeros((K, C), tl.float32)
    lowest = tl.program_id(1) * 2
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * R + tl.arange(0, R)[:, None]
        inside = (row < rows) & (col < channels)
        place = row.to(tl.int64) * channels + col
        v = tl.load(pooled + place, inside, 0.0).to(tl.float32) + shift
        phase = tl.load(winner + place, inside, 0).to(tl.int32) - lowest
        place = _folded(row, w, channels, TO_PHASES) + col
        dv = tl.load(dy + place, inside, 0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(v * v, 1)[:, None] / channels + eps)
        v *= root
        z = v * gain
        open = tl.sigmoid(z)
        dv *= open * (1 + z * (1 - open))
        dgain += tl.sum(dv * v, 0)[None, :]
        dv *= gain
        dv = (dv - v * (tl.sum(dv * v, 1)[:, None] / channels)) * root
        dshift += tl.sum(dv, 0)[None, :]
        a = _patches(image, row, rows, h, w, height, width, colors, K)
        a = tl.trans(a.to(pooled.dtype.element_ty))
        g = dv.to(pooled.dtype.element_ty)
        zero = tl.dot(a, tl.where(phase == 0, g, 0.0), zero)
        one = tl.dot(a, tl.where(phase == 1, g, 0.0), one)
        if PASSES == 1:
            two = tl.dot(a, tl.where(phase == 2, g, 0.0), two)
            three = tl.dot(a, tl.where(phase == 3, g, 0.0), three)
    size = 36 * colors
    k = tl.arange(0, K)[:, None]
    known = (k < size) & (col < channels)
    first = (tl.program_id(0) * 4 + lowest) * channels * size
    entry = dmatrix + first + col * size + k
    tl.store(entry, zero, known)
    tl.store(entry + channels * size, one, known)
    if PASSES == 1:
        tl.store(entry + 2 * channels * size, two, known)
        tl.store(entry + 3 * channels * size, three, known)
    if tl.program_id(1) == 0:
        here = partial + tl.program_id(0) * 2 * channels + col
        tl.store(here, dgain, col < channels)
        tl.store(here + channels, dshift, col < channels)
