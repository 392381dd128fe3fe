"""A list with one entry per step, whose oldest entries can be dropped."""

from __future__ import annotations

from typing import Any

import numpy as np

ENTRY_OVERHEAD = 1000
"""Approximate size of an entry in bytes, without its arrays."""


def entry_bytes(entry: Any) -> int:
    """Return the approximate size of an entry in bytes."""
    arrays = entry.values() if isinstance(entry, dict) else ()
    return ENTRY_OVERHEAD + sum(x.nbytes for x in arrays if isinstance(x, np.ndarray))


class History:
    """Entries indexed by step, from `start` to `stop` (exclusive)."""

    def __init__(self, start: int = 0):
        self.start = start
        self._entries: list[Any] = []
        self._sizes: list[int] = []
        self.num_bytes = 0
        """Approximate size in bytes. The size of an entry is measured when it is
        appended, so data that is added to it later does not count."""

    @property
    def stop(self) -> int:
        return self.start + len(self._entries)

    def append(self, entry: Any) -> None:
        self._entries.append(entry)
        self._sizes.append(entry_bytes(entry))
        self.num_bytes += self._sizes[-1]

    def __getitem__(self, step: int) -> Any:
        index = len(self._entries) + step if step < 0 else step - self.start
        if not 0 <= index < len(self._entries):
            raise IndexError(f"step {step} is not in [{self.start}, {self.stop})")
        return self._entries[index]

    def get(self, step: int) -> Any:
        """Return the entry of a step; None if it is not stored."""
        return self[step] if self.start <= step < self.stop else None

    def truncate(self, step: int) -> None:
        """Remove the entries of this step and later ones."""
        self._remove(slice(max(0, step - self.start), None))

    def drop_before(self, step: int) -> None:
        """Remove the entries before this step."""
        count = min(max(step - self.start, 0), len(self._entries))
        self._remove(slice(count))
        self.start += count

    def _remove(self, part: slice) -> None:
        self.num_bytes -= sum(self._sizes[part])
        del self._entries[part], self._sizes[part]
