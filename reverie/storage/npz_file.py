"""Read untrusted NPZ files (ZIP archives of NumPy arrays).

`numpy.load` allocates the array that a header declares before it reads the data. Here
the declared shape is first compared with the size of the data, which is limited.
"""

from __future__ import annotations

import math
import tokenize
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reverie.spaces import Arrays
from reverie.storage.limits import InvalidFile, open_member, open_zip, quote, read_parts

_MAGIC = b"\x93NUMPY"
_KINDS = "biufcSU"  # accepted values of `dtype.kind`: numbers, bytes and strings


class _Header(NamedTuple):
    """Shape, memory order and type of an array in an NPZ file."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype


def read_npz(path: Path, selects: Callable[[str], bool] | None = None) -> Arrays:
    """Return the arrays of a file by key; with `selects`, only if it is true for a key.

    Members that are not arrays are skipped. Raises `OSError` or `InvalidFile`.
    """
    arrays: Arrays = {}
    with open_zip(path) as archive:
        for member in archive.infolist():
            key = member.filename.removesuffix(".npy")
            if selects is None or selects(key):
                with open_member(archive, member) as file:
                    header = _read_header(file, key)
                    if header is not None:
                        size = member.file_size - file.tell()
                        arrays[key] = _read_data(file, header, size, key)
    return arrays


def read_npz_headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of every array in a file without unpacking them."""
    headers = {}
    with open_zip(path) as archive:
        for member in archive.infolist():
            key = member.filename.removesuffix(".npy")
            with open_member(archive, member) as file:
                if header := _read_header(file, key):
                    headers[key] = (header.shape, header.dtype)
    return headers


def _read_header(file: zipfile.ZipExtFile, key: str) -> _Header | None:
    """Return the header of a member; None if it is not an array."""
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        return None
    version = tuple(file.read(2))
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    try:
        with warnings.catch_warnings():  # about files that Python 2 has written
            warnings.simplefilter("ignore", UserWarning)
            header = _Header(*read(file))
    except (
        ValueError,
        TypeError,
        SyntaxError,
        LookupError,
        OverflowError,
        MemoryError,
        RecursionError,
        tokenize.TokenError,
    ) as error:
        raise InvalidFile(f"has a damaged header of {quote(key)!r}") from error
    if header.dtype.hasobject:
        raise InvalidFile(f"has pickled objects in {quote(key)!r}, which are refused")
    if (
        header.dtype.kind not in _KINDS
        or not header.dtype.itemsize
        or len(header.shape) > 32
        or any(type(n) is not int or n < 0 for n in header.shape)
    ):
        raise InvalidFile(f"has {quote(key)!r}, which is not an array of numbers")
    return header


def _read_data(
    file: zipfile.ZipExtFile, header: _Header, size: int, key: str
) -> np.ndarray:
    """Read an array whose data has `size` bytes."""
    if math.prod(header.shape) * header.dtype.itemsize != size:
        raise InvalidFile(f"has {quote(key)!r} of another size than its header")
    flat = np.empty(size, np.uint8)
    start = 0
    for part in read_parts(file):
        flat[start : start + len(part)] = np.frombuffer(part, np.uint8)
        start += len(part)
    if start != size:
        raise InvalidFile(f"has an incomplete {quote(key)!r}")
    stored_shape = header.shape[::-1] if header.is_fortran else header.shape
    try:
        array = flat.view(header.dtype).reshape(stored_shape)
    except (ValueError, OverflowError) as error:
        raise InvalidFile(f"has {quote(key)!r} of an invalid shape") from error
    return array.T if header.is_fortran else array
