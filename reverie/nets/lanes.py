"""Work on a GPU that goes on beside other work, until somebody needs its result.

Small kernels leave most of a GPU idle, so what does not depend on each other may as
well share it. Inside a CUDA graph the lanes become its branches. On other devices
everything happens where it is written.

What is made in a lane must be used before that lane is entered again, and what it reads
be kept until its result was waited for; so no memory changes hands in between.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def beside(like: Tensor, lane: int) -> Iterator[None]:
    """Do what follows in a lane, after all that was begun on this stream."""
    if like.device.type != "cuda":
        yield
        return
    side = _stream(like.device, lane)
    side.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(side):
        yield


def catch_up(like: Tensor, lane: int) -> None:
    """Let this stream go on only after what was begun in a lane."""
    if like.device.type == "cuda":
        torch.cuda.current_stream(like.device).wait_stream(_stream(like.device, lane))


@functools.cache
def _stream(device: torch.device, lane: int) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
