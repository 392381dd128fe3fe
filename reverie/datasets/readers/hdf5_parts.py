"""Check the compressed parts (chunks) of an HDF5 array before HDF5 unpacks them.

HDF5 unpacks a part up to the end of its compressed data, even if that is a thousand
times more than the shape of the array needs. So only gzip and LZF are accepted, and the
unpacked size of each part is computed first, without more memory than the part has.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

from reverie.storage.limits import Budget, InvalidFile

_GZIP, _SHUFFLE, _CHECKSUM, _LZF = 1, 2, 3, 32000
_CHECKSUM_BYTES = 4


def check_parts(dataset: Any, name: str, stored: Budget) -> None:
    """Raise unless each part of an array unpacks to at most its declared size.

    The compressed bytes are taken from `stored`, so that arrays of one file cannot
    share the same parts without limit.
    """
    settings = dataset.id.get_create_plist()
    count = settings.get_nfilters()
    filters = [settings.get_filter(index)[0] for index in range(count)]
    packing = [number for number in filters if number in (_GZIP, _LZF)]
    unpacked_first = [number for number in filters if number != _SHUFFLE]
    if (
        len({*filters}) < count
        or not {*filters} <= {_GZIP, _SHUFFLE, _CHECKSUM, _LZF}
        or unpacked_first not in (packing, [*packing, _CHECKSUM])
        or len(packing) > 1
        or (_SHUFFLE in filters and filters[0] != _SHUFFLE)
    ):
        raise InvalidFile(f"has {name!r} in a compression other than gzip and LZF")
    if not packing:
        return
    size = math.prod(dataset.chunks) * dataset.dtype.itemsize
    skipped = 1 << filters.index(packing[0])
    unpacks_too_far = _gzip_exceeds if packing == [_GZIP] else _lzf_exceeds
    for part in _parts(dataset):
        stored.take(part.size)
        if part.filter_mask & skipped:
            continue
        _, data = dataset.id.read_direct_chunk(part.chunk_offset)
        if _CHECKSUM in filters:
            data = data[:-_CHECKSUM_BYTES]
        if unpacks_too_far(data, size):
            raise InvalidFile(f"has {name!r}, which unpacks to more than its shape")


def _parts(dataset: Any) -> Iterator[Any]:
    if hasattr(dataset.id, "chunk_iter"):
        parts: list[Any] = []
        dataset.id.chunk_iter(parts.append)
        yield from parts
    else:  # HDF5 before 1.12.3
        yield from map(dataset.id.get_chunk_info, range(dataset.id.get_num_chunks()))


def _gzip_exceeds(data: bytes, size: int) -> bool:
    try:
        return len(zlib.decompressobj().decompress(data, size + 1)) > size
    except zlib.error as error:
        raise InvalidFile(f"has damaged compressed data ({error})") from error


def _lzf_exceeds(data: bytes, size: int) -> bool:
    """Add up the lengths of literal runs and of references to earlier bytes."""
    position, unpacked, end = 0, 0, len(data)
    while position < end and unpacked <= size:
        control = data[position]
        if control < 32:  # a run of literal bytes
            unpacked += control + 1
            position += control + 2
        elif control < 224:
            unpacked += (control >> 5) + 2
            position += 2
        else:  # the length continues in the next byte
            unpacked += 9 + (data[position + 1] if position + 1 < end else 0)
            position += 3
    return unpacked > size
