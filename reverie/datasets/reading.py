"""How recordings are read: where things lie in them, and what is made of their keys.

`reverie data convert` reads like this and writes what it read; `reverie offline` reads
like this and learns from it. Both get the same episodes, because this is the only way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from reverie.api import UserError
from reverie.datasets.readers import READERS, Reader, open_reader
from reverie.datasets.readers.hdf5 import KeyMap
from reverie.datasets.transforms import ROBOMIMIC, Prepared, Recipe


@dataclass(frozen=True)
class Reading:
    like: Literal["", "robomimic"] = ""
    """Begin with the usual keys of one arm in robomimic's demonstrations."""
    images: tuple[str, ...] = ()
    """Cameras to stack along the channels as `image`, in this order."""
    vectors: tuple[str, ...] = ()
    """Vectors to keep, in this order."""
    aux: tuple[str, ...] = ()
    """Vectors to keep as `aux_NAME`: seen by an encoder, never to be predicted."""
    flip: tuple[str, ...] = ()
    """Cameras whose frames are upside down."""
    size: tuple[int, int] = (0, 0)
    """Height and width for every image; 0 0 leaves them alone."""
    map: KeyMap = field(default_factory=KeyMap)
    """Where things lie in HDF5 files."""

    def __post_init__(self) -> None:
        if min(self.size) < 0 or (0 in self.size and max(self.size)):
            raise ValueError(
                f"size is a height and a width above zero, not {self.size}"
            )

    @property
    def recipe(self) -> Recipe:
        usual = ROBOMIMIC if self.like else Recipe()
        return Recipe(
            self.images or usual.images,
            self.vectors or usual.vectors,
            self.aux or usual.aux,
            self.flip,
            self.size,
        )

    def open(self, path: str | Path) -> Reader:
        """The episodes of a path, with what the recipe makes of their keys."""
        reader = open_mapped(path, self.map)
        return reader if self.recipe == Recipe() else Prepared(reader, self.recipe)


def open_mapped(path: str | Path, map: KeyMap) -> Reader:
    """The reader for a path; a key map is for HDF5 alone."""
    if map == KeyMap():
        return open_reader(path)
    if not READERS["hdf5"].claims(str(Path(path).expanduser())):
        raise UserError(
            f"A key map says where things lie in HDF5 files, and {path} is none.\n"
            "  Fix: leave out what begins with --map or --offline.read.map."
        )
    return open_reader(path, map=map)
