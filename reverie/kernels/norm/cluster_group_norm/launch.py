"""Choose and launch the CUDA group norm kernels that use thread block clusters.

The thread blocks of a cluster exchange sums through their shared memory, so that even
feature maps too large for one multiprocessor (SM) are read only once (`common.cu`).
This needs compute capability 9, bfloat16, and a size in `PLANS`; `group_norm.py`
handles all other cases.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.nets.residual import EPS, GROUPS

SHARED_MEMORY = 227 * 1024
"""Maximum shared memory of one block on Hopper GPUs, in bytes.

A multiprocessor (SM) has 228 KiB, of which every block on it uses `RESERVED` bytes in
addition to its own. `blocks_per_sm` counts 227 KiB per SM, a conservative bound.
"""
RESERVED = 1024
"""Shared memory that CUDA reserves for each block, in bytes."""


class Direction(NamedTuple):
    """Resources of the forward or the backward kernel."""

    name: str
    maps: int  # feature maps kept in shared memory: x, and dy in the backward kernel
    kinds: int  # number of different sums per channel, KINDS in `common.cu`
    max_threads: int  # per SM, limited by the registers that a thread uses


FORWARD = Direction("forward", 1, 2, 1024)
BACKWARD = Direction("backward", 2, 3, 768)


class ClusterPlan(NamedTuple):
    """How the work on one feature map is divided among blocks and threads."""

    cluster_size: int  # blocks per feature map
    threads: int  # per block

    def map_bytes(self, pixels: int, channels: int, direction: Direction) -> int:
        """Return the bytes of bfloat16 feature maps in a block's shared memory."""
        return 2 * direction.maps * pixels // self.cluster_size * channels

    def sum_bytes(self, channels: int, direction: Direction) -> int:
        """Return the bytes of sums and barriers in a block's shared memory.

        At least the size of `Scratch` in `common.cu`.
        """
        warps = self.threads // 32
        sums = (warps + self.cluster_size) * direction.kinds
        sums += 3  # the three arrays `Scratch.channels`
        # 128 bytes for the barriers (at most 4 * 8 bytes) and for alignment
        return 4 * sums * channels + 128

    def blocks_per_sm(self, pixels: int, channels: int, direction: Direction) -> int:
        """Return how many blocks fit on an SM at the same time."""
        used = self.sum_bytes(channels, direction)
        used += self.map_bytes(pixels, channels, direction)
        by_memory = SHARED_MEMORY // (used + RESERVED)
        return min(by_memory, direction.max_threads // self.threads)


PLANS: dict[str, dict[tuple[int, int], ClusterPlan]] = {
    "forward": {
        (4096, 64): ClusterPlan(8, 256),
        (4096, 32): ClusterPlan(8, 128),
        (1024, 128): ClusterPlan(8, 256),
        (1024, 64): ClusterPlan(4, 128),
        (1024, 32): ClusterPlan(1, 256),
        (256, 128): ClusterPlan(1, 256),
        (256, 64): ClusterPlan(1, 128),
        (64, 256): ClusterPlan(1, 256),
        (64, 128): ClusterPlan(1, 128),
        (64, 64): ClusterPlan(1, 128),
    },
    "backward": {
        (1024, 128): ClusterPlan(8, 256),
        (1024, 64): ClusterPlan(8, 128),
        (1024, 32): ClusterPlan(1, 512),
        (256, 128): ClusterPlan(1, 512),
        (256, 64): ClusterPlan(1, 256),
        (64, 256): ClusterPlan(1, 256),
        (64, 128): ClusterPlan(1, 128),
        (64, 64): ClusterPlan(1, 64),
    },
}
"""The fastest plans on an H200, by number of pixels and of channels.

For the backward pass of larger maps, two passes over device memory are faster than
keeping the maps in shared memory.
"""

fallback = nvrtc.Fallback("group norms")
"""Enabled if the kernels cannot be compiled or launched."""


def plan_for(
    x: Tensor, bias: Tensor | None, direction: Direction
) -> ClusterPlan | None:
    """Return the plan for the size of `x`; None if these kernels cannot be used."""
    dtypes = {x.dtype, x.dtype if bias is None else bias.dtype}
    if dtypes != {torch.bfloat16} or fallback.enabled or not _is_available(x.device):
        return None
    _, height, width, channels = x.shape
    return PLANS[direction.name].get((height * width, channels))


def forward(
    x: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, plan: ClusterPlan
) -> tuple[Tensor, Tensor]:
    """Return `silu(group_norm(x + bias))` and the statistics (mean, rstd)."""
    assert scale.dtype == shift.dtype == torch.float32
    batch, height, width, channels = x.shape
    activation = torch.empty_like(x)
    stats = x.new_empty(batch, 2, channels, dtype=torch.float32)
    kernel = load(x.device, height * width, channels, FORWARD, plan)
    tensors = {"x": x, "bias": bias, "scale": scale, "shift": shift}
    tensors |= {"stats": stats, "out": activation}
    arguments = nvrtc.make_arguments(tensors, {"eps": EPS})
    kernel(arguments, batch * plan.cluster_size)
    return activation, stats


def backward(
    x: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    stats: Tensor,
    dy: Tensor,
    residual_grad: Tensor | None,
    plan: ClusterPlan,
) -> tuple[Tensor, Tensor]:
    """Return the recomputed activation, and sums over pixels `(batch, 4, channels)`.

    The four sums are the gradient of shift, the gradient of scale, the gradient of `x`
    and `residual_grad`. The gradient of `x`, plus `residual_grad`, overwrites `dy`.
    """
    assert scale.dtype == shift.dtype == torch.float32
    batch, height, width, channels = x.shape
    activation = torch.empty_like(x)
    sums = x.new_empty(batch, 4, channels, dtype=torch.float32)
    kernel = load(x.device, height * width, channels, BACKWARD, plan)
    tensors = {"x": x, "bias": bias, "scale": scale, "shift": shift, "stats": stats}
    tensors |= {"dy": dy, "residual_grad": residual_grad, "out": activation, "dx": dy}
    arguments = nvrtc.make_arguments({**tensors, "sums": sums}, {})
    kernel(arguments, batch * plan.cluster_size)
    return activation, sums


@functools.cache
def load(
    device: torch.device,
    pixels: int,
    channels: int,
    direction: Direction,
    plan: ClusterPlan,
) -> nvrtc.Kernel:
    """Compile and return the kernel for feature maps of one size."""
    text = source(pixels, channels, direction, plan)
    handle = nvrtc.load(text, [f"norm_{direction.name}"], device)[0]
    # dynamic shared memory only; that of `sum_bytes` is static
    shared = plan.map_bytes(pixels, channels, direction)
    return nvrtc.Kernel(handle, 1, plan.threads, shared)


def source(pixels: int, channels: int, direction: Direction, plan: ClusterPlan) -> str:
    """Return the CUDA source of a kernel."""
    sizes = {"PIXELS": pixels, "CHANNELS": channels, "GROUPS": GROUPS}
    sizes |= {"CLUSTER_SIZE": plan.cluster_size, "THREADS": plan.threads}
    sizes["BLOCKS_PER_SM"] = plan.blocks_per_sm(pixels, channels, direction)
    names = ("device", "vectors", "common", direction.name)
    files = (f"norm/cluster_group_norm/{name}.cu" for name in names)
    return nvrtc.read_source(sizes, *files)


def all_sources() -> Iterator[str]:
    """Yield the CUDA sources of all plans."""
    for direction in (FORWARD, BACKWARD):
        for (pixels, channels), plan in PLANS[direction.name].items():
            yield source(pixels, channels, direction, plan)


def supports_clusters(device: torch.device) -> bool:
    """True for GPUs with thread block clusters and enough shared memory."""
    if device.type != "cuda":
        return False
    gpu = torch.cuda.get_device_properties(device)
    return gpu.major >= 9 and gpu.shared_memory_per_multiprocessor >= SHARED_MEMORY


@functools.cache
def _is_available(device: torch.device) -> bool:
    """True if the GPU is supported and the kernels compile."""
    if not supports_clusters(device):
        return False
    try:
        load(device, 1024, 128, FORWARD, PLANS["forward"][1024, 128])
        nvrtc.compile_in_background(all_sources(), device)
    except nvrtc.Unavailable as error:
        fallback.enable(error)
    return not fallback.enabled
