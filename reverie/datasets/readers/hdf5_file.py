"""Safe access to the groups and arrays of an untrusted HDF5 file.

An HDF5 file may refer to other files (external links, external storage, virtual
datasets) and may declare arrays that are much larger than its data. Both are refused.
Problems of the file and of h5py are raised as `InvalidFile`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from reverie.datasets.readers.hdf5_chunks import ChunkedArray
from reverie.plugins import import_optional
from reverie.storage.limits import (
    ALWAYS_ALLOWED_BYTES,
    Budget,
    InvalidFile,
    limited_memory,
    open_regular,
    quote,
    unpacked_budget,
)

MAX_SOFT_LINKS = 8
"""Maximum number of soft links that are followed for one name."""
MAX_METADATA_BYTES = 1 << 16
"""Maximum size of one read of metadata; larger reads are array data."""
MAX_HEAP_BYTES = 64 << 20
"""Number of bytes of a global heap that are checked."""
EXTRA_TEXT_BYTES = 1 << 20
"""All strings together are limited to the size of the file plus this many bytes."""
EXTRA_NAME_BYTES = 1 << 18
"""The names of all members together, at `MIN_LINK_BYTES` each, are limited to the size
of the file plus this many bytes."""
MIN_LINK_BYTES = 16
"""Minimum size in a file of the entry for a group's member: its name and a link."""
MIN_CHUNK_BYTES = 8
"""Minimum size of a chunk's entry in the index of an array."""
EXTRA_CHUNK_BYTES = 1 << 20
"""The index entries of all chunks together, at `MIN_CHUNK_BYTES` each, are limited to
the size of the file plus this many bytes. Chunks without data have no entry, but are
counted, because they take time to read."""
MAX_COPIES = 4
"""Several compressed arrays may share chunks, so the sum of their compressed sizes may
exceed the size of the file. This is the maximum of the sum, in sizes of the file."""

_HEAP = b"GCOL\x01"
"""Signature and version of a global heap, which stores variable-length strings."""
_ENTRY = struct.Struct("<HHIQ")
"""Header of a heap entry: index, references, padding, size. The header of the heap has
its size at the same place.
"""


def import_h5py() -> Any:
    return import_optional("h5py", "hdf5", "The HDF5 format")


class Hdf5File:
    """An open HDF5 file, with limits on the total size of what is read."""

    def __init__(self, path: Path):
        self.h5py = import_h5py()
        with _h5py_errors():
            open_regular(path).close()
            self.size = path.stat().st_size
            # limits on the total size of what is read, see the constants above
            self._decompressed = unpacked_budget(self.size, "arrays")
            self._stored = Budget(
                MAX_COPIES * self.size + ALWAYS_ALLOWED_BYTES, "compressed arrays"
            )
            self._chunks = Budget(self.size + EXTRA_CHUNK_BYTES, "chunks")
            self._names = Budget(self.size + EXTRA_NAME_BYTES, "names of members")
            self._texts = Budget(self.size + EXTRA_TEXT_BYTES, "strings")
            # paths whose sizes have been subtracted from the budgets above
            self._counted_arrays: set[str] = set()
            self._counted_groups: set[str] = set()
            self._counted_texts: set[tuple[str, str]] = set()  # path, attribute
            self._raw = _CheckedFile(path)
            try:
                self._file = self.h5py.File(self._raw, "r")
                if self._file.id.get_create_plist().get_sizes() != (8, 8):
                    raise InvalidFile("has addresses of an unusual size")
            except BaseException:
                self._raw.close()
                raise

    def group(self, path: str) -> Hdf5Group:
        """Return a group, such as an episode."""
        root = Hdf5Group(self._file, self)
        found = root if path == "/" else root[path]
        if not isinstance(found, Hdf5Group):
            raise InvalidFile(f"has {quote(path)!r}, which is not a group")
        return found

    def open_array(self, dataset: Any, name: str) -> ChunkedArray:
        """Open an array; raise if all opened arrays together are too large.

        An array with several paths counts once per path, because it is decompressed
        once per path.
        """
        path = str(dataset.name)
        if path in self._counted_arrays:
            return ChunkedArray(dataset, name, None)
        chunks = zip(dataset.shape, dataset.chunks or dataset.shape, strict=True)
        count = math.prod(-(-length // max(size, 1)) for length, size in chunks)
        self._chunks.take(count * MIN_CHUNK_BYTES)
        # HDF5 decompresses at least one chunk
        entries = max(dataset.size, math.prod(dataset.chunks or ()))
        self._decompressed.take(entries * dataset.dtype.itemsize)
        array = ChunkedArray(dataset, name, self._stored)
        self._counted_arrays.add(path)
        return array

    def count_names(self, group: str, count: int) -> None:
        """Count the members of a group; raise if all groups together have too many.

        A group with several paths (hard links) counts once per path.
        """
        if group not in self._counted_groups:
            self._names.take(count * MIN_LINK_BYTES)
            self._counted_groups.add(group)

    def count_text(self, path: str, name: str, size: int) -> None:
        """Count the bytes of a string or of a list of strings, once per path and name;
        raise if all strings together have too many."""
        if (path, name) not in self._counted_texts:
            self._texts.take(size)
            self._counted_texts.add((path, name))

    def close(self) -> None:
        self._file.close()
        self._raw.close()


class _CheckedFile(io.FileIO):
    """A file whose global heaps (lists of strings) are checked when they are read.

    HDF5 loops forever on a heap that has an entry of size 0. Each heap is checked
    once, and their total size is limited to the size of the file, so the time is
    limited even if the file contains many signatures of heaps.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        size = os.fstat(self.fileno()).st_size
        self._heaps: set[int] = set()  # addresses
        self._heap_bytes = Budget(size + MAX_METADATA_BYTES, "lists of strings")

    def readinto(self, buffer: Any, /) -> int:
        start = self.tell()
        count = super().readinto(buffer) or 0
        if count <= MAX_METADATA_BYTES:
            # the signature may begin in the bytes that were read before
            before = min(start, len(_HEAP) - 1)
            data = self._read_at(start - before, before) + bytes(buffer)
            found = data.find(_HEAP)
            while found >= 0:
                self._check_heap(start - before + found)
                found = data.find(_HEAP, found + 1)
        return count

    def _check_heap(self, address: int) -> None:
        """Raise `InvalidFile` if an entry is smaller than its header."""
        if address in self._heaps:
            return
        self._heaps.add(address)
        header = self._read_at(address, _ENTRY.size)
        size = _ENTRY.unpack(header)[-1] if len(header) == _ENTRY.size else 0
        heap = self._read_at(address, min(size, MAX_HEAP_BYTES))
        self._heap_bytes.take(len(heap))
        position = _ENTRY.size
        while position + _ENTRY.size <= len(heap):
            index, _, _, length = _ENTRY.unpack_from(heap, position)
            # The size of an entry is without its header and padding. Entry 0 is free
            # space, whose size includes the header.
            if index:
                length = _ENTRY.size + (length + 7) // 8 * 8
            if length < _ENTRY.size:
                raise InvalidFile("has a damaged list of strings")
            position += length

    def _read_at(self, start: int, size: int) -> bytes:
        """Read bytes without moving the position of the file."""
        if hasattr(os, "pread"):
            return os.pread(self.fileno(), size, start)
        position = self.tell()  # Windows has no pread
        self.seek(start)
        try:
            return self.read(size)
        finally:
            self.seek(position)


class Hdf5Array:
    """An array whose data is in the file; it is loaded by `numpy.asarray`."""

    def __init__(self, dataset: Any, name: str, file: Hdf5File):
        self.name, self._dataset, self._file = quote(name), dataset, file
        settings, virtual = dataset.id.get_create_plist(), file.h5py.h5d.VIRTUAL
        if settings.get_layout() == virtual or settings.get_external_count():
            raise InvalidFile(f"has the data of {self.name!r} in another file")
        self.shape: tuple[int, ...] = dataset.shape or ()
        self._array: ChunkedArray | None = None  # set when it is first read

    @functools.cached_property
    def dtype(self) -> np.dtype:
        try:
            dtype: np.dtype = self._dataset.dtype
            return dtype
        except (TypeError, ValueError):  # a type that NumPy does not have
            return np.dtype("V1")  # is neither numeric nor text, so it is not loaded

    def __len__(self) -> int:
        if not self.shape:
            raise InvalidFile(f"has {self.name!r}, which is a single value")
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        if not self.shape:
            raise InvalidFile(f"has {self.name!r}, which is a single value")
        return self._load(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._load(slice(None)), dtype)

    def texts(self) -> list[str]:
        """Return a list of strings; invalid UTF-8 is replaced by U+FFFD."""
        with _h5py_errors():
            if len(self.shape) != 1 or not self._is_text():
                raise InvalidFile(f"has {self.name!r}, which is not a list of strings")
            size = self.shape[0] * self.dtype.itemsize
            self._file.count_text(str(self._dataset.name), "", size)
            with limited_memory(ALWAYS_ALLOWED_BYTES):
                values = self._dataset[()].tolist()
        return [str(_clean(value)) for value in values]

    def _load(self, rows: slice) -> np.ndarray:
        """Read some rows; raise `InvalidFile` if the array is not numeric."""
        with _h5py_errors():
            if self.dtype.kind not in "biuf" or self._dataset.shape is None:
                raise InvalidFile(f"has {self.name!r}, which does not have numbers")
            if self._array is None:
                self._array = self._file.open_array(self._dataset, self.name)
            if not self.shape:
                return np.asarray(self._dataset[()])
            return self._array.read(rows)

    def _is_text(self) -> bool:
        return self._file.h5py.check_string_dtype(self.dtype) is not None


class Hdf5Group:
    """A group; members that are stored in other files are refused."""

    def __init__(self, group: Any, file: Hdf5File):
        self._group, self._file = group, file
        self._members: dict[str, Hdf5Group | Hdf5Array | None] = {}

    @property
    def name(self) -> str:
        return str(self._group.name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        with _h5py_errors():
            names = list(self._group)
        for name in names:
            if not _is_name(name):
                raise InvalidFile(f"has a group with an invalid name ({name!r:.80})")
        self._file.count_names(self.name, len(names))
        return names

    def __contains__(self, key: str) -> bool:
        if "/" in key or not key:
            return self.get(key) is not None
        with _h5py_errors():
            return bool(self._group.id.links.exists(key.encode()))

    def __getitem__(self, key: str) -> Any:
        member = self.get(key)
        if member is None:
            raise InvalidFile(f"has no {quote(key)!r}")
        return member

    def get(self, key: str) -> Any:
        """Return an `Hdf5Group` or `Hdf5Array` by its path; None if there is none."""
        with _h5py_errors():
            if "/" in key:
                return self._open(key)
            if key not in self._members:
                self._members[key] = self._open(key)
            return self._members[key]

    def _open(self, key: str) -> Hdf5Group | Hdf5Array | None:
        member = self._follow(key, MAX_SOFT_LINKS) if key else None
        if isinstance(member, self._file.h5py.Group):
            return Hdf5Group(member, self._file)
        if isinstance(member, self._file.h5py.Dataset):
            return Hdf5Array(member, key, self._file)
        return None  # missing, or a named type

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that are numbers or strings and can be read."""
        with _h5py_errors():
            values = {}
            for key in filter(_is_name, self._group.attrs):
                with contextlib.suppress(InvalidFile):
                    values[key] = self._read_attribute(key)
            return values

    def _read_attribute(self, key: str) -> Any:
        with _h5py_errors():
            attribute = self._group.attrs.get_id(key)
            size = math.prod(attribute.shape) * attribute.dtype.itemsize
            if size > MAX_METADATA_BYTES or attribute.dtype.kind not in "biufSO":
                raise InvalidFile(
                    f"has an attribute of an unsupported type or size: {quote(key)!r}"
                )
            # HDF5 allocates the length of a string before it looks for the string
            with limited_memory(ALWAYS_ALLOWED_BYTES):
                value = _clean(self._group.attrs[key])
            size = len(value) if isinstance(value, str) else 0
            self._file.count_text(self.name, key, size)
            return value

    def parent(self) -> Hdf5Group:
        with _h5py_errors():
            return Hdf5Group(self._group.parent, self._file)

    def _follow(self, key: str, links_left: int) -> Any:
        """Return the h5py object at a path; None if there is none.

        The path is followed one link at a time, so that no other file is opened.
        """
        h5py = self._file.h5py
        member = self._group.file if key.startswith("/") else self._group
        for part in filter(None, key.split("/")):
            if part == ".":
                continue
            if not isinstance(member, h5py.Group):
                return None
            links, name = member.id.links, part.encode()
            if not links.exists(name):
                return None
            kind = links.get_info(name).type
            if kind == h5py.h5l.TYPE_HARD:
                member = member[part]
            elif kind == h5py.h5l.TYPE_SOFT and links_left:
                group = Hdf5Group(member, self._file)
                member = group._follow(links.get_val(name).decode(), links_left - 1)
                if member is None:
                    return None
            elif kind == h5py.h5l.TYPE_SOFT:
                raise InvalidFile(f"has too many links at {quote(part)!r}")
            else:
                raise InvalidFile(f"has {quote(part)!r}, which is in another file")
        return member


def _is_name(name: str | bytes) -> bool:
    """True for printable text; h5py returns bytes for text that is not UTF-8."""
    return isinstance(name, str) and name.isprintable()


def _clean(value: Any) -> Any:
    """Return an attribute as numbers or text; invalid UTF-8 is replaced by U+FFFD."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    is_plain = (
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufS"
    )
    return value if is_plain else quote(str(value))


@contextlib.contextmanager
def _h5py_errors() -> Iterator[None]:
    """Raise every error of h5py about the contents of a file as `InvalidFile`."""
    try:
        yield
    except InvalidFile:
        raise
    except (
        OSError,
        RuntimeError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        MemoryError,
    ) as error:
        raise InvalidFile(f"cannot be read ({quote(str(error))})") from error
