"""Append complete records to a file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from reverie.storage.atomic import make_parent, open_append


class AppendFile:
    """A file to which records are appended, completely or not at all.

    `write` returns when the operating system has the data, so data is not lost if the
    process is killed. If the disk is full, a partly written record is removed.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def write(self, data: bytes) -> None:
        if self._descriptor is None:
            make_parent(self.path)
            self._descriptor = open_append(self.path)
        end = os.fstat(self._descriptor).st_size
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
