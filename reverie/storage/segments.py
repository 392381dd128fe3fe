"""Files of stored steps: whole or absent, checked by checksum, never executed.

A segment is a safetensors file (a JSON header and raw columns, so it can be mapped and
holds nothing that runs). It is written under a temporary name, synced and renamed, so
no reader meets half a file; its CRC32 is part of the index that names it. A file that
fails its check is moved to `quarantine/` and reported, not loaded.
"""

from __future__ import annotations

import errno
import io
import json
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
QUARANTINE = "quarantine"

STREAM, POSITION, ORDER = "#stream", "#position", "#order"
"""Columns of a replay segment that say which environment a row came from, and when."""

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_DTYPES = {short: np.dtype(name) for name, short in _NAMES.items()}
_BLOCK = 1 << 24


class DiskFull(UserError):
    """There was no room to write; everything written before is intact."""


@dataclass(frozen=True)
class FileRecord:
    """What the index remembers of a file, enough to tell if it is still the same."""

    name: str
    size: int
    crc: int


@dataclass(frozen=True)
class Field:
    """Where one column lies in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def view(self, buffer: memoryview) -> np.ndarray:
        count = int(np.prod(self.shape, dtype=np.int64))
        flat = np.frombuffer(buffer, self.dtype, count, self.offset)
        return flat.reshape(self.shape)


Layout = dict[str, Field]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Source:
    """A file and where its columns lie."""

    record: FileRecord
    layout: Layout
    is_writable: bool = False

    def open(self, directory: Path) -> tuple[mmap.mmap, Arrays]:
        """Map the file: the map, and its columns as arrays on it."""
        path, size = directory / self.record.name, self.record.size
        handle = os.open(path, os.O_RDWR if self.is_writable else os.O_RDONLY)
        try:
            # A mapped file that is too short would kill the process when it is read.
            found = os.fstat(handle).st_size
            if found != size:
                raise OSError(f"{path} has {found} bytes instead of {size}")
            access = mmap.ACCESS_WRITE if self.is_writable else mmap.ACCESS_READ
            mapped = mmap.mmap(handle, size, access=access)
        finally:
            os.close(handle)
        view = memoryview(mapped)
        return mapped, {key: field.view(view) for key, field in self.layout.items()}


def layout_of(columns: Arrays) -> tuple[bytes, Layout]:
    """The header of a file with these columns, and where each will lie."""
    table, offset = {}, 0
    # widest items first, so that every column is aligned to its own items
    for key in sorted(columns, key=lambda key: (-columns[key].itemsize, key)):
        value = columns[key]
        table[key] = {
            "dtype": _NAMES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + value.nbytes],
        }
        offset += value.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text, _fields(table, len(text) + 8)


def _fields(table: dict[str, Any], base: int) -> Layout:
    return {
        key: Field(
            _DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            base + entry["data_offsets"][0],
        )
        for key, entry in table.items()
        if key != "__metadata__"
    }


def write(directory: Path, stem: str, columns: Arrays, suffix: str = SUFFIX) -> Source:
    """Write columns as `<stem>-<checksum><suffix>`, whole or not at all.

    The data reaches the disk with `sync`; until then only a crash of the machine, not
    of the program, can lose it. Every byte is written: a sparse file could meet a full
    disk at a later store through a map.
    """
    header, layout = layout_of(columns)
    path = directory / f".{stem}{TEMPORARY}"
    with room_for(path), open(path, "wb", buffering=0) as file:
        crc = zlib.crc32(header)
        size = _write_all(file, memoryview(header))
        for key in layout:
            flat = np.ascontiguousarray(columns[key]).reshape(-1).view(np.uint8)
            for at in range(0, len(flat), _BLOCK):
                block = flat[at : at + _BLOCK].data
                crc = zlib.crc32(block, crc)
                size += _write_all(file, block)
        name = f"{stem}-{crc:08x}{suffix}"
        os.replace(path, directory / name)
    return Source(FileRecord(name, size, crc), layout, is_writable=suffix != SUFFIX)


def _write_all(file: io.FileIO, block: memoryview) -> int:
    done = 0
    while done < len(block):
        done += file.write(block[done:]) or 0
    return done


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn a full disk into one clear sentence, and leave no half file behind."""
    try:
        yield
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise DiskFull(
            f"No room to write {path.name} in {path.parent} "
            f"({os.strerror(error.errno)}); everything saved before is intact.\n"
            "  Fix: free some space (or raise the quota) and start the same command "
            "again."
        ) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def sync(directory: Path, names: list[str]) -> None:
    """Make sure these files and their names survive a crash of the machine."""
    for target in (*(directory / name for name in names), directory):
        with room_for(directory / (TEMPORARY + "sync")):
            handle = os.open(target, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def problem(directory: Path, record: FileRecord) -> str | None:
    """Why this file cannot be trusted, or None."""
    path = directory / record.name
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"has {size} bytes instead of {record.size}"
        crc = 0
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                crc = zlib.crc32(block, crc)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if crc == record.crc else "has a wrong checksum"


def find(directory: Path, record: FileRecord) -> Source:
    """A (checked) file as a source of columns."""
    with open(directory / record.name, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return Source(record, _fields(json.loads(file.read(length)), length + 8))


def quarantine(directory: Path, name: str, why: str, effect: str) -> None:
    """Put a bad file aside and say so."""
    path = directory / name
    where = ""
    if path.exists():
        folder = directory / QUARANTINE
        folder.mkdir(exist_ok=True)
        os.replace(path, folder / name)
        where = f"; moved to {folder}"
    warnings.warn(f"{path} {why}{where}. {effect}", RuntimeWarning, stacklevel=2)
