"""Measure how long the GPU computes, and how long the host waits for it.

Work on a GPU is asynchronous: a call returns when the work is queued. CUDA events
around each replay of a CUDA graph give the time that the GPU needs for updates and
policy steps, and calls that wait for the GPU are timed on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from reverie.log.timer import Timer

GPU_WAIT = "gpu_wait"
"""Section of the timer in which the host waits for the GPU."""


class GpuTime:
    """Context that measures the time in which a CUDA device computes.

    It sums the durations of replays of CUDA graphs. A `measure()` block in which no
    graph is replayed counts as a whole; of other blocks, only the replays count.
    Simultaneous work on several streams counts once. On other devices it does nothing.
    """

    def __init__(self, device: torch.device, timer: Timer):
        self.device, self.timer = device, timer
        self.is_active = device.type == "cuda"
        self._intervals: list[tuple[Any, Any]] = []
        self._origin: Any = None
        self._cleanup = ExitStack()

    def __enter__(self) -> GpuTime:
        if self.is_active:
            wait = self._time_wait
            for owner in (torch.cuda.Stream, torch.cuda.Event):
                self._replace(owner, "synchronize", wait(owner.synchronize))
            self._replace(torch.cuda, "synchronize", wait(torch.cuda.synchronize))
            replay = torch.cuda.CUDAGraph.replay

            def timed_replay(graph: Any) -> None:
                with self._interval():
                    replay(graph)

            self._replace(torch.cuda.CUDAGraph, "replay", timed_replay)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._cleanup.close()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count this block as a whole, unless a CUDA graph is replayed in it."""
        if not self.is_active:
            yield
            return
        count = len(self._intervals)
        start = self._record()
        yield
        if len(self._intervals) == count:
            self._intervals.append((start, self._record()))

    def restart(self) -> None:
        """Wait for the GPU, and start to count from zero."""
        self.synchronize()
        self._intervals.clear()
        if self.is_active:
            self._origin = self._record()

    def busy_seconds(self) -> float | None:
        """Seconds since `restart` in which the GPU computed; None without a GPU."""
        if not self.is_active:
            return None
        self.synchronize()
        ms_until = self._origin.elapsed_time
        times = ((ms_until(start), ms_until(end)) for start, end in self._intervals)
        return union_length(times) / 1000

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.is_active:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def _interval(self) -> Iterator[None]:
        """Count the work that is queued in this block."""
        start = self._record()
        yield
        self._intervals.append((start, self._record()))

    def _record(self) -> Any:
        """Return a CUDA event, queued now."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _time_wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with its duration counted as waiting for the GPU."""

        @functools.wraps(function)
        def wait(*args: Any) -> Any:
            with self.timer(GPU_WAIT):
                return function(*args)

        return wait

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a function until the end of the context."""
        self._cleanup.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, function)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals, which may overlap."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
