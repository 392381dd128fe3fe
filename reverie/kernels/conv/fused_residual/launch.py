"""Choose and launch the CUDA kernels that compute whole residual blocks.

Three kernels compute a block (`kernels.cu`): the first one computes statistics of its
input; the others are a norm and a convolution each, and the last one also adds the
input. They write only what the backward pass needs to device memory. The input must be
bfloat16, and divide evenly into tiles (`convolution.cu`); `residual.py` computes other
blocks with one kernel per norm, convolution and sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.norm.cluster_group_norm.launch import (
    RESERVED,
    SHARED_MEMORY,
    supports_clusters,
)
from reverie.nets.residual import EPS, GROUPS

WARP_ROWS, WARP_COLUMNS, WARP_CHANNELS = 4, 16, 32
"""Output of a warp: pixel rows and columns, and channels."""
ALIGNMENT = 16
"""Bytes that are loaded at once."""
MAX_THREADS = 512
"""Maximum number of threads per multiprocessor (SM), limited by registers."""
KERNELS = ("compute_statistics", "convolve")
"""Names of the kernels in `kernels.cu`."""


class MapSize(NamedTuple):
    """Size of a feature map."""

    height: int
    width: int
    channels: int


class TilePlan(NamedTuple):
    """How the work on one feature map is divided among thread blocks."""

    rows: int  # pixel rows per thread block

    def parts(self, size: MapSize) -> int:
        """Return the number of thread blocks per feature map."""
        return size.height // self.rows

    def threads(self, size: MapSize) -> int:
        """Return the number of threads per block."""
        tiles = self.rows // WARP_ROWS * (size.width // WARP_COLUMNS)
        return 32 * tiles * (size.channels // WARP_CHANNELS)

    def tile_bytes(self, size: MapSize) -> int:
        """Return the bytes of weights and activations in shared memory."""
        # with a border row on both sides; `PITCH` in `convolution.cu` is width + 8
        pixels = (self.rows + 2) * (size.width + 8)
        return 2 * size.channels * (pixels + 9 * size.channels)

    def sum_bytes(self, size: MapSize) -> int:
        """Return the bytes of statistics in shared memory."""
        return 4 * (2 * size.channels + 2 * self.threads(size))

    def blocks_per_sm(self, size: MapSize) -> int:
        """Return how many blocks fit on an SM at the same time."""
        used = self.sum_bytes(size) + self.tile_bytes(size) + RESERVED
        return min(SHARED_MEMORY // used, MAX_THREADS // self.threads(size))


PLANS: dict[MapSize, TilePlan] = {
    MapSize(64, 64, 32): TilePlan(4),
    MapSize(32, 32, 32): TilePlan(8),
}
"""Feature maps for which these kernels take little more than half the time of separate
kernels on an H200. With 64 channels, separate kernels are faster: the matrix products
of cuDNN are faster, which outweighs the additional memory passes."""

fallback = nvrtc.Fallback("residual blocks")
"""Enabled if the kernels cannot be compiled or launched."""


class BlockWeights(NamedTuple):
    """Parameters of a block: norms in float32, everything else in bfloat16."""

    input_bias: Tensor | None  # added to the input of the block
    scale0: Tensor
    shift0: Tensor
    scale1: Tensor
    shift1: Tensor
    weight0: Tensor
    bias0: Tensor
    weight1: Tensor
    output_bias: Tensor  # added to the output of the block


class BlockResult(NamedTuple):
    """Output of a block, and what its backward pass needs."""

    y: Tensor
    stats0: Tensor  # statistics of the first norm
    middle: Tensor  # output of the first convolution
    stats1: Tensor  # statistics of the second norm


def forward(x: Tensor, weights: BlockWeights) -> BlockResult | None:
    """Compute a block with an identity shortcut; None if it is not supported."""
    plan = plan_for(x, weights)
    if plan is None:
        return None
    try:
        return _forward(x.contiguous(), weights, plan)
    except nvrtc.Unavailable as error:
        fallback.enable(error)
        return None


def plan_for(x: Tensor, weights: BlockWeights) -> TilePlan | None:
    """Return the plan for the size of `x`; None if these kernels cannot be used."""
    inputs = [x, weights.weight0, weights.bias0, weights.weight1, weights.output_bias]
    inputs += [] if weights.input_bias is None else [weights.input_bias]
    if {v.dtype for v in inputs} != {torch.bfloat16} or not x.numel():
        return None
    if any(v.data_ptr() % ALIGNMENT for v in inputs):
        return None
    plan = PLANS.get(MapSize(*x.shape[1:]))
    usable = plan and not fallback.enabled and _is_available(x.device)
    return plan if usable else None


ARGUMENTS = (
    *("x", "bias", "scale", "shift", "weight", "shortcut", "output_bias"),
    *("sums", "stats", "out_sums", "out"),
)
"""Tensors of a kernel, in the order of the CUDA structure; some are optional."""


def _forward(x: Tensor, weights: BlockWeights, plan: TilePlan) -> BlockResult:
    """Launch the three kernels of a block."""
    norms = (
        (weights.input_bias, weights.scale0, weights.shift0),
        (weights.bias0, weights.scale1, weights.shift1),
    )
    assert all(v.dtype == torch.float32 for _, *norm in norms for v in norm)
    batch, size = len(x), MapSize(*x.shape[1:])
    compute_statistics, convolve = load(x.device, size, plan)
    blocks = batch * plan.parts(size)
    stats = x.new_empty(2, batch, 2, size.channels, dtype=torch.float32)
    sums = x.new_empty(2, blocks, 2, size.channels, dtype=torch.float32)
    middle, y = torch.empty_like(x), torch.empty_like(x)

    def launch(kernel: Callable[..., None], **tensors: Tensor | None) -> None:
        pointers = {name: tensors.get(name) for name in ARGUMENTS}
        kernel(nvrtc.make_arguments(pointers, {"eps": EPS}), blocks)

    def norm_conv(i: int, x: Tensor, weight: Tensor, **outputs: Tensor) -> None:
        """Apply a norm and a convolution."""
        bias, scale, shift = norms[i]
        inputs = {"x": x, "bias": bias, "scale": scale, "shift": shift}
        # usually already channels-last
        weight = weight.contiguous(memory_format=torch.channels_last)
        inputs |= {"weight": weight, "sums": sums[i], "stats": stats[i]}
        launch(convolve, **inputs, **outputs)

    launch(compute_statistics, x=x, out_sums=sums[0])
    norm_conv(0, x, weights.weight0, out_sums=sums[1], out=middle)
    added = {"shortcut": x, "output_bias": weights.output_bias}
    norm_conv(1, middle, weights.weight1, **added, out=y)
    return BlockResult(y, stats[0], middle, stats[1])


@functools.cache
def load(device: torch.device, size: MapSize, plan: TilePlan) -> list[nvrtc.Kernel]:
    """Compile and return the `KERNELS` for feature maps of one size."""
    shared = (0, plan.tile_bytes(size))
    handles = nvrtc.load(source(size, plan), KERNELS, device)
    return [
        nvrtc.Kernel(handle, 1, plan.threads(size), each)
        for handle, each in zip(handles, shared, strict=True)
    ]


def source(size: MapSize, plan: TilePlan) -> str:
    """Return the CUDA source of the kernels."""
    sizes = {"HEIGHT": size.height, "WIDTH": size.width, "CHANNELS": size.channels}
    sizes |= {"GROUPS": GROUPS, "ROWS": plan.rows, "THREADS": plan.threads(size)}
    sizes |= {"BLOCKS_PER_SM": plan.blocks_per_sm(size), "CLUSTER_SIZE": 1}
    files = (
        *(f"norm/cluster_group_norm/{name}.cu" for name in ("device", "vectors")),
        *(f"conv/fused_residual/{name}.cu" for name in ("device", "convolution")),
    )
    return nvrtc.read_source(sizes, *files, "conv/fused_residual/kernels.cu")


@functools.cache
def _is_available(device: torch.device) -> bool:
    """True if the GPU is supported and the kernels compile."""
    if not supports_clusters(device):
        return False
    try:
        nvrtc.compile_in_background((source(*each) for each in PLANS.items()), device)
        for size, plan in PLANS.items():
            load(device, size, plan)
    except nvrtc.Unavailable as error:
        fallback.enable(error)
    return not fallback.enabled
