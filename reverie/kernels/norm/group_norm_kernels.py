"""Triton kernels and functions of group norm with SiLU.

The grid is (feature maps, parts). If the work is divided by pixels, a part has all
channels of some pixels (C is CHANNELS); if by groups, all pixels of some channels. A
tile has R pixels and C channels; PER_GROUP is the number of channels of a group, and
`row` the index of a feature map in the batch. Statistics and sums are stored per
channel, even if they are the same for all channels of a group. In variable names, `v`
is the input (normalized by `normalize_tile`), `z` the output of the norm, `dz` its
gradient, and `gate` the sigmoid of `z`.
"""

from __future__ import annotations

import triton.language as tl

from reverie.kernels.launch import jit
from reverie.kernels.norm.rms_norm import silu_grad

STAGES: tl.constexpr = tl.constexpr(3)
"""Pipeline stages: one tile is processed while the next ones are loaded."""


@jit
def sum_kernel(
    x, sums, pixels,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    PER_GROUP: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Store the sums of `_sum_tiles` over the pixels of one part of a feature map."""
    row, part = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, C)
    x += row.to(tl.int64) * pixels * CHANNELS
    first = tl.load(x + col).to(tl.float32)
    total, square = _sum_tiles(
        x, first, part * STEPS, pixels, col, STEPS, CHANNELS, C, R
    )
    store_pair(sums + (row * PARTS + part) * 2 * C + col, total, square, C)


@jit
def norm_kernel(
    x, bias, scale, shift, sums, stats, out, eps, pixels,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    PER_GROUP: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Apply norm and SiLU.

    Without `sums`, the work is divided by groups, and a program first computes the
    statistics of its groups.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    start = row.to(tl.int64) * pixels * CHANNELS
    x, out = x + start, out + start
    if sums is None:
        start_step = 0
        col = part * C + tl.arange(0, C)
        first = tl.load(x + col).to(tl.float32)
        total, square = _sum_tiles(x, first, 0, pixels, col, STEPS, CHANNELS, C, R)
    else:
        start_step = part * STEPS
        col = tl.arange(0, C)
        first = tl.load(x + col).to(tl.float32)
        total, square = sum_parts(sums, row, PARTS, 2, C)
    mean, rstd = group_statistics(
        first, bias, total, square, col, eps, pixels, PER_GROUP, C
    )
    if sums is None or part == 0:
        store_pair(stats + row * 2 * CHANNELS + col, mean, rstd, CHANNELS)
    factor, intercept = factor_and_intercept(mean, rstd, bias, scale, shift, col)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        offset, mask = _tile(start_step + i, pixels, col, CHANNELS, R)
        v = tl.load(x + offset, mask, 0.0).to(tl.float32)
        z = v * factor[None, :] + intercept[None, :]
        tl.store(out + offset, z * tl.sigmoid(z), mask)


@jit
def backward_kernel(
    x, bias, scale, shift, stats, dy, sums, out, residual_grad, dx, pixels,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    PER_GROUP: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Backward pass with the work divided by pixels; it is called twice.

    Without `dx`, compute the gradients of shift and scale, and recompute the
    activation. With `dx`, compute the gradient of `x`, and sums over pixels of its two
    terms: the gradient through the norm, and `residual_grad`.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, C)
    start = row.to(tl.int64) * pixels * CHANNELS
    x, dy = x + start, dy + start
    mean, rstd, gain, beta = load_norm(stats, bias, scale, shift, row, col, CHANNELS)
    if dx is None:
        out += start
    else:
        dx += start
        dshift, dscale = sum_parts(sums, row, PARTS, 4, C)
        mean_dz, mean_dzv = gradient_means(dshift, dscale, gain, pixels, PER_GROUP, C)
    first = tl.zeros((R, C), tl.float32)
    second = tl.zeros((R, C), tl.float32)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        offset, mask = _tile(part * STEPS + i, pixels, col, CHANNELS, R)
        v = tl.load(x + offset, mask, 0.0).to(tl.float32)
        v, z, gate = normalize_tile(v, mean, rstd, gain, beta)
        if dx is None:
            tl.store(out + offset, z * gate, mask)
        dz = tl.load(dy + offset, mask, 0.0).to(tl.float32)
        if dx is None:
            dz *= silu_grad(z, gate)
            first += dz
            second += dz * v
        else:
            dz *= silu_grad(z, gate) * gain[None, :]
            dv = input_grad(dz, v, mean_dz, mean_dzv, rstd)
            dv = tl.where(mask, dv, 0.0)
            if bias is not None:
                first += dv
            if residual_grad is not None:
                extra = tl.load(residual_grad + start + offset, mask, 0.0)
                extra = extra.to(tl.float32)
                second += extra
                dv += extra
            tl.store(dx + offset, dv, mask)
    # a part has four sums; each of the two calls computes two of them
    index = 0 if dx is None else 2
    ptr = sums + ((row * PARTS + part) * 4 + index) * C + col
    store_pair(ptr, tl.sum(first, 0), tl.sum(second, 0), C)


@jit
def groups_backward_kernel(
    x, bias, scale, shift, stats, dy, residual_grad, out, dx, sums, pixels,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    PER_GROUP: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The whole backward pass, divided by groups; a tile has all pixels of the map."""
    row, part = tl.program_id(0), tl.program_id(1)
    col = part * C + tl.arange(0, C)
    mean, rstd, gain, beta = load_norm(stats, bias, scale, shift, row, col, CHANNELS)
    offset, mask = _tile(0, pixels, col, CHANNELS, R)
    offset = row.to(tl.int64) * pixels * CHANNELS + offset
    v = tl.load(x + offset, mask, 0.0).to(tl.float32)
    v, z, gate = normalize_tile(v, mean, rstd, gain, beta)
    tl.store(out + offset, z * gate, mask)
    dz = tl.load(dy + offset, mask, 0.0).to(tl.float32)
    dz *= silu_grad(z, gate)
    dshift, dscale = tl.sum(dz, 0), tl.sum(dz * v, 0)
    mean_dz, mean_dzv = gradient_means(dshift, dscale, gain, pixels, PER_GROUP, C)
    dv = input_grad(dz * gain[None, :], v, mean_dz, mean_dzv, rstd)
    dv = tl.where(mask, dv, 0.0)
    ptr = sums + row * 4 * CHANNELS + col
    store_pair(ptr, dshift, dscale, CHANNELS)
    tl.store(ptr + 2 * CHANNELS, tl.sum(dv, 0))
    if residual_grad is not None:
        extra = tl.load(residual_grad + offset, mask, 0.0).to(tl.float32)
        tl.store(ptr + 3 * CHANNELS, tl.sum(extra, 0))
        dv += extra
    else:
        tl.store(ptr + 3 * CHANNELS, dshift * 0)
    tl.store(dx + offset, dv, mask)


@jit
def _tile(step, pixels, col, CHANNELS: tl.constexpr, R: tl.constexpr):
    """Return the offsets of a tile in its feature map, and a mask of valid pixels."""
    pixel = step * R + tl.arange(0, R)[:, None]
    return pixel * CHANNELS + col[None, :], pixel < pixels


@jit
def _sum_tiles(
    x, first, start_step, pixels, col,
    STEPS: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sum the differences from the first pixel, and their squares.

    Squares of the values themselves would lose the variance of almost constant maps to
    rounding.
    """
    total = tl.zeros((R, C), tl.float32)
    square = tl.zeros((R, C), tl.float32)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        offset, mask = _tile(start_step + i, pixels, col, CHANNELS, R)
        v = tl.load(x + offset, mask, 0.0).to(tl.float32)
        v = tl.where(mask, v - first[None, :], 0.0)
        total += v
        square += v * v
    return tl.sum(total, 0), tl.sum(square, 0)


@jit
def store_pair(ptr, first, second, stride):
    """Store two vectors whose addresses differ by `stride` elements."""
    tl.store(ptr, first)
    tl.store(ptr + stride, second)


@jit
def sum_parts(sums, row, PARTS: tl.constexpr, KINDS: tl.constexpr, C: tl.constexpr):
    """Add up, over the parts of a map, the first two of the KINDS sums of each part."""
    first = tl.zeros((C,), tl.float32)
    second = tl.zeros((C,), tl.float32)
    for i in range(PARTS):
        ptr = sums + (row * PARTS + i) * KINDS * C + tl.arange(0, C)
        first += tl.load(ptr)
        second += tl.load(ptr + C)
    return first, second


@jit
def _sum_group(v, PER_GROUP: tl.constexpr, C: tl.constexpr):
    """Return for each channel the sum over its group."""
    sums = tl.sum(tl.reshape(v, (C // PER_GROUP, PER_GROUP)), 1)
    wide = tl.broadcast_to(sums[:, None], (C // PER_GROUP, PER_GROUP))
    return tl.reshape(wide, (C,))


@jit
def group_statistics(
    first, bias, total, square, col, eps, pixels,
    PER_GROUP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return mean and rstd of each channel's group, from `_sum_tiles` of all pixels.

    `first` is the first pixel of the map. The bias is added before the norm.
    """
    mean = total / pixels
    deviations = square - total * mean  # squared deviations from the channel's mean
    mean += first
    if bias is not None:
        mean += tl.load(bias + col).to(tl.float32)
    group_mean = _sum_group(mean, PER_GROUP, C) / PER_GROUP
    difference = mean - group_mean
    deviations += pixels * difference * difference
    variance = _sum_group(deviations, PER_GROUP, C) / (pixels * PER_GROUP)
    return group_mean, tl.rsqrt(variance + eps)


@jit
def factor_and_intercept(mean, rstd, bias, scale, shift, col):
    """Return (a, b) such that `group_norm(x + bias) = a * x + b`."""
    if bias is not None:
        mean -= tl.load(bias + col).to(tl.float32)
    factor = rstd * tl.load(scale + col).to(tl.float32)
    return factor, tl.load(shift + col).to(tl.float32) - mean * factor


@jit
def load_norm(stats, bias, scale, shift, row, col, CHANNELS: tl.constexpr):
    """Return mean (minus the bias added before the norm), rstd, scale and shift."""
    mean = tl.load(stats + row * 2 * CHANNELS + col)
    rstd = tl.load(stats + row * 2 * CHANNELS + CHANNELS + col)
    if bias is not None:
        mean -= tl.load(bias + col).to(tl.float32)
    gain = tl.load(scale + col).to(tl.float32)
    return mean, rstd, gain, tl.load(shift + col).to(tl.float32)


@jit
def normalize_tile(v, mean, rstd, gain, beta):
    """Return the normalized tile, the output of the norm, and the output's sigmoid."""
    v = (v - mean[None, :]) * rstd[None, :]
    z = v * gain[None, :] + beta[None, :]
    return v, z, tl.sigmoid(z)


@jit
def gradient_means(
    dshift, dscale, gain, pixels, PER_GROUP: tl.constexpr, C: tl.constexpr
):
    """Return the two group means that the gradient of a group norm subtracts."""
    count = pixels * PER_GROUP
    mean_dz = _sum_group(dshift * gain, PER_GROUP, C) / count
    return mean_dz, _sum_group(dscale * gain, PER_GROUP, C) / count


@jit
def input_grad(dz, v, mean_dz, mean_dzv, rstd):
    """Return the gradient of the input; `dz` includes the scale, `v` is normalized."""
    return (dz - mean_dz[None, :] - v * mean_dzv[None, :]) * rstd[None, :]
