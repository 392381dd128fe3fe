"""The host's side of residual blocks in tiles: which kernels for which maps.

Three kernels do all of a block (`steps.cu`): the first measures the map, the others are
a norm and a convolution each, of which the second adds the map at its end. Between them
memory holds nothing but what the backward pass reads. That takes bfloat16 and maps that
divide evenly into tiles (`tile.cu`); others have a kernel for every norm, convolution
and sum.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.norm import cluster_group_norm
from reverie.kernels.norm.cluster_group_norm.launch import (
    MEMORY,
    SYSTEM,
    is_planned_for,
)
from reverie.nets.residual import EPS, GROUPS

LINES, COLUMNS, UNITS = 4, 16, 32
"""What a warp makes: pixels down and across, and channels."""
ALIGNED = 16
"""Bytes that are read at once."""
THREADS = 512
"""That a processor holds, with the registers that they want."""
KERNELS = ("measure_parts", "convolve")


class Size(NamedTuple):
    """Of a map."""

    height: int
    width: int
    channels: int


class Plan(NamedTuple):
    """How a map is shared among threads."""

    tall: int  # lines of a block of threads

    def parts(self, size: Size) -> int:
        """Blocks that share a map."""
        return size.height // self.tall

    def threads(self, size: Size) -> int:
        warps = self.tall // LINES * (size.width // COLUMNS) * (size.channels // UNITS)
        return 32 * warps

    def shared(self, size: Size) -> int:
        """Bytes of weights and activations that a block keeps."""
        tile = (self.tall + 2) * (size.width + 8)
        return 2 * size.channels * (tile + 9 * size.channels)

    def room(self, size: Size) -> int:
        """Bytes of sums that it keeps."""
        return 4 * (2 * size.channels + 2 * self.threads(size))

    def blocks(self, size: Size) -> int:
        """How many a processor has room for."""
        together = self.room(size) + self.shared(size) + SYSTEM
        return min(MEMORY // together, THREADS // self.threads(size))

    def fits(self, size: Size) -> bool:
        """Whether every warp gets as much as any other, and everything has room."""
        return (
            self.tall in (4, 8, 16)
            and size.height % self.tall == 0
            and size.width % COLUMNS == 0
            and size.channels in (32, 64)
            and size.channels <= self.threads(size) <= THREADS
            and self.blocks(size) > 0
        )


PLANS: dict[Size, Plan] = {Size(64, 64, 32): Plan(4), Size(32, 32, 32): Plan(8)}
"""Maps for which this is quicker on an H200, by almost a half. With 64 channels the
products of libraries make up for their passes over memory."""

_refused: list[str] = []
"""Why a kernel did not run; from then on, others do the work."""


class Given(NamedTuple):
    """Everything a block has besides its map: norms in float32, the rest in half.

    `first` is added to the map ahead of it, and `last` at the end.
    """

    first: Tensor | None
    scale0: Tensor
    shift0: Tensor
    scale1: Tensor
    shift1: Tensor
    weight0: Tensor
    bias0: Tensor
    weight1: Tensor
    last: Tensor


class Found(NamedTuple):
    """What comes out of a block, and what its gradient needs to know."""

    y: Tensor
    stats0: Tensor
    middle: Tensor
    stats1: Tensor


def forward(x: Tensor, given: Given) -> Found | None:
    """A block without a convolution beside it; None where others should do it."""
    plan = plan_for(x, given)
    if plan is None:
        return None
    try:
        return _forward(x.contiguous(), given, plan)
    except nvrtc.Unavailable as error:
        refuse(error)
        return None


def plan_for(x: Tensor, given: Given) -> Plan | None:
    """How to do maps such as these; None where others should."""
    halves = [x, given.weight0, given.bias0, given.weight1, given.last]
    halves += [] if given.first is None else [given.first]
    if {v.dtype for v in halves} != {torch.bfloat16} or not x.numel():
        return None
    if any(v.data_ptr() % ALIGNED for v in halves):
        return None
    plan = PLANS.get(Size(*x.shape[1:]))
    return None if plan is None or _refused or not _has_tiles(x.device) else plan


class _Step(ctypes.Structure):
    _fields_ = [
        *((key, ctypes.c_void_p) for key in ("x", "bias", "scale", "shift")),
        *((key, ctypes.c_void_p) for key in ("weight", "beside", "last", "sums")),
        *((key, ctypes.c_void_p) for key in ("stats", "found", "out")),
        ("eps", ctypes.c_float),
    ]


def _forward(x: Tensor, given: Given, plan: Plan) -> Found:
    norms = (given.scale0, given.shift0, given.scale1, given.shift1)
    assert all(v.dtype == torch.float32 for v in norms)
    rows, size = len(x), Size(*x.shape[1:])
    measure, convolve = load(x.device, size, plan)
    blocks = rows * plan.parts(size)
    stats = x.new_empty(2, rows, 2, size.channels, dtype=torch.float32)
    sums = x.new_empty(2, blocks, 2, size.channels, dtype=torch.float32)
    middle, y = torch.empty_like(x), torch.empty_like(x)
    weight0, weight1 = _in_rows(given.weight0), _in_rows(given.weight1)
    measure(_step(x=x, found=sums[0]), blocks, overlap=False)
    to_middle = _step(
        **{"x": x, "bias": given.first, "scale": given.scale0, "shift": given.shift0},
        **{"weight": weight0, "sums": sums[0], "stats": stats[0]},
        **{"found": sums[1], "out": middle},
    )
    convolve(to_middle, blocks, overlap=False)
    to_end = _step(
        **{"x": middle, "bias": given.bias0},
        **{"scale": given.scale1, "shift": given.shift1},
        **{"weight": weight1, "sums": sums[1], "stats": stats[1]},
        **{"beside": x, "last": given.last, "out": y},
    )
    convolve(to_end, blocks, overlap=False)
    return Found(y, stats[0], middle, stats[1])


def _step(**tensors: Tensor | None) -> _Step:
    """Arguments of a kernel; those that are not given are null."""
    places = {key: 0 if v is None else v.data_ptr() for key, v in tensors.items()}
    return _Step(**places, eps=EPS)


def _in_rows(weight: Tensor) -> Tensor:
    """With inputs next to each other, as memory mostly has them already."""
    return weight.contiguous(memory_format=torch.channels_last)


@functools.cache
def load(device: torch.device, size: Size, plan: Plan) -> list[nvrtc.OverlappingKernel]:
    """The `KERNELS` for maps of one size."""
    shared = (0, plan.shared(size))
    handles = nvrtc.load(source(size, plan), KERNELS, device)
    return [
        nvrtc.OverlappingKernel(handle, 1, plan.threads(size), each)
        for handle, each in zip(handles, shared, strict=True)
    ]


def source(size: Size, plan: Plan) -> str:
    assert plan.fits(size), (size, plan)
    sizes = {"HEIGHT": size.height, "WIDTH": size.width, "CHANNELS": size.channels}
    sizes |= {"GROUPS": GROUPS, "TALL": plan.tall, "THREADS": plan.threads(size)}
    sizes |= {"BLOCKS": plan.blocks(size), "SPLIT": 1}
    here, there = resources.files(__package__), resources.files(cluster_group_norm)
    files = (
        *(there / f"{name}.cu" for name in ("device", "vectors")),
        *(here / f"{name}.cu" for name in ("device", "convolution", "kernels")),
    )
    return "\n".join(
        [
            *(f"#define {key} {value}" for key, value in sizes.items()),
            *(file.read_text() for file in files),
        ]
    )


@functools.cache
def _has_tiles(device: torch.device) -> bool:
    """Whether the GPU is one that plans are for, and the compiler does its work."""
    if not is_planned_for(device):
        return False
    try:
        nvrtc.compile_in_background((source(*each) for each in PLANS.items()), device)
        for size, plan in PLANS.items():
            load(device, size, plan)
    except nvrtc.Unavailable as error:
        refuse(error)
        return False
    return True


def refuse(error: nvrtc.Unavailable) -> None:
    """Leave the work to others from now on."""
    _refused.append(str(error))
    warnings.warn(
        f"Residual blocks take longer than they could: {error}.", stacklevel=2
    )
