"""Append to a file whole records or nothing."""

from __future__ import annotations

import os
from pathlib import Path


class Appender:
    """A file that only grows, and never ends in half a record.

    Every `write` reaches the operating system before it returns, so a killed process
    loses nothing it wrote. When the disk is full the file keeps its old end.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: int | None = None

    def write(self, data: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o644)
        end = os.fstat(self._file).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, end)
            raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
