"""The encoder's first layer as one kernel each way.

It has few input channels and the largest maps of the whole network, so it is bound by
memory: convolution and pool as two kernels would exchange four times its output. Here a
program gathers the neighbourhoods of its coarse pixels, multiplies them with the kernel
of every phase (see `phases.py`), keeps the largest, and goes on to the activation.
Images get no gradient.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import apply_autograd, num_programs
from reverie.kernels.sums import sum_partials

FOLDED = 16
"""Input channels: room for four phases of up to four colors."""
UNITS = 32
"""The most output channels for which this is faster than a convolution and a pool; the
gradients of more fill a program's registers. Forward and backward of 32 take 0.61 ms on
an H200, against 0.72; of 64, 2.2 against 1.3."""
ROWS = 128
"""Coarse pixels of one tile."""


def is_small(colors: int, units: int, dtype: torch.dtype) -> bool:
    """Whether these kernels take the layer. Their products are in half precision."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and 4 * colors <= FOLDED and units <= UNITS


def first_layer(
    x: Float[Tensor, "n h w 16"],
    kernel: Float[Tensor, "o 16 3 3"],
    scale: Float[Tensor, " C"],
    eps: float,
    bias: Float[Tensor, " C"],
    *,
    to_phases: bool,
) -> Float[Tensor, "n h2 w2 c2"]:
    """Convolve the phases of an image; then pool, normalize and activate."""
    return apply_autograd(_FirstLayer, kernel, scale, bias, x, eps, to_phases)


class _FirstLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Tensor,
        scale: Tensor,
        bias: Tensor,
        x: Tensor,
        eps: float,
        to_phases: bool,
    ) -> Tensor:
        n, h, w, _ = x.shape
        channels, rows = len(scale), n * h * w
        matrix = kernel.permute(0, 2, 3, 1).contiguous()  # (4 C, 3, 3, 16)
        y = x.new_empty(n, h, w, channels)
        keep = any(ctx.needs_input_grad)
        pooled = torch.empty_like(y) if keep else None
        winner = torch.empty_like(y, dtype=torch.uint8) if keep else None
        if n:
            tiles = triton.cdiv(rows, ROWS)
            count = num_programs(x.device, tiles, per_sm=64)
            _first_layer_forward[(count,)](
                *(x, matrix, bias, scale, y, pooled, winner),
                *(rows, h, w, channels, eps, to_phases, triton.cdiv(tiles, count)),
                *(ROWS, _wide(channels), FOLDED),
                num_warps=8,
                num_stages=1,
            )
        ctx.save_for_backward(x, pooled, winner, scale, bias)
        ctx.eps, ctx.to_phases = eps, to_phases
        return y.view(n, h // 2, w // 2, -1) if to_phases else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, pooled, winner, scale, bias = ctx.saved_tensors
        n, h, w, channels = pooled.shape
        wide, tiles = _wide(channels), triton.cdiv(n * h * w, ROWS)
        count = num_programs(x.device, tiles, per_sm=2)
        dmatrix = torch.empty(count, 4 * channels, 9 * FOLDED, device=x.device)
        partial = torch.empty(count, 2, channels, device=x.device)
        _first_layer_backward[(count,)](
            *(x, pooled, winner, bias, scale, grad.contiguous(), dmatrix, partial),
            *(n * h * w, h, w, channels, ctx.eps, ctx.to_phases),
            *(triton.cdiv(tiles, count), ROWS, wide, FOLDED),
            num_warps=8,
            num_stages=1,
        )
        dkernel = (
            sum_partials(dmatrix).view(4 * channels, 3, 3, FOLDED).permute(0, 3, 1, 2)
        )
        dscale, dbias = sum_partials(partial)
        return (
            *(dkernel.to(x.dtype), dscale.to(scale.dtype), dbias.to(bias.dtype)),
            *(None, None, None),
        )


def _wide(channels: int) -> int:
    return max(16, int(triton.next_power_of_2(channels)))


@triton.jit
@no_type_check
def _near(x, row, tap, j, rows, h, w, J: tl.constexpr):
    """Channel `j` of the pixel that lies in the direction of a tap."""
    dy, dz = tap // 3 - 1, tap % 3 - 1
    y, z = row // w % h + dy, row % w + dz
    inside = (row < rows) & (y >= 0) & (y < h) & (z >= 0) & (z < w)
    return tl.load(x + (row + dy * w + dz).to(tl.int64) * J + j, inside, 0.0)


@triton.jit
@no_type_check
def _folded(row, w, channels, TO_PHASES: tl.constexpr):
    """Where a pixel's channels begin, as it is or among the phases of a coarser map."""
    if TO_PHASES:
        y, x = row // w, row % w
        row = (y // 2 * (w // 2) + x // 2) * 4 + y % 2 * 2 + x % 2
    return row.to(tl.int64) * channels


@triton.jit
@no_type_check
def _product(most, rest, matrix, phase, channels, C: tl.constexpr, J: tl.constexpr):
    """The convolution's output of one phase: eight taps side by side, and the ninth."""
    col = tl.arange(0, C)[None, :]
    entry = matrix + (phase * channels + col) * (9 * J)
    known = col < channels
    value = tl.dot(most, tl.load(entry + tl.arange(0, 8 * J)[:, None], known, 0.0))
    tail = tl.load(entry + 8 * J + tl.arange(0, J)[:, None], known, 0.0)
    return tl.dot(rest, tail, value)


@triton.jit
@no_type_check
def _first_layer_forward(
    x,
    matrix,
    bias,
    scale,
    out,
    pooled,
    winner,
    rows,
    h,
    w,
    channels,
    eps,
    TO_PHASES: tl.constexpr,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
):
    col = tl.arange(0, C)[None, :]
    k, j = tl.arange(0, 8 * J)[None, :], tl.arange(0, J)[None, :]
    gain = tl.load(scale + col, col < channels, 0.0).to(tl.float32)
    shift = tl.load(bias + col, col < channels, 0.0).to(tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * R + tl.arange(0, R)[:, None]
        most = _near(x, row, k // J, k % J, rows, h, w, J)
        rest = _near(x, row, 8, j, rows, h, w, J)
        best = _product(most, rest, matrix, 0, channels, C, J)
        phase = tl.zeros((R, C), tl.int32)
        for i in tl.static_range(1, 4):
            other = _product(most, rest, matrix, i, channels, C, J)
            phase = tl.where(other > best, i, phase)
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
    x,
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
    channels,
    eps,
    TO_PHASES: tl.constexpr,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
):
    col = tl.arange(0, C)[None, :]
    k, j = tl.arange(0, 8 * J), tl.arange(0, J)
    gain = tl.load(scale + col, col < channels, 0.0).to(tl.float32)
    shift = tl.load(bias + col, col < channels, 0.0).to(tl.float32)
    dgain = tl.zeros((1, C), tl.float32)
    dshift = tl.zeros((1, C), tl.float32)
    most0 = tl.zeros((8 * J, C), tl.float32)
    rest0 = tl.zeros((J, C), tl.float32)
    most1 = tl.zeros((8 * J, C), tl.float32)
    rest1 = tl.zeros((J, C), tl.float32)
    most2 = tl.zeros((8 * J, C), tl.float32)
    rest2 = tl.zeros((J, C), tl.float32)
    most3 = tl.zeros((8 * J, C), tl.float32)
    rest3 = tl.zeros((J, C), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * R + tl.arange(0, R)[:, None]
        inside = (row < rows) & (col < channels)
        place = row.to(tl.int64) * channels + col
        v = tl.load(pooled + place, inside, 0.0).to(tl.float32) + shift
        phase = tl.load(winner + place, inside, 0)
        place = _folded(row, w, channels, TO_PHASES) + col
        dv = tl.load(dy + place, inside, 0.0).to(tl.float32)
        most = tl.trans(
            _near(x, row, (k // J)[None, :], (k % J)[None, :], rows, h, w, J)
        )
        rest = tl.trans(_near(x, row, 8, j[None, :], rows, h, w, J))
        root = tl.rsqrt(tl.sum(v * v, 1)[:, None] / channels + eps)
        v *= root
        z = v * gain
        open = tl.sigmoid(z)
        dv *= open * (1 + z * (1 - open))
        dgain += tl.sum(dv * v, 0)[None, :]
        dv *= gain
        dv = (dv - v * (tl.sum(dv * v, 1)[:, None] / channels)) * root
        dshift += tl.sum(dv, 0)[None, :]
        dv = dv.to(pooled.dtype.element_ty)
        g = tl.where(phase == 0, dv, 0.0)
        most0, rest0 = tl.dot(most, g, most0), tl.dot(rest, g, rest0)
        g = tl.where(phase == 1, dv, 0.0)
        most1, rest1 = tl.dot(most, g, most1), tl.dot(rest, g, rest1)
        g = tl.where(phase == 2, dv, 0.0)
        most2, rest2 = tl.dot(most, g, most2), tl.dot(rest, g, rest2)
        g = tl.where(phase == 3, dv, 0.0)
        most3, rest3 = tl.dot(most, g, most3), tl.dot(rest, g, rest3)
    size: tl.constexpr = 9 * J
    known = col < channels
    entry = dmatrix + (tl.program_id(0) * 4 * channels + col) * size
    tl.store(entry + k[:, None], most0, known)
    tl.store(entry + 8 * J + j[:, None], rest0, known)
    entry += channels * size
    tl.store(entry + k[:, None], most1, known)
    tl.store(entry + 8 * J + j[:, None], rest1, known)
    entry += channels * size
    tl.store(entry + k[:, None], most2, known)
    tl.store(entry + 8 * J + j[:, None], rest2, known)
    entry += channels * size
    tl.store(entry + k[:, None], most3, known)
    tl.store(entry + 8 * J + j[:, None], rest3, known)
    here = partial + tl.program_id(0) * 2 * channels + col
    tl.store(here, dgain, known)
    tl.store(here + channels, dshift, known)
