"""Group norm with SiLU for feature maps `(batch, h, w, c)`, and its backward pass.

The work is divided among Triton programs in one of two ways, chosen by size:

- by pixels: a program handles all channels of some pixels. One kernel computes partial
  sums for the statistics, a second one applies the norm. Several programs per feature
  map use the whole GPU even if the batch is small.
- by groups: a program handles all pixels of some groups of channels. It computes their
  statistics and applies the norm, so that one kernel is enough. This is faster for
  small maps, which it reads once, and for small batches of large maps, where the second
  read hits the cache.

On Hopper GPUs, `cluster_group_norm` replaces both for the sizes that it supports. The
backward pass gets the norm's input and statistics, and recomputes the activation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.conv.nhwc import conv2d_input_grad, conv2d_weight_grad
from reverie.kernels.launch import can_launch, num_programs
from reverie.kernels.norm.cluster_group_norm import launch as cluster_group_norm
from reverie.kernels.norm.group_norm_kernels import (
    backward_kernel,
    groups_backward_kernel,
    norm_kernel,
    sum_kernel,
)
from reverie.kernels.sums import sum_partials
from reverie.nets.residual import EPS, GROUPS

TILE = 2048
"""Elements per iteration of a program that handles some pixels: eight per thread.

Loads are then 16 bytes wide in bfloat16, and a thread needs few enough registers for
several programs per multiprocessor (SM).
"""
WARPS = 8
"""Warps of a program that handles some pixels."""
MAX_CHANNELS = 1024
"""Maximum number of channels: a program that handles a pixel has all of them."""
MAX_PARTS = 16
"""Maximum number of programs per feature map."""
PROGRAMS_PER_SM = 8
"""Programs per multiprocessor if the work is divided by pixels."""
GROUP_TILE = 4096
"""Elements per iteration of a program that handles some groups."""
SECTOR_BYTES = 32
"""Bytes of a sector, the smallest unit of device memory accesses."""
MAX_BATCH_BY_GROUPS = 256
"""Maximum batch size for which maps larger than `GROUP_TILE` are divided by groups."""


class Tiling(NamedTuple):
    """How the work on a feature map is divided among programs.

    A program handles `steps` tiles of `block_pixels` times `block_channels` elements.
    """

    batch: int
    parts: int  # programs per feature map
    pixels: int  # of a feature map
    channels: int
    block_channels: int
    block_pixels: int
    steps: int
    warps: int

    @property
    def grid(self) -> tuple[int, int]:
        return (self.batch, self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size arguments of the kernels, in their order."""
        return (
            *(self.pixels, self.steps, self.parts, self.channels),
            *(self.channels // GROUPS, self.block_channels, self.block_pixels),
        )


def tile_by_groups(x: Tensor) -> Tiling | None:
    """Return a tiling in which a program handles some groups of channels.

    None if tiling by pixels is faster.
    """
    batch, height, width, channels = x.shape
    pixels = height * width
    # a program has whole groups, and reads at least one sector of memory per pixel
    min_channels = max(SECTOR_BYTES // x.element_size(), channels // GROUPS)
    block_channels = min(channels, min_channels)
    block_pixels = triton.next_power_of_2(pixels)
    if block_channels * block_pixels > GROUP_TILE:
        if batch > MAX_BATCH_BY_GROUPS:
            return None
        block_pixels = GROUP_TILE // block_channels
    # more channels per program, as long as there are two programs per SM
    min_programs = num_programs(x.device, batch * channels, 2)
    while (
        2 * block_channels * block_pixels <= GROUP_TILE
        and batch * channels // (2 * block_channels) >= min_programs
    ):
        block_channels *= 2
    block_channels = min(block_channels, channels)
    return Tiling(
        *(batch, channels // block_channels, pixels, channels),
        *(block_channels, block_pixels, triton.cdiv(pixels, block_pixels)),
        warps=8 if block_channels * block_pixels > 2048 else 4,
    )


def tile_by_pixels(
    x: Tensor,
    block_pixels: int | None = None,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> Tiling:
    """Return the tiling by pixels: several programs per map, each with all channels."""
    batch, height, width, channels = x.shape
    pixels = height * width
    block_pixels = block_pixels or max(1, TILE // channels)
    tiles = triton.cdiv(pixels, block_pixels)
    programs = num_programs(x.device, batch * tiles, programs_per_sm)
    # a power of two, so that few variants of the kernels are compiled
    parts = triton.next_power_of_2(triton.cdiv(programs, batch))
    parts = min(tiles, parts, MAX_PARTS)
    steps = triton.cdiv(tiles, parts)
    return Tiling(batch, parts, pixels, channels, channels, block_pixels, steps, WARPS)


def supports(x: Tensor, *channels: int) -> bool:
    """True if the kernels support device and dtype of `x`, and these channel counts."""
    fits = all(triton.next_power_of_2(c) == c and c <= MAX_CHANNELS for c in channels)
    return fits and x.numel() > 0 and can_launch(x.device, x.dtype)


def sum_pixels(x: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Return partial sums of each map, and an uninitialized tensor for its statistics.

    A program sums, for each channel, the differences of its pixels from the map's first
    pixel, and their squares: `(batch, parts, 2, channels)`. `norm_kernel` computes the
    statistics from these sums.
    """
    sums = x.new_empty(*tiling.grid, 2, tiling.channels, dtype=torch.float32)
    stats = x.new_empty(tiling.batch, 2, tiling.channels, dtype=torch.float32)
    sum_kernel[tiling.grid](x, sums, *tiling.sizes, num_warps=WARPS)
    return sums, stats


def group_norm_silu(
    x: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `silu(group_norm(x + bias))` and the statistics (mean, rstd)."""
    plan = cluster_group_norm.plan_for(x, bias, cluster_group_norm.FORWARD)
    if plan is not None:
        try:
            return cluster_group_norm.forward(x, bias, scale, shift, plan)
        except nvrtc.Unavailable as error:
            cluster_group_norm.fallback.enable(error)
    activation, tiling = torch.empty_like(x), tile_by_groups(x)
    if tiling is None:
        tiling = tile_by_pixels(x)
        sums, stats = sum_pixels(x, tiling)
    else:
        # no partial sums: a program has all pixels of its groups
        shape = (tiling.batch, 2, tiling.channels)
        sums, stats = None, x.new_empty(shape, dtype=torch.float32)
    norm_kernel[tiling.grid](
        *(x, bias, scale, shift, sums, stats, activation, EPS, *tiling.sizes),
        num_warps=tiling.warps,
    )
    return activation, stats


class NormConvGrads(NamedTuple):
    """Gradients of a norm followed by a convolution."""

    x: Tensor
    scale: Tensor
    shift: Tensor
    weight: Tensor
    bias: Tensor  # the bias that is added before the norm
    residual: Tensor  # `residual_grad`, summed over all maps and pixels


def norm_conv_backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    stats: Tensor,
    weight: Tensor,
    residual_grad: Tensor | None = None,
) -> NormConvGrads:
    """Return the gradients of `conv(silu(group_norm(x + bias)))`.

    `grad` is the gradient of the convolution's output. If `x` is also the input of a
    residual connection, `residual_grad`, the gradient through it, is added to that of
    `x`.
    """
    dy = conv2d_input_grad(grad, x, weight).contiguous()
    saved = (x, bias, scale, shift, stats, dy)
    plan = cluster_group_norm.plan_for(x, bias, cluster_group_norm.BACKWARD)
    if plan is not None:
        try:
            activation, sums = cluster_group_norm.backward(*saved, residual_grad, plan)
        except nvrtc.Unavailable as error:
            cluster_group_norm.fallback.enable(error)
        else:
            dweight = conv2d_weight_grad(grad, activation, weight)
            return _sum_grads(dy, dweight, sums)
    by_groups, activation = tile_by_groups(x), torch.empty_like(x)
    if by_groups is not None and by_groups.steps == 1:
        dx = torch.empty_like(x)
        sums = x.new_empty(by_groups.batch, 4, by_groups.channels, dtype=torch.float32)
        groups_backward_kernel[by_groups.grid](
            *(*saved, residual_grad, activation, dx, sums, *by_groups.sizes),
            num_warps=by_groups.warps,
        )
        return _sum_grads(dx, conv2d_weight_grad(grad, activation, weight), sums)
    tiling = tile_by_pixels(x)
    sums = x.new_empty(*tiling.grid, 4, tiling.channels, dtype=torch.float32)
    backward_kernel[tiling.grid](
        *(*saved, sums, activation, None, None, *tiling.sizes), num_warps=WARPS
    )
    dweight = conv2d_weight_grad(grad, activation, weight)
    # the activation is no longer needed, so its memory is used for `dx`
    dx = activation
    backward_kernel[tiling.grid](
        *(*saved, sums, None, residual_grad, dx, *tiling.sizes), num_warps=WARPS
    )
    return _sum_grads(dx, dweight, sums.flatten(0, 1))


def _sum_grads(dx: Tensor, dweight: Tensor, sums: Tensor) -> NormConvGrads:
    """Add up the partial sums of all programs, `(programs, 4, channels)`."""
    dshift, dscale, dbias, residual = sum_partials(sums)
    return NormConvGrads(dx, dscale, dshift, dweight, dbias, residual)
