"""The host's side of the group norm in clusters: which kernel for which maps.

Blocks of a cluster exchange sums through their shared memory, so that maps too large
for one processor are still read only once (`norm.cu`). That takes a GPU of the year
2022 or later, bfloat16, and maps that divide evenly; others have `group_norm.py`.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.nets.residual import EPS, GROUPS

VECTOR = 8
"""Neighbouring channels that a thread takes at once."""
MEMORY = 227 * 1024
"""Bytes that blocks on one processor share, and the most that one may have."""
SYSTEM = 1024
"""Bytes of them that every block costs besides."""
SUMS = 48 * 1024
"""Bytes of them that a block may have for its sums."""


class Way(NamedTuple):
    """Of a map through the norm: there, or back."""

    name: str
    maps: int  # that are kept in shared memory
    kinds: int  # of sums
    most_threads: int  # on a processor, with the registers that they want


FORWARD = Way("forward", 1, 2, 1024)
BACKWARD = Way("backward", 2, 3, 768)


class Plan(NamedTuple):
    """How a map is shared among threads."""

    split: int  # blocks of a cluster
    threads: int  # of a block

    def fits(self, pixels: int, channels: int, way: Way) -> bool:
        """Whether every thread gets as much as any other, and everything has room."""
        share, rest = divmod(pixels, self.split)
        loads, odd = divmod(share * channels, VECTOR * self.threads)
        return (
            channels in (32, 64, 128, 256)
            and not rest
            and not odd
            and loads in (1, 2, 3, 4, 8, 12, 16, 32)
            and self.room(channels, way) <= SUMS
            and self.blocks(pixels, channels, way) > 0
        )

    def shared(self, pixels: int, channels: int, way: Way) -> int:
        """Bytes of maps that a block keeps."""
        return 2 * way.maps * pixels // self.split * channels

    def room(self, channels: int, way: Way) -> int:
        """Bytes of sums that it keeps, and of gates."""
        sums = (self.threads // 32 + self.split) * way.kinds + 3
        return 4 * sums * channels + 128

    def blocks(self, pixels: int, channels: int, way: Way) -> int:
        """How many a processor has room for."""
        room = self.room(channels, way) + self.shared(pixels, channels, way)
        return min(MEMORY // (room + SYSTEM), way.most_threads // self.threads)


Plans = dict[tuple[int, int], Plan]  # by pixels and channels
PLANS: dict[str, Plans] = {
    "forward": {
        (4096, 64): Plan(8, 256),
        (4096, 32): Plan(8, 128),
        (1024, 128): Plan(8, 256),
        (1024, 64): Plan(4, 128),
        (1024, 32): Plan(1, 256),
        (256, 128): Plan(1, 256),
        (256, 64): Plan(1, 128),
        (64, 256): Plan(1, 256),
        (64, 128): Plan(1, 128),
        (64, 64): Plan(1, 128),
    },
    "backward": {
        (1024, 128): Plan(8, 256),
        (1024, 64): Plan(8, 128),
        (1024, 32): Plan(1, 512),
        (256, 128): Plan(1, 512),
        (256, 64): Plan(1, 256),
        (64, 256): Plan(1, 256),
        (64, 128): Plan(1, 128),
        (64, 64): Plan(1, 64),
    },
}
"""The quickest that were found on an H200. On the way back through the largest maps,
two passes over all of memory are quicker than one that has to keep so much."""

_refused: list[str] = []
"""Why a kernel did not run; from then on, others do the work."""


def plan_for(x: Tensor, bias: Tensor | None, way: Way) -> Plan | None:
    """How to do maps such as these; None where others should."""
    kinds = {x.dtype, x.dtype if bias is None else bias.dtype}
    if kinds != {torch.bfloat16} or _refused or not _has_clusters(x.device):
        return None
    _, height, width, channels = x.shape
    return PLANS[way.name].get((height * width, channels))


class _Forward(ctypes.Structure):
    _fields_ = [
        *((key, ctypes.c_void_p) for key in ("x", "bias", "scale", "shift")),
        *((key, ctypes.c_void_p) for key in ("stats", "out")),
        ("eps", ctypes.c_float),
    ]


class _Backward(ctypes.Structure):
    _fields_ = [
        *((key, ctypes.c_void_p) for key in ("x", "bias", "scale", "shift", "stats")),
        *((key, ctypes.c_void_p) for key in ("slope", "more", "active", "dx", "sums")),
    ]


def normalize(
    x: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """The activation of a map, and what the norm measured: mean and 1 / deviation."""
    assert scale.dtype == shift.dtype == torch.float32
    rows, height, width, channels = x.shape
    active = torch.empty_like(x)
    stats = x.new_empty(rows, 2, channels, dtype=torch.float32)
    kernel = load(x.device, height * width, channels, FORWARD, plan)
    tensors = (x, bias, scale, shift, stats, active)
    arguments = _Forward(*map(_address, tensors), EPS)
    kernel(arguments, rows * plan.split, overlap=False)
    return active, stats


def go_back(
    x: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    stats: Tensor,
    slope: Tensor,
    more: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """The activation once more, and sums `(rows, 4, channels)` over each map.

    They are the gradients of shift and scale, the sum of the gradient of `x`, and that
    of `more`, which is added to it. The gradient of `x` takes the place of `slope`.
    """
    assert scale.dtype == shift.dtype == torch.float32
    rows, height, width, channels = x.shape
    active = torch.empty_like(x)
    sums = x.new_empty(rows, 4, channels, dtype=torch.float32)
    kernel = load(x.device, height * width, channels, BACKWARD, plan)
    tensors = (x, bias, scale, shift, stats, slope, more, active, slope, sums)
    kernel(_Backward(*map(_address, tensors)), rows * plan.split, overlap=False)
    return active, sums


@functools.cache
def load(
    device: torch.device, pixels: int, channels: int, way: Way, plan: Plan
) -> nvrtc.OverlappingKernel:
    """The kernel for maps of one size."""
    text = source(pixels, channels, way, plan)
    handle = nvrtc.load(text, [f"norm_{way.name}"], device)[0]
    shared = plan.shared(pixels, channels, way)
    return nvrtc.OverlappingKernel(handle, 1, plan.threads, shared)


def source(pixels: int, channels: int, way: Way, plan: Plan) -> str:
    assert plan.fits(pixels, channels, way), (pixels, channels, way, plan)
    sizes = {"PIXELS": pixels, "CHANNELS": channels, "GROUPS": GROUPS}
    sizes |= {"SPLIT": plan.split, "THREADS": plan.threads}
    sizes["BLOCKS"] = plan.blocks(pixels, channels, way)
    folder = resources.files(__package__)
    names = ("device", "vectors", "common", way.name)
    return "\n".join(
        [
            *(f"#define {key} {value}" for key, value in sizes.items()),
            *(folder.joinpath(f"{name}.cu").read_text() for name in names),
        ]
    )


def all_sources() -> Iterator[str]:
    for way in (FORWARD, BACKWARD):
        for (pixels, channels), plan in PLANS[way.name].items():
            yield source(pixels, channels, way, plan)


def is_planned_for(device: torch.device) -> bool:
    """Whether it is a GPU with clusters, and with memory as plans have it."""
    if device.type != "cuda":
        return False
    about = torch.cuda.get_device_properties(device)
    return about.major >= 9 and about.shared_memory_per_multiprocessor >= MEMORY


@functools.cache
def _has_clusters(device: torch.device) -> bool:
    """Whether the GPU has them, and the compiler is there and does its work."""
    if not is_planned_for(device):
        return False
    try:
        load(device, 1024, 128, FORWARD, PLANS["forward"][1024, 128])
        nvrtc.compile_in_background(all_sources(), device)
    except nvrtc.Unavailable as error:
        refuse(error)
        return False
    return True


def refuse(error: nvrtc.Unavailable) -> None:
    """Leave the work to others from now on, as part of a GPU may have to."""
    _refused.append(str(error))
    warnings.warn(f"Norms take longer than they could: {error}.", stacklevel=2)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
