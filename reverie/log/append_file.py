"""Append complete records to a file."""

from __future__ import annotations

import os
from pathlib import Path

from reverie.storage.system import open_flags


class AppendFile:
    """A file to which records are appended, completely or not at all.

    `write` returns when the operating system has the data, so a killed process loses
    nothing. If the disk is full, a partly written record is removed again.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def write(self, data: bytes) -> None:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            flags |= open_flags("O_BINARY")
            self._descriptor = os.open(self.path, flags, 0o644)
        end = os.fstat(self._descriptor).st_size
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]
        except OSError:
            os.ftruncate(self._descriptor, end)
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
