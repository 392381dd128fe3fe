"""A list with one entry per step, whose oldest entries can be dropped."""

from __future__ import annotations

from typing import Any


class History:
    """Entries by step, from `start` to `stop` (exclusive)."""

    def __init__(self, start: int = 0):
        self.start = start
        self._entries: list[Any] = []

    @property
    def stop(self) -> int:
        return self.start + len(self._entries)

    def append(self, entry: Any) -> None:
        self._entries.append(entry)

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
        del self._entries[max(0, step - self.start) :]

    def drop_oldest(self, length: int) -> None:
        """Remove the oldest entries, so that at most `length` remain."""
        surplus = len(self._entries) - length
        if surplus > 0:
            del self._entries[:surplus]
            self.start += surplus
