"""Wall-clock time of named sections, and events per second."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from reverie.api import Metrics

P = ParamSpec("P")
R = TypeVar("R")
OTHER = "other"
"""Name of the time outside all sections, in `Timer.breakdown`."""


class Timer:
    """Measures the time spent in named sections of a loop.

        with timer("policy"):
            ...

    On a GPU this is the time until the work is queued, not until it is done; the time
    until it is done appears in the section that waits for the result. Sections can be
    nested: `metrics` counts the time of an inner section in the outer one, too,
    `breakdown` only in the inner one.
    """

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self.region: Callable[[str], AbstractContextManager[Any]] = nullcontext
        """Makes a context for each section, such as the region of a profiler."""
        self._lock = threading.Lock()
        self._created = self._start = time.perf_counter()
        self._sections: dict[str, list[float]] = {}  # count, total, longest
        self._thread = threading.get_ident()
        self._own_seconds: dict[str, float] = {}  # without inner sections
        self._inner_seconds = 0.0  # of the sections inside the current one

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if not self.enabled:
            with self.region(name):
                yield
            return
        is_own_thread = threading.get_ident() == self._thread
        siblings = 0.0  # time of earlier sections inside the same outer section
        if is_own_thread:
            siblings, self._inner_seconds = self._inner_seconds, 0.0
        start = time.perf_counter()
        try:
            with self.region(name):
                yield
        finally:
            seconds = time.perf_counter() - start
            if is_own_thread:
                own = self._own_seconds.get(name, 0.0) + seconds - self._inner_seconds
                self._own_seconds[name] = own
                self._inner_seconds = siblings + seconds
            with self._lock:
                section = self._sections.setdefault(name, [0, 0.0, 0.0])
                section[0] += 1
                section[1] += seconds
                section[2] = max(section[2], seconds)

    def metrics(self) -> Metrics:
        """Return mean and maximum duration of each section since the last call, in ms.

        `share` is the fraction of the wall-clock time.
        """
        with self._lock:
            now = time.perf_counter()
            wall = max(now - self._start, 1e-9)
            sections, self._sections, self._start = self._sections, {}, now
        metrics: Metrics = {}
        for name, (count, total, longest) in sections.items():
            metrics[f"timer/{name}/avg_ms"] = 1000 * total / count
            metrics[f"timer/{name}/max_ms"] = 1000 * longest
            metrics[f"timer/{name}/share"] = total / wall
        return metrics

    def breakdown(self) -> dict[str, float]:
        """Return the seconds since this timer was created, by section and `other`.

        Only completed sections of the thread that created the timer count, so that the
        sum is the wall time.
        """
        total = time.perf_counter() - self._created
        return {**self._own_seconds, OTHER: total - sum(self._own_seconds.values())}


class HasTimer(Protocol):
    """An object whose methods can be decorated with `timed`."""

    timer: Timer


T = TypeVar("T", bound=HasTimer)


def timed(
    name: str,
) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R]]:
    """Decorator of methods that are a section of `self.timer`."""

    def decorate(
        method: Callable[Concatenate[T, P], R],
    ) -> Callable[Concatenate[T, P], R]:
        @functools.wraps(method)
        def call(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self.timer(name):
                return method(self, *args, **kwargs)

        return call

    return decorate


class Rates:
    """Counts events and returns their number per second, such as `fps/policy`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._counts: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + count

    def metrics(self) -> Metrics:
        """Return the events per second since the last call."""
        now = time.perf_counter()
        wall = max(now - self._start, 1e-9)
        metrics = {f"fps/{name}": n / wall for name, n in self._counts.items()}
        self._start = now
        self._counts = dict.fromkeys(self._counts, 0)
        return metrics
