"""Shared memory of the main process and its workers: observations, actions, commands.

It is anonymous, so nothing is left on disk however the process ends.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

import numpy as np

from reverie.api import UserError
from reverie.spaces import Spaces

TRUNCATE, IDLE, STEP, RESET = range(-1, 3)
"""Commands to an environment. Workers act on `STEP` and `RESET` only; `TRUNCATE` makes
the main process end the episode with a copy of its latest row."""

Entry = tuple[str, np.dtype, tuple[int, ...]]


class Layout:
    """Offsets of all arrays in the shared memory, identical in every process."""

    def __init__(self, obs_space: Spaces, act_space: Spaces, count: int):
        obs = _entries(obs_space, count)
        act = _entries(act_space, count)
        int8, int64 = np.dtype(np.int8), np.dtype(np.int64)
        control: list[Entry] = [
            ("command", int8, (count,)),
            ("attempt", int64, (count,)),
            ("buffer", int8, (1,)),
        ]
        self._groups = {"obs0": obs, "obs1": obs, "action": act, "control": control}
        self._offsets: dict[tuple[str, str], int] = {}
        self.nbytes = 0
        for group, entries in self._groups.items():
            for key, dtype, shape in entries:
                self._offsets[group, key] = self.nbytes
                size = int(np.prod(shape)) * dtype.itemsize
                self.nbytes += -(-size // 64) * 64  # aligned to cache lines

    def views(self, memory: mmap.mmap) -> SharedArrays:
        arrays = {
            group: {
                key: np.ndarray(shape, dtype, memory, self._offsets[group, key])
                for key, dtype, shape in entries
            }
            for group, entries in self._groups.items()
        }
        return SharedArrays(arrays)


class SharedArrays:
    """The shared memory as NumPy arrays."""

    def __init__(self, arrays: dict[str, dict[str, np.ndarray]]):
        self.obs = (arrays["obs0"], arrays["obs1"])
        self.action = arrays["action"]
        self.command = arrays["control"]["command"]
        self.attempt = arrays["control"]["attempt"]
        self.buffer = arrays["control"]["buffer"]
        """Index of the observation buffer that the next rows are written to."""


def create_shared_file() -> int:
    """Return the descriptor of a new file without a name."""
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
