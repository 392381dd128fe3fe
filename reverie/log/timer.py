"""Where the time goes: named sections and rates."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from reverie.api import Metrics


class Timer:
    """Times named parts of a loop.

        with timer("policy"):
            ...

    On an accelerator this is the time until the work was handed over, not until it was
    done; whoever waits for the result pays for it.
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
            spent = time.perf_counter() - start
            with self._lock:
                section = self._sections.setdefault(name, [0, 0.0, 0.0])
                section[0] += 1
                section[1] += spent
                section[2] = max(section[2], spent)

    def metrics(self) -> Metrics:
        """Mean and longest milliseconds, and the share of the time since last asked."""
        with self._lock:
            now = time.perf_counter()
            wall = max(now - self._start, 1e-9)
            sections, self._sections, self._start = self._sections, {}, now
        result: Metrics = {}
        for name, (count, total, longest) in sections.items():
            result[f"timer/{name}/avg_ms"] = 1000 * total / count
            result[f"timer/{name}/max_ms"] = 1000 * longest
            result[f"timer/{name}/share"] = total / wall
        return result


class Rates:
    """Counts things, and says how many there were per second: `fps/policy`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._counts: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + count

    def metrics(self) -> Metrics:
        now = time.perf_counter()
        wall = max(now - self._start, 1e-9)
        result = {f"fps/{name}": n / wall for name, n in self._counts.items()}
        self._start = now
        self._counts = dict.fromkeys(self._counts, 0)
        return result
