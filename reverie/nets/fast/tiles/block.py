"""The host's side of residual blocks in tiles: which kernels for which maps.

Three kernels do all of a block (`steps.cu`): the first measures the map, the others are
a norm and a convolution each, of which the second adds the map at its end. Between them
memory holds nothing but what the backward pass reads. Or a cluster does all at once
(`whole.cu`). That takes bfloat16 and maps that divide evenly into tiles (`tile.cu`);
others have a kernel for every norm, convolution and sum.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from reverie.nets.fast import clusters
from reverie.nets.fast.clusters.norm import MEMORY, SYSTEM
from reverie.nets.fast.persistent import nvrtc
from reverie.nets.residual import EPS, GROUPS

LINES, COLUMNS, UNITS = 4, 16, 32
"""What a warp makes: pixels down and across, and channels."""
EARLY = False
"""Whether kernels of a block begin, with the weights, before the one before has ended.
"""
MOST_PARTS = 8
"""Blocks of a cluster that every GPU with clusters has room for."""
ALIGNED = 16
"""Bytes that are read at once."""
THREADS = 512
"""That a processor holds, with the registers that they want."""


class Size(NamedTuple):
    """Of a map."""

    height: int
    width: int
    channels: int


class Plan(NamedTuple):
    """How a map is shared among threads."""

    tall: int  # lines of a block of threads
    whole: bool = False  # whether all blocks of a map work together

    def parts(self, size: Size) -> int:
        """Blocks that share a map."""
        return size.height // self.tall

    def threads(self, size: Size) -> int:
        warps = self.tall // LINES * (size.width // COLUMNS) * (size.channels // UNITS)
        return 32 * warps

    def shared(self, size: Size) -> int:
        """Bytes of weights and activations that a block keeps."""
        tile = (self.tall + 2) * (size.width + 8)
        weights = 9 * size.channels * (1 + self.whole)
        return 2 * size.channels * (tile + weights)

    def room(self, size: Size) -> int:
        """Bytes of sums that it keeps."""
        parts = 4 * self.parts(size) * size.channels if self.whole else 0
        return 4 * (2 * size.channels + 2 * self.threads(size) + parts)

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
            and (not self.whole or self._fits_cluster(size))
        )

    def _fits_cluster(self, size: Size) -> bool:
        return (
            self.tall == 8
            and size.channels == UNITS
            and 2 <= self.parts(size) <= MOST_PARTS
        )


KNOWN: dict[Size, Plan] = {Size(64, 64, 32): Plan(8), Size(32, 32, 32): Plan(8)}
"""Maps that this was written for."""
PLANS: dict[Size, Plan] = {}
"""Which maps to do so. None are, until those of `KNOWN` were tried on a GPU: so far
their source ran on CPUs only. All others take the other way."""

_refused: list[str] = []
"""Why a kernel did not run; from then on, others do the work."""


class Block(NamedTuple):
    """What comes out of a block, and what its gradient needs to know."""

    y: Tensor
    stats0: Tensor
    middle: Tensor
    stats1: Tensor


def forward(
    x: Tensor,
    first: Tensor | None,
    scale0: Tensor,
    shift0: Tensor,
    scale1: Tensor,
    shift1: Tensor,
    weight0: Tensor,
    bias0: Tensor,
    weight1: Tensor,
    last: Tensor,
) -> Block | None:
    """A block without a convolution beside it; None where others should do it."""
    plan = plan_for(
        x, weight0, weight1, bias0, last, *([] if first is None else [first])
    )
    if plan is None:
        return None
    assert {v.dtype for v in (scale0, shift0, scale1, shift1)} == {torch.float32}
    try:
        return _forward(
            *(x.contiguous(), first, scale0, shift0, scale1, shift1),
            *(weight0, bias0, weight1, last, plan),
        )
    except nvrtc.Unavailable as error:
        refuse(error)
        return None


def plan_for(x: Tensor, *others: Tensor) -> Plan | None:
    """How to do maps such as these; None where others should."""
    halves = (x, *others)
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


class _Whole(ctypes.Structure):
    _fields_ = [
        *((key, ctypes.c_void_p) for key in ("x", "first", "scale0", "shift0")),
        *((key, ctypes.c_void_p) for key in ("scale1", "shift1", "weight0", "bias0")),
        *((key, ctypes.c_void_p) for key in ("weight1", "last", "stats0", "stats1")),
        *((key, ctypes.c_void_p) for key in ("middle", "out")),
        ("eps", ctypes.c_float),
    ]


def _forward(
    x: Tensor,
    first: Tensor | None,
    scale0: Tensor,
    shift0: Tensor,
    scale1: Tensor,
    shift1: Tensor,
    weight0: Tensor,
    bias0: Tensor,
    weight1: Tensor,
    last: Tensor,
    plan: Plan,
) -> Block:
    rows, size = len(x), Size(*x.shape[1:])
    kernels = load(x.device, size, plan)
    blocks = rows * plan.parts(size)
    stats = x.new_empty(2, rows, 2, size.channels, dtype=torch.float32)
    middle, y = torch.empty_like(x), torch.empty_like(x)
    weight0, weight1 = _in_rows(weight0), _in_rows(weight1)
    if plan.whole:
        norms = (scale0, shift0, scale1, shift1)
        places = (x, first, *norms, weight0, bias0, weight1, last, *stats, middle, y)
        kernels[0](_Whole(*map(_address, places), EPS), blocks, early=False)
        return Block(y, stats[0], middle, stats[1])
    measure, convolve = kernels
    sums = x.new_empty(2, blocks, 2, size.channels, dtype=torch.float32)
    measure(_step(x=x, found=sums[0]), blocks, early=False)
    to_middle = _step(
        **{"x": x, "bias": first, "scale": scale0, "shift": shift0},
        **{"weight": weight0, "sums": sums[0], "stats": stats[0]},
        **{"found": sums[1], "out": middle},
    )
    convolve(to_middle, blocks, early=EARLY)
    to_end = _step(
        **{"x": middle, "bias": bias0, "scale": scale1, "shift": shift1},
        **{"weight": weight1, "sums": sums[1], "stats": stats[1]},
        **{"beside": x, "last": last, "out": y},
    )
    convolve(to_end, blocks, early=EARLY)
    return Block(y, stats[0], middle, stats[1])


def _step(**tensors: Tensor | None) -> _Step:
    """Arguments of a kernel; those that are not given are null."""
    return _Step(**{key: _address(v) for key, v in tensors.items()}, eps=EPS)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _in_rows(weight: Tensor) -> Tensor:
    """With inputs next to each other, as memory mostly has them already."""
    return weight.contiguous(memory_format=torch.channels_last)


@functools.cache
def load(device: torch.device, size: Size, plan: Plan) -> list[nvrtc.EarlyKernel]:
    """The kernels for maps of one size, by their `names`."""
    text = source(size, plan)
    if text in _ahead:
        _ahead.pop(text).result()
    shared = dict.fromkeys(names(plan), plan.shared(size)) | {"measure_parts": 0}
    handles = nvrtc.load(text, names(plan), device)
    return [
        nvrtc.EarlyKernel(handle, 1, plan.threads(size), shared[name])
        for name, handle in zip(names(plan), handles, strict=True)
    ]


def names(plan: Plan) -> list[str]:
    return ["whole_block"] if plan.whole else ["measure_parts", "convolve"]


def source(size: Size, plan: Plan) -> str:
    assert plan.fits(size), (size, plan)
    sizes = {"HEIGHT": size.height, "WIDTH": size.width, "CHANNELS": size.channels}
    sizes |= {"GROUPS": GROUPS, "TALL": plan.tall, "THREADS": plan.threads(size)}
    sizes["BLOCKS"] = plan.blocks(size)
    sizes["SPLIT"] = plan.parts(size) if plan.whole else 1
    here, there = resources.files(__package__), resources.files(clusters)
    way = "whole" if plan.whole else "steps"
    files = (
        *(there / f"{name}.cu" for name in ("machine", "vectors")),
        *(here / f"{name}.cu" for name in ("machine", "tile", way)),
    )
    return "\n".join(
        [
            *(f"#define {key} {value}" for key, value in sizes.items()),
            *(file.read_text() for file in files),
        ]
    )


_ahead: dict[str, Future[None]] = {}


def compile_ahead(device: torch.device) -> None:
    """Begin to compile all kernels side by side: one by one they would take longer."""
    pool = ThreadPoolExecutor(4, "compile")
    for size, plan in PLANS.items():
        text = source(size, plan)
        _ahead[text] = pool.submit(nvrtc.prepare, text, device)
    pool.shutdown(wait=False)


@functools.cache
def _has_tiles(device: torch.device) -> bool:
    """Whether the GPU is one that plans are for, and the compiler does its work."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 9 or properties.shared_memory_per_multiprocessor < MEMORY:
        return False
    try:
        compile_ahead(device)
        size, plan = next(iter(PLANS.items()))
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
