"""Shared memory of the main process and its workers: observations, actions, commands.

The memory is anonymous: no file remains, even if the process is killed.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.spaces import Spaces

TRUNCATE, IDLE, STEP, RESET = range(-1, 3)
"""Commands to an environment. Workers act on `STEP` and `RESET` only. For `IDLE` the
main process repeats the latest row, for `TRUNCATE` it also sets `is_last`."""


def make_layout(obs_space: Spaces, act_space: Spaces, count: int) -> np.dtype:
    """Return the memory layout as a structured dtype, identical in every process.

    `obs0` and `obs1` are the two buffers of observations; `attempt` counts the restarts
    of each environment (see `EnvSlot`).
    """
    obs, action = (
        [(k, s.dtype, (count, *s.shape)) for k, s in sorted(spaces.items())]
        for spaces in (obs_space, act_space)
    )
    fields: list[Any] = [
        ("obs0", np.dtype(obs, align=True)),
        ("obs1", np.dtype(obs, align=True)),
        ("action", np.dtype(action, align=True)),
        ("command", np.int8, (count,)),
        ("attempt", np.int64, (count,)),
        ("buffer", np.int8, (1,)),
    ]
    return np.dtype(fields, align=True)


class SharedArrays:
    """The shared memory as NumPy arrays."""

    def __init__(self, layout: np.dtype, memory: int):
        """`memory` is the file descriptor from `create_shared_file`."""
        block = np.ndarray((), layout, mmap.mmap(memory, layout.itemsize))
        self.obs = (_fields(block["obs0"]), _fields(block["obs1"]))
        self.action = _fields(block["action"])
        self.command = block["command"]
        self.attempt = block["attempt"]
        self.buffer = block["buffer"]
        """Index of the observation buffer that the next rows are written to."""


def create_shared_file() -> int:
    """Return the file descriptor of new anonymous shared memory."""
    if sys.platform == "win32":
        raise UserError(
            "Worker processes need Linux or macOS.\n  Fix: set --env.vector.workers 0."
        )
    if hasattr(os, "memfd_create"):
        return os.memfd_create("reverie", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _fields(block: np.ndarray) -> dict[str, np.ndarray]:
    """Return views of the fields of a structured array, by name."""
    return {key: block[key] for key in block.dtype.names or ()}
