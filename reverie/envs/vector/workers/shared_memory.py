"""The memory that the pool and its workers share: rows, actions and commands.

It is anonymous, so that nothing is left behind whatever ends us. Observations are
double-buffered: while a worker writes the next row, the previous one stays whole.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

import numpy as np

from reverie.api import UserError
from reverie.spaces import Spaces

CLOSE_EPISODE, IDLE, STEP, RESET = range(-1, 3)
"""What the pool wants of an environment. A worker has something to do from `STEP` on;
where nobody can continue an episode, the pool repeats the row before as its end."""

Entry = tuple[str, np.dtype, tuple[int, ...]]


class Layout:
    """Where everything lies in the shared memory; the same on both sides."""

    def __init__(self, obs_space: Spaces, act_space: Spaces, count: int):
        obs = _entries(obs_space, count)
        act = _entries(act_space, count)
        int8, int64 = np.dtype(np.int8), np.dtype(np.int64)
        own: list[Entry] = [("command", int8, (count,)), ("attempt", int64, (count,))]
        own.append(("side", int8, (1,)))
        self._parts = {"obs0": obs, "obs1": obs, "action": act, "own": own}
        self._offsets: dict[tuple[str, str], int] = {}
        self.nbytes = 0
        for part, entries in self._parts.items():
            for key, dtype, shape in entries:
                self._offsets[part, key] = self.nbytes
                size = int(np.prod(shape)) * dtype.itemsize
                self.nbytes += -(-size // 64) * 64  # a cache line each, at least

    def views(self, memory: mmap.mmap) -> Shared:
        arrays = {
            part: {
                key: np.ndarray(shape, dtype, memory, self._offsets[part, key])
                for key, dtype, shape in entries
            }
            for part, entries in self._parts.items()
        }
        return Shared(arrays)


class Shared:
    """The shared memory as arrays."""

    def __init__(self, arrays: dict[str, dict[str, np.ndarray]]):
        self.obs = (arrays["obs0"], arrays["obs1"])
        self.action = arrays["action"]
        self.command = arrays["own"]["command"]
        self.attempt = arrays["own"]["attempt"]
        self.side = arrays["own"]["side"]
        """Which of the two buffers the next rows go to."""


def shared_file() -> int:
    """A file without a name, so that nothing is left behind however we end."""
    if sys.platform == "win32":
        raise UserError(
            "Worker processes need Linux or macOS.\n  Fix: set --env.vector.workers 0."
        )
    if hasattr(os, "memfd_create"):
        return os.memfd_create("reverie", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _entries(spaces: Spaces, count: int) -> list[Entry]:
    return [(k, s.dtype, (count, *s.shape)) for k, s in sorted(spaces.items())]
