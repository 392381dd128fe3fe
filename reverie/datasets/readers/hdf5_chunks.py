"""Read HDF5 arrays with compressed chunks, with a limit on their decompressed size.

HDF5 decompresses all data of a chunk, even if this gives a thousand times more bytes
than its shape requires. So only gzip and LZF are accepted: gzip is decompressed
here, up to the size of the chunk; for LZF, the decompressed size is computed before
HDF5 decompresses the chunk.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from reverie.storage.limits import Budget, InvalidFile

_GZIP, _SHUFFLE, _CHECKSUM, _LZF = 1, 2, 3, 32000
"""Numbers of the HDF5 filters that are accepted."""
_CHECKSUM_BYTES = 4


class ChunkedArray:
    """An array whose chunks may be compressed."""

    def __init__(self, dataset: Any, name: str, compressed_budget: Budget | None):
        """Raise if chunks need another filter or decompress to more than their size.

        The compressed bytes are subtracted from the budget, to limit how many arrays of
        a file can share the same chunks. It is None if the array was checked before.
        """
        self._dataset, self._name = dataset, name
        # stored, because h5py asks HDF5 for them at every access
        self._chunk_shape: tuple[int, ...] = dataset.chunks or ()
        self._dtype: np.dtype = dataset.dtype
        settings = dataset.id.get_create_plist()
        count = settings.get_nfilters()
        self._filters = [settings.get_filter(index)[0] for index in range(count)]
        compression = _compression(self._filters, name)
        self._chunks = list(_iterate_chunks(dataset)) if compression else []
        self._chunk_bytes = math.prod(self._chunk_shape) * self._dtype.itemsize
        self._decompresses_here = compression == _GZIP and _is_plain(dataset)
        if compressed_budget is not None:
            self._check(compression, compressed_budget)

    def read(self, rows: slice) -> np.ndarray:
        """Return some rows."""
        dataset = self._dataset
        if not self._decompresses_here:
            return np.asarray(dataset[rows])
        start, stop, step = rows.indices(dataset.shape[0])
        if step != 1:
            return np.asarray(self.read(slice(None))[rows])
        shape = (max(stop - start, 0), *dataset.shape[1:])
        out = np.full(shape, dataset.fillvalue, self._dtype)
        for chunk in self._chunks:
            first, *others = chunk.chunk_offset
            low, high = max(first, start), min(first + self._chunk_shape[0], stop)
            if low < high:
                values = self._decompress(chunk)[low - first : high - first]
                # chunks at the border extend beyond the array, so they are cropped
                axes = zip(others, values.shape[1:], shape[1:], strict=True)
                inner = [slice(x, min(x + length, end)) for x, length, end in axes]
                valid = tuple(slice(each.stop - each.start) for each in inner)
                out[(slice(low - start, high - start), *inner)] = values[:, *valid]
        return out

    def _check(self, compression: int, compressed_budget: Budget) -> None:
        """Check the chunks that HDF5 decompresses; others are checked when read."""
        for chunk in self._chunks:
            compressed_budget.take(chunk.size)
            if not self._decompresses_here and self._is_applied(compression, chunk):
                _, data = self._dataset.id.read_direct_chunk(chunk.chunk_offset)
                decompress = _decompress_gzip if compression == _GZIP else _check_lzf
                decompress(self._without_checksum(data), self._chunk_bytes, self._name)

    def _decompress(self, chunk: Any) -> np.ndarray:
        """Return the array of a chunk that is compressed with gzip."""
        _, data = self._dataset.id.read_direct_chunk(chunk.chunk_offset)
        data = self._without_checksum(data)
        if self._is_applied(_GZIP, chunk):
            data = _decompress_gzip(data, self._chunk_bytes, self._name)
        if len(data) != self._chunk_bytes:
            raise InvalidFile(f"has damaged compressed data of {self._name!r}")
        dtype = self._dtype
        if _SHUFFLE in self._filters and self._is_applied(_SHUFFLE, chunk):
            # the filter stores the first bytes of all numbers, then the second bytes
            shuffled = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
            data = np.ascontiguousarray(shuffled.T).tobytes()
        return np.frombuffer(data, dtype).reshape(self._chunk_shape)

    def _is_applied(self, number: int, chunk: Any) -> bool:
        """True unless the filter was skipped for this chunk."""
        return not chunk.filter_mask & (1 << self._filters.index(number))

    def _without_checksum(self, data: bytes) -> bytes:
        return data[:-_CHECKSUM_BYTES] if _CHECKSUM in self._filters else data


def _compression(filters: list[int], name: str) -> int:
    """Return the filter that compresses the chunks; 0 if they are not compressed."""
    compression = [number for number in filters if number in (_GZIP, _LZF)]
    without_shuffle = [number for number in filters if number != _SHUFFLE]
    if (
        len({*filters}) < len(filters)
        or not {*filters} <= {_GZIP, _SHUFFLE, _CHECKSUM, _LZF}
        or without_shuffle not in (compression, [*compression, _CHECKSUM])
        or len(compression) > 1
        or (_SHUFFLE in filters and filters[0] != _SHUFFLE)
    ):
        raise InvalidFile(f"has {name!r} with another compression than gzip and LZF")
    return compression[0] if compression else 0


def _is_plain(dataset: Any) -> bool:
    """True if the elements are stored exactly as in memory, without conversion."""
    import h5py

    kind = h5py.h5t.py_create(dataset.dtype, logical=True)
    return bool(dataset.id.get_type() == kind)


def _iterate_chunks(dataset: Any) -> Iterator[Any]:
    if hasattr(dataset.id, "chunk_iter"):
        chunks: list[Any] = []
        dataset.id.chunk_iter(chunks.append)
        yield from chunks
    else:  # HDF5 before 1.12.3
        yield from map(dataset.id.get_chunk_info, range(dataset.id.get_num_chunks()))


def _decompress_gzip(data: bytes, size: int, name: str) -> bytes:
    """Return the decompressed data; raise if it has more bytes than `size`."""
    stream = zlib.decompressobj()
    try:
        decompressed = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise InvalidFile(f"has damaged compressed data ({error})") from error
    if len(decompressed) > size:
        raise InvalidFile(f"has {name!r} with more data in a chunk than its shape")
    return decompressed


def _check_lzf(data: bytes, size: int, name: str) -> None:
    """Raise if the literal runs and references to earlier bytes exceed `size`."""
    position, decompressed, end = 0, 0, len(data)
    while position < end and decompressed <= size:
        control = data[position]
        if control < 32:  # a run of literal bytes
            decompressed += control + 1
            position += control + 2
        elif control < 224:  # a short reference to earlier bytes
            decompressed += (control >> 5) + 2
            position += 2
        else:  # a long reference, whose length continues in the next byte
            decompressed += 9 + (data[position + 1] if position + 1 < end else 0)
            position += 3
    if decompressed > size:
        raise InvalidFile(f"has {name!r} with more data in a chunk than its shape")
