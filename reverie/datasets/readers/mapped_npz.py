"""Reader of NPZ files whose array names are described by a key map.

A file is one episode. Names of arrays may contain `/`, as in `obs/image`; the part
before it is the name of a group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import Episode
from reverie.datasets.readers import FolderReader, Reader, mapped
from reverie.datasets.readers.key_map import KeyMap
from reverie.datasets.readers.npz import NpzReader, load_arrays, read_headers
from reverie.spaces import Spaces


def open_npz(
    path: str | Path,
    spaces: tuple[Spaces, Spaces] | None = None,
    incomplete: bool = False,
    map: KeyMap | None = None,
) -> Reader:
    """Open a folder of NPZ files in the layout of dreamerv3-torch or of a key map."""
    if map is None or map == KeyMap():
        return NpzReader(path, spaces, incomplete)
    return MappedNpzReader(path, map)


class MappedNpzReader(FolderReader):
    """Reads a folder of NPZ files with a key map."""

    def __init__(self, path: str | Path, map: KeyMap):
        if map.episode_ends:
            raise UserError(
                "Episodes that are concatenated in one file are read from HDF5 only.\n"
                "  Fix: write one NPZ file per episode, or an HDF5 file."
            )
        super().__init__(path)
        self.map = map
        mapped.check_optional_names(self.origin, map, self._names, self._read_stubs)

    def _list_files(self) -> dict[str, Path]:
        return {file.stem: file for file in self.folder.glob("*.npz")}

    def rows(self, name: str) -> int:
        return mapped.count_rows(self._read_stubs(name), self.map)

    def _read_stubs(self, name: str) -> _Group:
        """Return the arrays of a file without loading them."""
        headers = read_headers(self.paths[name])
        return _Group({key: _Header(*header) for key, header in headers.items()})

    def read(self, name: str) -> Episode:
        return self.read_keys(name)

    def read_keys(self, name: str, keys: Collection[str] | None = None) -> Episode:
        group = _Group(load_arrays(self.paths[name]))
        arrays = mapped.load_arrays(group, self.map, keys)
        return mapped.build_episode(arrays, self.map)

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self.map)


class _Header(NamedTuple):
    """Shape and dtype of an array that is not loaded."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0


class _Group(Mapping[str, Any]):
    """Presents arrays with names such as `obs/image` as nested groups."""

    def __init__(self, arrays: Mapping[str, Any]):
        self._arrays = dict(arrays)

    def __getitem__(self, key: str) -> Any:
        if key in self._arrays:
            return self._arrays[key]
        inner = {
            name.removeprefix(f"{key}/"): value
            for name, value in self._arrays.items()
            if name.startswith(f"{key}/")
        }
        if not inner:
            raise KeyError(key)
        return _Group(inner)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.partition("/")[0] for name in self._arrays))

    def __len__(self) -> int:
        return len(list(iter(self)))
