"""Files of named NumPy arrays: written atomically, checksummed, memory-mapped.

The format is safetensors (a JSON header followed by the raw arrays), so reading a file
executes no code. Replay segments and recorded episodes are stored this way. The CRC32
of a file is part of its name and of the manifest that lists it; a file that fails the
check is moved to `quarantine/` with a warning instead of being loaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.spaces import Arrays
from reverie.storage.atomic import TEMPORARY, create_file, make_folder
from reverie.storage.limits import (
    InvalidFile,
    open_descriptor,
    open_regular,
    parse_json,
)
from reverie.storage.os_errors import FILE_INTACT, WriteFailed, explain_write_errors

SUFFIX = ".safetensors"
QUARANTINE = "quarantine"
"""Name of the folder for damaged files."""

_DTYPES = {"BOOL": np.dtype(bool)} | {
    f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}")
    for kind, sizes in {"u": (1, 2, 4, 8), "i": (1, 2, 4, 8), "f": (2, 4, 8)}.items()
    for size in sizes
}
"""Types that are supported, by their names in safetensors headers (`F32`, `U8`)."""
_SAFETENSORS_NAMES = {dtype.name: name for name, dtype in _DTYPES.items()}
_WRITE_BYTES, _READ_BYTES = 1 << 20, 1 << 18
"""Bytes that are written or read at once; they fit in the CPU cache."""
MAX_HEADER_BYTES = 100 << 20
"""Larger headers are refused; the safetensors library has a similar limit."""


class FileRecord(NamedTuple):
    """Name, size in bytes and CRC32 of a file, as listed in a manifest."""

    name: str
    size: int
    crc: int


class ArrayLayout(NamedTuple):
    """Shape, type and byte offset of one array in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


@dataclass(frozen=True)
class ArrayFile:
    """A file and the layout of its arrays."""

    record: FileRecord
    layouts: dict[str, ArrayLayout]
    is_writable: bool = False
    """True for scratch files of the replay buffer, which have another suffix."""
    follow_links: bool = False
    """Whether the file may be a symbolic link, as in datasets of the user."""

    def open(self, directory: Path) -> tuple[mmap.mmap, Arrays]:
        """Memory-map the file; return the map and arrays that are views of it.

        Raises `OSError` or `InvalidFile`.
        """
        path, size = directory / self.record.name, self.record.size
        flags = os.O_RDWR if self.is_writable else os.O_RDONLY
        descriptor = open_descriptor(path, flags, self.follow_links)
        try:
            # Reading past the end of a mapped file would kill the process (SIGBUS).
            actual = os.fstat(descriptor).st_size
            if actual != size:
                raise InvalidFile(f"has {actual} bytes instead of {size}")
            access = mmap.ACCESS_WRITE if self.is_writable else mmap.ACCESS_READ
            mapped = mmap.mmap(descriptor, size, access=access)
        finally:
            os.close(descriptor)
        return mapped, {
            key: np.ndarray(shape, dtype, mapped, offset)
            for key, (shape, dtype, offset) in self.layouts.items()
        }


@dataclass(frozen=True)
class GatheredRows:
    """The array `source[rows]`, which is gathered in small blocks while it is written.

    If other threads write to `source` at the same time, they must hold the lock, so
    that no row is written partly with old and partly with new values.
    """

    source: np.ndarray
    rows: np.ndarray
    lock: contextlib.AbstractContextManager[Any] = field(
        default_factory=contextlib.nullcontext
    )

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.source.shape[1:])

    def blocks(self) -> Iterator[memoryview]:
        """Yield the bytes of the array; each block overwrites the previous one."""
        row_bytes = self.source[0].nbytes
        count = max(1, min(len(self.rows), _WRITE_BYTES // max(1, row_bytes)))
        buffer = np.empty((count, *self.source.shape[1:]), self.dtype)
        for start in range(0, len(self.rows), count):
            rows = self.rows[start : start + count]
            block = buffer[: len(rows)]
            with self.lock:
                # the default mode "raise" is slower: it copies to a buffer first
                self.source.take(rows, 0, block, "clip")
            yield block.reshape(-1).view(np.uint8).data


def write_arrays(
    directory: Path,
    stem: str,
    arrays: Mapping[str, np.ndarray | GatheredRows],
    suffix: str = SUFFIX,
) -> ArrayFile:
    """Write the file `<stem>-<checksum><suffix>` atomically; return its description.

    The caller must `fsync` the file for it to survive a crash of the machine. All bytes
    are allocated: in a sparse file, a later write through the memory map would kill the
    process if the disk is full.
    """
    header, layouts = _make_header(arrays)
    temporary = directory / f".{stem}{TEMPORARY}"
    with explain_write_errors(directory / f"{stem}{suffix}"):
        try:
            with open(create_file(temporary), "wb", buffering=0) as file:
                crc = zlib.crc32(header)
                size = _write_all(file, memoryview(header))
                for key in layouts:
                    for block in _blocks(arrays[key]):
                        crc = zlib.crc32(block, crc)
                        size += _write_all(file, block)
            name = f"{stem}-{crc:08x}{suffix}"
            os.replace(temporary, directory / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    return ArrayFile(FileRecord(name, size, crc), layouts, suffix != SUFFIX)


def read_layout(
    directory: Path, record: FileRecord, follow_links: bool = False
) -> ArrayFile:
    """Read the header of a file; raise `InvalidFile` if an array exceeds the file.

    The header is checked even if the checksum is right, because another program may
    have written the file.
    """
    with open_regular(directory / record.name, follow_links) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(record.size, MAX_HEADER_BYTES):
            raise InvalidFile("has a damaged header")
        table = parse_json(file.read(length))
    try:
        layouts, total = _layouts(table, length + 8), length + 8
        for layout in layouts.values():
            # Offsets count from the start of the file. The difference is negative for
            # an array that begins in its first `length` bytes, which are the header.
            numbers = (*layout.shape, layout.offset - length)
            if not all(type(n) is int and n >= 0 for n in numbers):
                raise InvalidFile("has an array with an invalid shape")
            size = math.prod(layout.shape) * layout.dtype.itemsize
            if layout.offset + size > record.size:
                raise InvalidFile("has an array that is larger than the file")
            total += size
        # many arrays that are the same bytes of a small file would, when they are
        # copied, need much more memory than the size of the file
        if total > record.size:
            raise InvalidFile("has arrays that overlap")
    except (AttributeError, LookupError, TypeError) as error:
        raise InvalidFile("has a damaged header") from error
    return ArrayFile(record, layouts, follow_links=follow_links)


def record_from_name(path: Path) -> FileRecord:
    """Return the record of a file, with the checksum that its name states."""
    crc = int(path.stem.rpartition("-")[2], 16)
    return FileRecord(path.name, path.stat().st_size, crc)


def find_corruption(
    directory: Path, record: FileRecord, follow_links: bool = False
) -> str | None:
    """Verify size and checksum; return what is wrong, or None.

    Raises `OSError` if the file may be intact, for example if too many files are open.
    """
    try:
        with open_regular(directory / record.name, follow_links) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                return f"has {size} bytes instead of {record.size}"
            crc, block = 0, memoryview(bytearray(_READ_BYTES))
            while count := file.raw.readinto(block):
                crc = zlib.crc32(block[:count], crc)
    except InvalidFile as error:
        return str(error)
    except OSError as error:
        if error.errno in FILE_INTACT:
            raise
        return f"cannot be read ({error.strerror})"
    return None if crc == record.crc else "has a wrong checksum"


def quarantine(directory: Path, name: str, problem: str, consequence: str) -> None:
    """Move a damaged file to the quarantine folder, and warn with the text
    `<path> <problem>. <consequence>`."""
    path = directory / name
    moved = ""
    if os.path.lexists(path):
        folder = directory / QUARANTINE
        try:
            make_folder(folder)
            os.replace(path, folder / name)
            moved = f"; moved to {folder}"
        except (OSError, WriteFailed) as error:
            moved = f"; it could not be moved ({str(error).partition(chr(10))[0]})"
    message = f"{path} {problem}{moved}. {consequence}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _blocks(array: np.ndarray | GatheredRows) -> Iterator[memoryview]:
    """Yield the bytes of an array."""
    if isinstance(array, GatheredRows):
        yield from array.blocks()
        return
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), _WRITE_BYTES):
        yield flat[start : start + _WRITE_BYTES].data


def _make_header(
    arrays: Mapping[str, np.ndarray | GatheredRows],
) -> tuple[bytes, dict[str, ArrayLayout]]:
    """Return the safetensors header with its length, and the layouts it describes."""
    table, offset = {}, 0
    # Largest item size first, so that every array is aligned to its item size.
    for key in sorted(arrays, key=lambda key: (-arrays[key].dtype.itemsize, key)):
        array = arrays[key]
        nbytes = math.prod(array.shape) * array.dtype.itemsize
        table[key] = {
            "dtype": _SAFETENSORS_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # the arrays start at a multiple of 64
    return struct.pack("<Q", len(text)) + text, _layouts(table, len(text) + 8)


def _layouts(table: dict[str, Any], data_start: int) -> dict[str, ArrayLayout]:
    """Return the layouts in a safetensors header; the arrays begin at `data_start`."""
    return {
        key: ArrayLayout(
            tuple(entry["shape"]),
            _DTYPES[entry["dtype"]],
            data_start + entry["data_offsets"][0],
        )
        for key, entry in table.items()
        if key != "__metadata__"
    }


def _write_all(file: io.FileIO, block: memoryview) -> int:
    """Write a block and return its size; `write` may write only a part of it."""
    written = 0
    while written < len(block):
        written += file.write(block[written:]) or 0
    return written
