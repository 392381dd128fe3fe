"""Where the values of stored steps live: one column per key, addressed by step id."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from reverie.api import Spaces

WIDE = 1024
"""Bytes from which a row counts as wide: gathered by threads, kept on disk."""


@runtime_checkable
class Columns(Protocol):
    """The values of each live step, by key."""

    ram_bytes: int
    disk_bytes: int

    def write(self, first: int, rows: dict[str, np.ndarray]) -> None:
        """Store consecutive steps, the first of which has id `first`."""
        ...

    def gather(self, key: str, ids: np.ndarray, out: np.ndarray) -> None:
        """Copy the steps `ids` (N,) of one key to `out` (N, ...)."""
        ...

    def scatter(self, key: str, ids: np.ndarray, values: np.ndarray) -> None:
        """Overwrite one key of the steps `ids`."""
        ...


class RamColumns:
    """One preallocated ring per key. Pages are committed as they are first written."""

    def __init__(self, spaces: Spaces, capacity: int) -> None:
        self.capacity = capacity
        self.rings = {key: space.zeros(capacity) for key, space in spaces.items()}
        self._wide = {  # torch copies wide rows with all its threads
            key: as_bytes(self.rings[key])
            for key, space in spaces.items()
            if space.nbytes >= WIDE
        }
        self.ram_bytes = sum(ring.nbytes for ring in self.rings.values())
        self.disk_bytes = 0

    def write(self, first: int, rows: dict[str, np.ndarray]) -> None:
        for key, ring in self.rings.items():
            value = rows[key]
            row, count = first % self.capacity, len(value)
            if row + count <= self.capacity:
                ring[row : row + count] = value
            else:
                cut = self.capacity - row
                ring[row:] = value[:cut]
                ring[: count - cut] = value[cut:]

    def gather(self, key: str, ids: np.ndarray, out: np.ndarray) -> None:
        rows = ids % self.capacity
        if key in self._wide:
            index = torch.from_numpy(rows)
            torch.index_select(self._wide[key], 0, index, out=as_bytes(out))
        else:
            np.take(self.rings[key], rows, axis=0, out=out, mode="clip")

    def scatter(self, key: str, ids: np.ndarray, values: np.ndarray) -> None:
        self.rings[key][ids % self.capacity] = values


def as_bytes(array: np.ndarray) -> torch.Tensor:
    """The same memory as a (N, bytes per row) tensor."""
    flat = array.reshape(len(array), -1).view(np.uint8)
    return torch.from_numpy(flat)
