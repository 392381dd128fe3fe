"""Wall-clock time of named sections, and events per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from reverie.api import Metrics


class Timer:
    """Measures the time spent in named sections of a loop.

        with timer("policy"):
            ...

    On a GPU this is the time until the work is queued, not until it is done; the time
    until it is done appears in the section that waits for the result.
    """

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self._sections: dict[str, list[float]] = {}  # count, total, longest

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                section = self._sections.setdefault(name, [0, 0.0, 0.0])
                section[0] += 1
                section[1] += seconds
                section[2] = max(section[2], seconds)

    def metrics(self) -> Metrics:
        """Mean and maximum milliseconds, and share of the time since the last call."""
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


class Rates:
    """Counts events and returns their number per second, such as `fps/policy`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._counts: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + count

    def metrics(self) -> Metrics:
        """Events per second since the last call."""
        now = time.perf_counter()
        wall = max(now - self._start, 1e-9)
        metrics = {f"fps/{name}": n / wall for name, n in self._counts.items()}
        self._start = now
        self._counts = dict.fromkeys(self._counts, 0)
        return metrics
