"""Pool, bias, norm and activation in one pass over what a convolution computes.

The input is the fine map, or its phases (see `phases.py`); the output is left in the
layout that the next convolution reads. What is kept for the backward pass is the pooled
map and which of the four phases won; where phases are equal, the first one wins, as in
the plain part.
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


def max_pool_rms_norm_silu(
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
    return apply_autograd(_PoolNormAct, x, scale, bias, eps, *flags)


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
        ctx.settings = eps, from_phases, to_phases
        if to_phases:
            return y.view(b, h // 2, w // 2, 4 * channels)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pooled, winner, scale, bias = ctx.saved_tensors
        eps, from_phases, to_phases = ctx.settings
        b, h, w, channels = pooled.shape
        shape = (b, h, w, 4 * channels) if from_phases else (b, 2 * h, 2 * w, channels)
        dx = pooled.new_empty(shape)
        rows, (tall, wide, warps) = b * h * w, _tile(channels)
        tiles = triton.cdiv(rows, tall)
        count = num_programs(dx.device, tiles, per_sm=8)
        partial = torch.empty(count, 2, channels, device=dx.device)
        _pool_backward[(count,)](
            *(pooled, winner, bias, scale, grad.contiguous(), dx, partial),
            *(rows, w, channels, eps, triton.cdiv(tiles, count)),
            *(from_phases, to_phases, tall, wide),
            num_warps=warps,
        )
        dscale, dbias = sum_partials(partial)
        return dx, dscale.to(scale.dtype), dbias.to(bias.dtype), None, None, None


def _tile(channels: int) -> tuple[int, int, int]:
    """Rows and columns of one program's tile, and its warps."""
    wide = max(16, triton.next_power_of_2(channels))
    return max(1, 1024 // wide), wide, max(4, wide // 512)


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
