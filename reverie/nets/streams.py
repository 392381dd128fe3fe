"""Side streams: run independent GPU work in parallel with the current stream.

Small kernels leave most of a GPU idle, so independent work can share it. Inside a CUDA
graph the side streams become branches of the graph. On other devices everything runs in
program order.

Results of a side stream may be used after `wait_for`, and its inputs must be kept alive
until then. The work of a side stream starts after all earlier work of the current
stream, so that freed memory is reused only after its last use. Work on the same side
stream runs in order, so work that should run in parallel needs different side streams.

When the GPU is busy, the main stream of a graph has the highest priority, then side
streams by their `priority`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

GRAPH_PRIORITY = -3
"""CUDA priority of a graph's main stream; lower numbers run first."""


class SideStream(NamedTuple):
    """Name and priority of a side stream.

    Each thread has its own CUDA stream for it, so that the work of other threads is
    neither captured in a CUDA graph of this thread nor waited for.
    """

    name: str
    priority: int = 0  # 0 to 2; higher runs first


NOISE = SideStream("noise")
"""Stream on which noise for samples is drawn."""


@contextmanager
def on_stream(like: Tensor, stream: SideStream) -> Iterator[None]:
    """Context whose work runs on a side stream.

    It starts after all earlier work of the current stream. `like` is any tensor on the
    device to use.
    """
    if like.device.type != "cuda":
        yield
        return
    side = _find_stream(like.device, stream)
    side.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(side):
        yield


def wait_for(like: Tensor, stream: SideStream) -> None:
    """Make the current stream wait for all earlier work of a side stream.

    While a CUDA graph is captured, this has no effect if the graph has no work on the
    side stream, because a graph cannot wait for work that it does not contain.
    """
    if like.device.type != "cuda":
        return
    side = _find_stream(like.device, stream)
    if torch.cuda.is_current_stream_capturing():
        with torch.cuda.stream(side):
            if not torch.cuda.is_current_stream_capturing():
                return
    torch.cuda.current_stream(like.device).wait_stream(side)


def _find_stream(device: torch.device, stream: SideStream) -> Any:
    return _cuda_stream(device, stream, threading.get_ident())


@functools.cache
def _cuda_stream(device: torch.device, stream: SideStream, thread: int) -> Any:
    return torch.cuda.Stream(device, -stream.priority)  # type: ignore[no-untyped-call]
