"""Work on a GPU that goes on beside other work, until somebody needs its result.

Small kernels leave most of a GPU idle, so what does not depend on each other may as
well share it. Inside a CUDA graph the lanes become its branches. On other devices
everything happens where it is written.

What is made in a lane may be used once it was waited for, and what it reads must be
kept until then. Entering a lane waits for all that was begun before, so that memory
which is let go changes hands only after its last use. Work that is begun on several
streams at once must not share a lane.

Where everything wants the GPU at once, the main stream of a graph comes first, then
lanes by their `hurry`: what nobody waits for soon fills the gaps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

FIRST = -3
"""The priority of a graph's main stream; lower numbers come first."""


class Lane(NamedTuple):
    """A stream of work, by name."""

    name: str
    hurry: int = 0  # up to 2: how soon its result is wanted


@contextmanager
def beside(like: Tensor, lane: Lane) -> Iterator[None]:
    """Do what follows in a lane, after all that was begun on this stream."""
    if like.device.type != "cuda":
        yield
        return
    side = _stream(like.device, lane)
    side.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(side):
        yield


def catch_up(like: Tensor, lane: Lane) -> None:
    """Let this stream go on only after what was begun in a lane."""
    if like.device.type == "cuda":
        torch.cuda.current_stream(like.device).wait_stream(_stream(like.device, lane))


@functools.cache
def _stream(device: torch.device, lane: Lane) -> Any:
    return torch.cuda.Stream(device, -lane.hurry)  # type: ignore[no-untyped-call]
