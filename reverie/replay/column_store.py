"""Values of the stored steps: one array per key, indexed by step id.

`RamStore` keeps each key in a ring buffer. `DiskStore` collects the newest steps in a
small ring buffer (the tail) until they are written to a segment file, which is then
memory-mapped; keys with few bytes per step always stay in memory. In a file the steps
of each stream (see `step_index.py`) are contiguous, so a window is one or two copies
from the page cache.

Segment files are immutable. The first write-back of extras to a segment copies its
extras to a scratch file, which is mapped for writing. Scratch files are temporary and
not part of a checkpoint.
"""

from __future__ import annotations

import itertools
import mmap
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reverie.spaces import Arrays, Spaces
from reverie.storage.array_file import ArrayFile, GatheredRows, write_arrays
from reverie.storage.limits import InvalidFile
from reverie.storage.os_errors import EXHAUSTED, FILE_INTACT
from reverie.storage.segments import segment_stem

WIDE_BYTES = 1024
"""A `DiskStore` stores keys with at least this many bytes per step (wide keys) on disk,
and all other keys (narrow keys) in memory."""

PARALLEL_BYTES = 1 << 19
"""Copies of at least this size are split between threads."""

MAX_OPEN_MAPS = 128
"""Maximum number of memory-mapped files; each needs a file descriptor."""

MAX_RESIDENT_BYTES = 1 << 26
"""Mapped pages are released after this many bytes were read or written."""

SCRATCH_SUFFIX = ".scratch"
"""Suffix of the temporary files with extras that were written back."""


@dataclass(eq=False)
class ReplaySegment:
    """Consecutive steps in a file, and files with newer values of their extras."""

    first: int  # id of the first step
    count: int  # number of steps
    rows: ArrayFile  # file with all keys of the steps
    extras: ArrayFile | None = None  # file with newer extras, written by a save
    scratch: ArrayFile | None = None  # file for write-backs of a `DiskStore`

    @property
    def stop(self) -> int:
        """Id after the last step."""
        return self.first + self.count


class SegmentLost(Exception):
    """Raised if segment files of the replay can no longer be read."""

    def __init__(self, segments: list[ReplaySegment], reason: str) -> None:
        super().__init__(reason)
        self.segments = segments
        self.reason = reason


class RamStore:
    """One ring buffer per key; memory is allocated when a row is first written."""

    def __init__(self, spaces: Spaces, capacity: int) -> None:
        self.capacity = capacity
        self.rings = {key: space.zeros(capacity) for key, space in spaces.items()}
        self._locks = {key: threading.Lock() for key in spaces}
        self._threads = CopyThreads()

    @property
    def ram_bytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings.values())

    def write(self, first: int, rows: Arrays) -> None:
        """Store consecutive steps, beginning with the id `first`."""
        row = first % self.capacity
        for key, ring in self.rings.items():
            value = rows[key]
            until_end = self.capacity - row
            if len(value) <= until_end:
                ring[row : row + len(value)] = value
            else:
                ring[row:] = value[:until_end]
                ring[: len(value) - until_end] = value[until_end:]

    def gather(self, ids: np.ndarray, out: Arrays) -> None:
        """Copy the steps `ids` (N,) into `out`, which has an array (N, ...) per key."""
        rows = ids % self.capacity
        copies = []
        for key, value in out.items():
            if value.nbytes < PARALLEL_BYTES:
                # The default mode "raise" is slower: it copies to a buffer first.
                self.rings[key].take(rows, 0, value, "clip")
                continue
            for part in np.array_split(np.arange(len(rows)), self._threads.size):
                if len(part):
                    span = slice(part[0], part[-1] + 1)
                    source = self.rings[key]
                    copies.append((source, rows[span], 0, value[span], "clip"))
        self._threads.run(np.take, copies)

    def scatter(self, ids: np.ndarray, values: Arrays) -> None:
        """Overwrite the given keys (extras) of the steps `ids`."""
        rows = ids % self.capacity
        for key, value in values.items():
            with self._locks[key]:
                self.rings[key][rows] = value

    def rows_to_write(self, ids: np.ndarray) -> dict[str, GatheredRows]:
        """Return the steps `ids` of each key, gathered while they are written.

        They must stay in memory until then; their extras may change.
        """
        rows = ids % self.capacity
        return {
            key: GatheredRows(ring, rows, self._locks[key])
            for key, ring in self.rings.items()
        }

    def load_segment(
        self, segment: ReplaySegment, ids: np.ndarray, live: np.ndarray, arrays: Arrays
    ) -> None:
        """Load the steps of a saved file that are not evicted.

        `ids` are the ids of its rows; the mask `live` is False for evicted steps.
        """
        rows = ids[live] % self.capacity
        values = {key: arrays[key] for key in self.rings}
        if len(rows) < len(ids):  # a mask makes a copy, which is not needed otherwise
            values = {key: value[live] for key, value in values.items()}
        is_contiguous = bool((np.diff(rows) == 1).all())  # with a single environment
        copies = []
        for key, value in values.items():
            num_parts = 4 if value.nbytes >= PARALLEL_BYTES else 1
            for part in np.array_split(np.arange(len(rows)), num_parts):
                if len(part):
                    span = slice(part[0], part[-1] + 1)
                    target: Any = rows[span]
                    if is_contiguous:
                        target = slice(target[0], target[-1] + 1)
                    copies.append((self.rings[key], target, value[span]))
        self._threads.run(operator.setitem, copies)

    # A store in memory has no segments, so these methods do nothing.

    def add_segment(self, segment: ReplaySegment, order: np.ndarray) -> None:
        """From now on, read these steps from their file.

        Row i of the file is step `first + order[i]`.
        """

    def remove_segment(self, segment: ReplaySegment) -> None:
        """Release a segment whose file is lost."""

    def evict_before(self, first: int) -> None:
        """Release the segments before this id."""

    def clear(self) -> None:
        """Release all segments, before others are loaded."""

    def close(self) -> None:
        self._threads.close()


class DiskStore:
    """Keeps wide keys in mapped segment files, except for the tail, which is in memory.

    Narrow keys are in memory. `WIDE_BYTES` separates wide from narrow keys. The methods
    are those of `RamStore`.
    """

    def __init__(
        self, spaces: Spaces, extras: Spaces, capacity: int, tail: int, directory: Path
    ) -> None:
        self.capacity = capacity
        self.directory = directory
        wide = {k: space for k, space in spaces.items() if space.nbytes >= WIDE_BYTES}
        narrow = {key: space for key, space in spaces.items() if key not in wide}
        self.narrow = RamStore(narrow, capacity)
        self.tail = RamStore(wide, tail)
        self.wide_extras = [key for key in extras if key in wide]
        self.file_row = np.zeros(capacity, np.int32)  # row of each step in its file
        self.segments: list[ReplaySegment] = []
        self.first_in_tail = 0  # steps before this id are in files
        self._segment_firsts = np.zeros(0, np.int64)  # first step id of each segment
        self._maps: OrderedDict[str, tuple[mmap.mmap, Arrays]] = OrderedDict()
        self._accessed_bytes = 0  # since mapped pages were last released
        self._threads = CopyThreads()

    @property
    def ram_bytes(self) -> int:
        return self.narrow.ram_bytes + self.tail.ram_bytes + self.file_row.nbytes

    def write(self, first: int, rows: Arrays) -> None:
        self.narrow.write(first, rows)
        self.tail.write(first, rows)

    def gather(self, ids: np.ndarray, out: Arrays) -> None:
        narrow, wide = self._split(out)
        self.narrow.gather(ids, narrow)
        if not wide:
            return
        copies = []
        for start, stop, number, row in self._contiguous_parts(ids):
            if number < 0:
                rows = ids[start:stop] % self.tail.capacity
                for key, value in wide.items():
                    ring = self.tail.rings[key]
                    np.take(ring, rows, 0, value[start:stop], mode="clip")
                continue
            segment = self.segments[number]
            for key, value in wide.items():
                source = self._column(segment, key)[row : row + stop - start]
                copies.append((value[start:stop], source))
        self._threads.run(np.copyto, copies)
        self._accessed_bytes += sum(target.nbytes for target, _ in copies)
        copies.clear()  # its views would keep the files mapped
        self._release_pages()

    def scatter(self, ids: np.ndarray, values: Arrays) -> None:
        narrow, wide = self._split(values)
        self.narrow.scatter(ids, narrow)
        if not wide:
            return
        for start, stop, number, row in self._contiguous_parts(ids):
            if number < 0:
                part = {key: value[start:stop] for key, value in wide.items()}
                self.tail.scatter(ids[start:stop], part)
                continue
            segment = self.segments[number]
            if segment.scratch is None:
                self._make_scratch(segment)
            for key, value in wide.items():
                column = self._column(segment, key)
                column[row : row + stop - start] = value[start:stop]
                self._accessed_bytes += (stop - start) * column[0].nbytes
        self._release_pages()

    def rows_to_write(self, ids: np.ndarray) -> dict[str, GatheredRows]:
        """As in `RamStore`; all steps must be in the tail."""
        return self.narrow.rows_to_write(ids) | self.tail.rows_to_write(ids)

    def add_segment(self, segment: ReplaySegment, order: np.ndarray) -> None:
        ids = segment.first + order
        self.file_row[ids % self.capacity] = np.arange(segment.count)
        self._append(segment)

    def load_segment(
        self, segment: ReplaySegment, ids: np.ndarray, live: np.ndarray, arrays: Arrays
    ) -> None:
        self.narrow.load_segment(segment, ids, live, arrays)
        self.file_row[ids[live] % self.capacity] = np.flatnonzero(live)
        self._append(segment)

    def evict_before(self, first: int) -> None:
        for segment in [s for s in self.segments if s.stop <= first]:
            self.remove_segment(segment)

    def remove_segment(self, segment: ReplaySegment) -> None:
        if segment.scratch is not None:
            name = segment.scratch.record.name
            self._maps.pop(name, None)
            (self.directory / name).unlink(missing_ok=True)
            segment.scratch = None
        for file in (segment.rows, segment.extras):
            if file is not None:
                self._maps.pop(file.record.name, None)
        number = self.segments.index(segment)
        del self.segments[number]
        self._segment_firsts = np.delete(self._segment_firsts, number)

    def clear(self) -> None:
        for segment in list(self.segments):
            self.remove_segment(segment)
        self.first_in_tail = 0

    def close(self) -> None:
        self._maps.clear()
        self._threads.close()

    def _split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """Return the arrays of narrow and of wide keys."""
        wide = {k: v for k, v in arrays.items() if k in self.tail.rings}
        return {k: v for k, v in arrays.items() if k not in wide}, wide

    def _append(self, segment: ReplaySegment) -> None:
        self.segments.append(segment)
        self.first_in_tail = segment.stop
        self._segment_firsts = np.append(self._segment_firsts, segment.first)

    def _contiguous_parts(self, ids: np.ndarray) -> list[tuple[int, int, int, int]]:
        """Split `ids` into parts that are contiguous in a file.

        Each part is (start, stop, segment number, row in the file). The segment number
        is -1 for steps in the tail, which need not be contiguous.
        """
        if not len(ids):
            return []
        number = np.searchsorted(self._segment_firsts, ids, "right") - 1
        number[ids >= self.first_in_tail] = -1
        rows = self.file_row[ids % self.capacity]
        is_split = (number[1:] != number[:-1]) | (rows[1:] - rows[:-1] != 1)
        is_split &= (number[1:] >= 0) | (number[:-1] >= 0)
        edges = [0, *(np.flatnonzero(is_split) + 1).tolist(), len(ids)]
        return [
            (start, stop, int(number[start]), int(rows[start]))
            for start, stop in itertools.pairwise(edges)
        ]

    def _release_pages(self) -> None:
        """Release mapped pages from time to time, to bound the resident memory."""
        if self._accessed_bytes < MAX_RESIDENT_BYTES:
            return
        if not hasattr(mmap, "MADV_DONTNEED"):  # Windows
            return
        self._accessed_bytes = 0
        for mapped, _ in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _column(self, segment: ReplaySegment, key: str) -> np.ndarray:
        """Return the mapped array of a key, from the file with its newest values."""
        file = segment.rows
        if key in self.wide_extras:
            file = segment.scratch or segment.extras or file
        name = file.record.name
        opened = self._maps.get(name)
        if opened is None:
            opened = self._maps[name] = self._open(segment, file)
            if len(self._maps) > MAX_OPEN_MAPS:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(name)
            if opened[0].size() < len(opened[0]):  # reading it would raise SIGBUS
                raise SegmentLost([segment], "was shortened while in use")
        return opened[1][key]

    def _open(
        self, segment: ReplaySegment, file: ArrayFile
    ) -> tuple[mmap.mmap, Arrays]:
        """Map a file; if too many files are open, close the other maps and retry."""
        try:
            try:
                return file.open(self.directory)
            except OSError as error:
                if error.errno not in EXHAUSTED or not self._maps:
                    raise
                self._maps.clear()
                return file.open(self.directory)
        except (OSError, InvalidFile) as error:
            if isinstance(error, OSError) and error.errno in FILE_INTACT:
                raise  # for example too many open files: the segment is not lost
            raise SegmentLost([segment], f"was lost while in use ({error})") from error

    def _make_scratch(self, segment: ReplaySegment) -> None:
        """Copy the extras of a segment to a writable file."""
        columns = {key: self._column(segment, key) for key in self.wide_extras}
        stem = segment_stem(segment.first, segment.count)
        segment.scratch = write_arrays(self.directory, stem, columns, SCRATCH_SUFFIX)
        self._accessed_bytes += sum(column.nbytes for column in columns.values())


ColumnStore = RamStore | DiskStore


class CopyThreads:
    """Runs NumPy copies in several threads; NumPy releases the GIL while it copies.

    Uses at most as many threads as PyTorch, so `OMP_NUM_THREADS` limits both.
    """

    def __init__(self) -> None:
        self.size = min(torch.get_num_threads(), 4)
        self._executor: ThreadPoolExecutor | None = None

    def run(
        self, function: Callable[..., None], calls: Sequence[tuple[Any, ...]]
    ) -> None:
        """Call the function with each tuple of arguments; returns when all are done."""
        if self.size == 1 or len(calls) < 2:
            for arguments in calls:
                function(*arguments)
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.size - 1, "replay")

        def run_share(thread: int) -> None:
            for arguments in calls[thread :: self.size]:
                function(*arguments)

        futures = [self._executor.submit(run_share, i) for i in range(1, self.size)]
        run_share(0)
        for future in futures:
            future.result()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
