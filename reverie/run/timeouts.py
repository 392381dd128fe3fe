"""Timeouts of updates and environment steps of a rank.

If one takes longer, the heartbeat thread of the rank (`distributed/heartbeat.py`) ends
the run, because the other ranks would wait forever.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

from reverie.distributed.group import UPDATE_TIMEOUT
from reverie.distributed.heartbeat import progress
from reverie.envs.vector.vec_env import SyncVecEnv

MAX_SLOWDOWN = 10.0
"""Maximum duration of an update or environment step, in multiples of the duration of
earlier ones."""


class UpdateTimeout:
    """Limits the time of updates.

    The limit is `timeout`, or `MAX_SLOWDOWN` times the fastest update so far if that is
    longer. The fastest update is measured for each window (kind of batch); an update on
    several windows has the largest of their limits. The first update on a window may
    take `UPDATE_TIMEOUT`, because it compiles kernels.
    """

    def __init__(self, timeout: float):
        self.minimum = timeout
        self._fastest: dict[str, float] = {}  # seconds of an update, by window
        self._windows: set[str] = set()  # of the current update

    @contextlib.contextmanager
    def during_update(self) -> Iterator[None]:
        """Context of one update."""
        begin = time.monotonic()
        self._windows.clear()
        with progress.during("an update"):
            yield
        seconds = time.monotonic() - begin
        for name in self._windows:
            self._fastest[name] = min(seconds, self._fastest.get(name, math.inf))

    def add_window(self, window: str) -> None:
        """Set the limit of the current update, given a window that it trains on."""
        # with this duration, the limit of the first update is `UPDATE_TIMEOUT`
        first_seconds = UPDATE_TIMEOUT.total_seconds() / MAX_SLOWDOWN
        self._windows.add(window)
        seconds = max(self._fastest.get(x, first_seconds) for x in self._windows)
        progress.limit = max(self.minimum, MAX_SLOWDOWN * seconds)


class EnvStepTimeout:
    """Limits the time of environment steps in this process.

    The limit is `timeout`, or `MAX_SLOWDOWN` times the slowest step so far if that is
    longer. The first call of `during_step`, which resets the environments, has no
    limit. Environments in worker processes and actors have none either: they are
    restarted after timeouts of their own.
    """

    def __init__(self, timeout: float, envs: Any):
        self.minimum = timeout if isinstance(envs, SyncVecEnv) else math.inf
        self._slowest: float | None = None

    @contextlib.contextmanager
    def during_step(self) -> Iterator[None]:
        """Context of one step of all environments, or of their first reset."""
        begin, slowest = time.monotonic(), self._slowest
        limit = math.inf
        if slowest is not None:
            limit = max(self.minimum, MAX_SLOWDOWN * slowest)
        with progress.during("an environment step", limit):
            yield
        self._slowest = max(slowest or 0.0, time.monotonic() - begin)
