"""Where the values of stored steps live: one column per key, addressed by step id.

In memory a column is a ring. On disk the newest steps collect in a small ring and are
then sealed as an immutable file that is mapped; only narrow keys stay in memory. Inside
a file the steps of each environment lie side by side, so a sampled window is one or two
contiguous copies out of the page cache.

Extras are the exception to immutable: the first change to the extras of a sealed
segment copies them to a scratch file of its own, mapped for writing. Scratch files are
a cache, never part of a checkpoint.
"""

from __future__ import annotations

import itertools
import mmap
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from reverie.spaces import Spaces
from reverie.storage.array_file import ArrayFile, Arrays, write_arrays
from reverie.storage.segments import segment_stem

WIDE = 1024
"""Bytes from which a row counts as wide, and is kept on disk."""

MANY = 1 << 19
"""Bytes that are worth the time it takes to ask threads for help."""

OPEN_MAPS = 128
"""Files mapped at once; each holds a file descriptor."""

RESIDENT = 1 << 26
"""Bytes of mapped files touched before their pages are given back."""

SCRATCH = ".scratch"


class SegmentLost(Exception):
    """A file that held steps cannot be read any more."""

    def __init__(self, segment: Segment, why: str) -> None:
        super().__init__(why)
        self.segment = segment
        self.why = why


@runtime_checkable
class Columns(Protocol):
    """The values of each live step, by key."""

    @property
    def ram_bytes(self) -> int: ...

    def write(self, first: int, rows: Arrays) -> None:
        """Store consecutive steps, the first of which has id `first`."""
        ...

    def gather(self, ids: np.ndarray, out: Arrays) -> None:
        """Copy the steps `ids` (N,) of every key in `out` (N, ...)."""
        ...

    def scatter(self, ids: np.ndarray, values: Arrays) -> None:
        """Overwrite some keys (extras) of the steps `ids`."""
        ...

    def seal(self, segment: Segment, order: np.ndarray) -> None:
        """A file now holds these steps, in the order `order` of their ids."""
        ...

    def restore(
        self, segment: Segment, ids: np.ndarray, live: np.ndarray, columns: Arrays
    ) -> None:
        """Take over the live steps of a file; `ids` are the steps of all its rows."""
        ...

    def drop(self, first: int) -> None:
        """Steps before this id are evicted."""
        ...

    def lose(self, segment: Segment) -> None:
        """The file of these steps is gone."""
        ...

    def clear(self) -> None:
        """Forget all files, before others are restored."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Segment:
    """Consecutive steps in a file, and the files with fresher extras for them."""

    first: int
    count: int
    rows: ArrayFile
    extras: ArrayFile | None = None
    scratch: ArrayFile | None = None

    @property
    def stop(self) -> int:
        return self.first + self.count


class RamColumns:
    """One preallocated ring per key. Pages are committed as they are first written."""

    def __init__(self, spaces: Spaces, capacity: int) -> None:
        self.capacity = capacity
        self.rings = {key: space.zeros(capacity) for key, space in spaces.items()}
        self._crew = Crew()

    @property
    def ram_bytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings.values())

    def write(self, first: int, rows: Arrays) -> None:
        row = first % self.capacity
        for key, ring in self.rings.items():
            value = rows[key]
            cut = self.capacity - row
            if len(value) <= cut:
                ring[row : row + len(value)] = value
            else:
                ring[row:] = value[:cut]
                ring[: len(value) - cut] = value[cut:]

    def gather(self, ids: np.ndarray, out: Arrays) -> None:
        rows = ids % self.capacity
        work = []
        for key, value in out.items():
            if value.nbytes < MANY:
                self.rings[key].take(rows, 0, value, "clip")
                continue
            for part in np.array_split(np.arange(len(rows)), self._crew.size):
                if len(part):
                    cut = slice(part[0], part[-1] + 1)
                    work.append((self.rings[key], rows[cut], value[cut]))
        self._crew.run(_take, work)

    def scatter(self, ids: np.ndarray, values: Arrays) -> None:
        rows = ids % self.capacity
        for key, value in values.items():
            self.rings[key][rows] = value

    def seal(self, segment: Segment, order: np.ndarray) -> None:
        pass

    def restore(
        self, segment: Segment, ids: np.ndarray, live: np.ndarray, columns: Arrays
    ) -> None:
        rows = ids[live] % self.capacity
        for key, ring in self.rings.items():
            ring[rows] = columns[key][live]

    def drop(self, first: int) -> None:
        pass

    def lose(self, segment: Segment) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        self._crew.close()


class DiskColumns:
    """Narrow keys in memory, wide ones in mapped files behind a tail in memory."""

    def __init__(
        self, spaces: Spaces, extras: Spaces, capacity: int, tail: int, directory: Path
    ) -> None:
        self.capacity = capacity
        self.directory = directory
        wide = {key: space for key, space in spaces.items() if space.nbytes >= WIDE}
        narrow = {key: space for key, space in spaces.items() if key not in wide}
        self.narrow = RamColumns(narrow, capacity)
        self.tail = RamColumns(wide, tail)
        self.extras = {key: space for key, space in extras.items() if key in wide}
        self.place = np.zeros(capacity, np.int32)  # row of each step in its file
        self.segments: list[Segment] = []
        self.sealed = 0  # the id up to which steps are in files
        self._firsts = np.zeros(0, np.int64)
        self._maps: OrderedDict[str, tuple[mmap.mmap, Arrays]] = OrderedDict()
        self._touched = 0
        self._crew = Crew()

    @property
    def ram_bytes(self) -> int:
        return self.narrow.ram_bytes + self.tail.ram_bytes + self.place.nbytes

    def write(self, first: int, rows: Arrays) -> None:
        self.narrow.write(first, rows)
        self.tail.write(first, rows)

    def gather(self, ids: np.ndarray, out: Arrays) -> None:
        self.narrow.gather(
            ids, {k: v for k, v in out.items() if k in self.narrow.rings}
        )
        wide = {key: value for key, value in out.items() if key in self.tail.rings}
        if not wide:
            return
        copies = []
        for start, stop, index, row in self._runs(ids):
            if index < 0:
                rows = ids[start:stop] % self.tail.capacity
                for key, value in wide.items():
                    ring = self.tail.rings[key]
                    np.take(ring, rows, 0, value[start:stop], mode="clip")
                continue
            segment = self.segments[index]
            for key, value in wide.items():
                source = self._column(segment, key)[row : row + stop - start]
                copies.append((value[start:stop], source))
        self._copy(copies)

    def scatter(self, ids: np.ndarray, values: Arrays) -> None:
        narrow = {k: v for k, v in values.items() if k in self.narrow.rings}
        self.narrow.scatter(ids, narrow)
        wide = {key: value for key, value in values.items() if key in self.tail.rings}
        if not wide:
            return
        for start, stop, index, row in self._runs(ids):
            if index < 0:
                part = {key: value[start:stop] for key, value in wide.items()}
                self.tail.scatter(ids[start:stop], part)
                continue
            segment = self.segments[index]
            if segment.scratch is None:
                self._make_scratch(segment)
            for key, value in wide.items():
                column = self._column(segment, key)
                column[row : row + stop - start] = value[start:stop]
                self._touched += (stop - start) * column[0].nbytes
        self._release()

    def seal(self, segment: Segment, order: np.ndarray) -> None:
        ids = segment.first + order
        self.place[ids % self.capacity] = np.arange(segment.count)
        self._append(segment)

    def restore(
        self, segment: Segment, ids: np.ndarray, live: np.ndarray, columns: Arrays
    ) -> None:
        self.narrow.restore(segment, ids, live, columns)
        self.place[ids[live] % self.capacity] = np.flatnonzero(live)
        self._append(segment)

    def drop(self, first: int) -> None:
        for segment in [s for s in self.segments if s.stop <= first]:
            self.lose(segment)

    def lose(self, segment: Segment) -> None:
        self._forget_scratch(segment)
        for source in (segment.rows, segment.extras):
            if source is not None:
                self._maps.pop(source.record.name, None)
        index = self.segments.index(segment)
        del self.segments[index]
        self._firsts = np.delete(self._firsts, index)

    def clear(self) -> None:
        for segment in list(self.segments):
            self.lose(segment)
        self.sealed = 0

    def close(self) -> None:
        self._maps.clear()
        self._crew.close()

    def _forget_scratch(self, segment: Segment) -> None:
        if segment.scratch is not None:
            name = segment.scratch.record.name
            self._maps.pop(name, None)
            (self.directory / name).unlink(missing_ok=True)
            segment.scratch = None

    def _append(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.sealed = segment.stop
        self._firsts = np.append(self._firsts, segment.first)

    def _runs(self, ids: np.ndarray) -> list[tuple[int, int, int, int]]:
        """Cut `ids` where it is not contiguous in a file: (start, stop, file, row)."""
        if not len(ids):
            return []
        index = np.searchsorted(self._firsts, ids, "right") - 1
        index[ids >= self.sealed] = -1
        rows = self.place[ids % self.capacity]
        broken = (index[1:] != index[:-1]) | (rows[1:] - rows[:-1] != 1)
        broken &= (index[1:] >= 0) | (index[:-1] >= 0)  # the tail is one run
        cuts = [0, *(np.flatnonzero(broken) + 1).tolist(), len(ids)]
        return [
            (start, stop, int(index[start]), int(rows[start]))
            for start, stop in itertools.pairwise(cuts)
        ]

    def _copy(self, copies: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self._crew.run(np.copyto, copies)
        self._touched += sum(target.nbytes for target, _ in copies)
        del copies[:]  # they keep maps alive
        self._release()

    def _release(self) -> None:
        """Give mapped pages back now and then, so that resident memory stays flat."""
        if self._touched < RESIDENT:
            return
        self._touched = 0
        for mapped, _ in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _column(self, segment: Segment, key: str) -> np.ndarray:
        source = segment.rows
        if key in self.extras:
            source = segment.scratch or segment.extras or source
        name = source.record.name
        found = self._maps.get(name)
        if found is None:
            try:
                found = self._maps[name] = source.open(self.directory)
            except OSError as error:
                raise SegmentLost(
                    segment, f"was lost while in use ({error})"
                ) from error
            if len(self._maps) > OPEN_MAPS:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(name)
        return found[1][key]

    def _make_scratch(self, segment: Segment) -> None:
        """Copy the extras of a segment to a file that may be changed."""
        columns = {key: self._column(segment, key) for key in self.extras}
        stem = segment_stem(segment.first, segment.count)
        segment.scratch = write_arrays(self.directory, stem, columns, SCRATCH)
        self._touched += sum(column.nbytes for column in columns.values())


def _take(ring: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    np.take(ring, rows, axis=0, out=out, mode="clip")


class Crew:
    """Threads that share a list of copies: numpy lets others run while it copies.

    As many as torch would use, so `OMP_NUM_THREADS` counts here too.
    """

    def __init__(self) -> None:
        self.size = min(torch.get_num_threads(), 4)
        self._threads: ThreadPoolExecutor | None = None

    def run(
        self, function: Callable[..., None], work: Sequence[tuple[Any, ...]]
    ) -> None:
        if self.size == 1 or len(work) < 2:
            for item in work:
                function(*item)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.size - 1, "replay")

        def share(index: int) -> None:
            for item in work[index :: self.size]:
                function(*item)

        others = [self._threads.submit(share, i) for i in range(1, self.size)]
        share(0)
        for other in others:
            other.result()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
