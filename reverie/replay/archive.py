"""The replay on disk: which files hold which steps, written as training goes on.

Threads write full segments while training goes on; until a file is whole, its steps are
read from memory. Saving waits for them and writes only what no file holds yet. Files
are never changed; the index (part of a checkpoint) names them with their checksums. A
file may go only when neither the replay nor any kept checkpoint names it, so whenever
the program is killed, the newest whole checkpoint finds everything it names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from reverie.api import StateDict
from reverie.replay.columns import SCRATCH, Columns, Segment
from reverie.replay.timeline import Timeline
from reverie.spaces import Spaces
from reverie.storage import array_file as files
from reverie.storage.array_file import ArrayFile, Arrays, FileRecord
from reverie.storage.atomic import TEMPORARY, explain_full_disk, fsync
from reverie.storage.segments import ORDER, POSITION, STREAM, segment_stem

WRITERS = 2
"""Files that are written at the same time."""

PENDING = WRITERS + 1
"""Segments that may be on their way to a file."""


@dataclass
class Pending:
    """Consecutive steps that a thread is writing, as they were when it began."""

    first: int
    order: np.ndarray
    columns: Arrays
    source: Future[ArrayFile]
    late: list[np.ndarray] = field(default_factory=list)  # whose extras changed since

    @property
    def stop(self) -> int:
        return self.first + len(self.order)


class Archive:
    """Writes steps as segments, reads them back, and clears away what nobody names."""

    def __init__(
        self, directory: Path, spaces: Spaces, extras: Spaces, segment: int
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.spaces = spaces
        self.extras = extras
        self.segment = segment
        self.segments: list[Segment] = []
        self.partial: Segment | None = None  # written by a save, soon superseded
        self.sealed = 0  # the id up to which steps are in files for good
        self.refreshed: set[Segment] = (
            set()
        )  # whose extras are newer than in their file
        self._pending: deque[Pending] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._unsynced: list[str] = []
        self._buffers: list[Arrays] = []  # kept, because fresh memory is slow to touch

    @property
    def disk_bytes(self) -> int:
        parts = [*self.segments, *([self.partial] if self.partial else [])]
        return sum(
            source.record.size
            for segment in parts
            for source in (segment.rows, segment.extras, segment.scratch)
            if source is not None
        )

    def seal(self, timeline: Timeline, columns: Columns) -> None:
        """Have the full segments among the steps that no file holds written."""
        while timeline.total - (first := self._next(timeline)) >= self.segment:
            self.await_sealed(columns, most=PENDING - 1)
            out, order = self._collect(timeline, columns, first, self.segment)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(WRITERS, "seal")
            stem = segment_stem(first, self.segment)
            source = self._threads.submit(files.write_arrays, self.directory, stem, out)
            self._pending.append(Pending(first, order, out, source))

    def await_sealed(
        self, columns: Columns, stop: int = 0, most: int = PENDING
    ) -> None:
        """Take over the files that are whole, and wait for some.

        For those of steps before `stop`, and until at most so many are on their way.
        """
        while self._pending and (
            self._pending[0].source.done()
            or len(self._pending) > most
            or self.sealed < stop
        ):
            try:
                source = self._pending[0].source.result()
            except BaseException:
                self.abandon()  # none of the later ones may come before it
                raise
            self._take_over(self._pending.popleft(), source, columns)

    def touch(self, ids: np.ndarray) -> None:
        """The extras of these steps have changed."""
        for pending in self._pending:
            inside = (ids >= pending.first) & (ids < pending.stop)
            if inside.any():
                pending.late.append(ids[inside])

    def abandon(self) -> None:
        """Forget what is on its way to a file; its steps are as if never sealed."""
        while self._pending:
            self._pending.popleft().source.exception()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def save(self, timeline: Timeline, columns: Columns) -> None:
        """Write every step that no file holds, and make sure all of it stays."""
        self.seal(timeline, columns)
        self.await_sealed(columns, most=0)
        first = self._next(timeline)
        if timeline.total > first:
            count = timeline.total - first
            same = self.partial and (first, count) == (
                self.partial.first,
                self.partial.count,
            )
            if not same or self.extras:
                out, _ = self._collect(timeline, columns, first, count)
                self.partial = Segment(
                    first, count, self._put(segment_stem(first, count), out)
                )
        else:
            self.partial = None
        index = self.index()
        named = {*index["rows_name"], *index["extras_name"]}
        with explain_full_disk(self.directory):
            for name in self._unsynced:
                if name in named:
                    fsync(self.directory / name)
            fsync(self.directory)
        self._unsynced = []

    def save_extras(
        self, timeline: Timeline, columns: Columns, changed: list[Segment]
    ) -> None:
        """Write the extras of these segments as they are now."""
        for segment in changed:
            mapped = segment.rows.open(self.directory)
            order = np.array(mapped[1][ORDER], np.int64)
            ids = np.maximum(segment.first + order, timeline.first)
            out = {
                key: space.zeros(segment.count) for key, space in self.extras.items()
            }
            columns.gather(ids, out)
            stem = segment_stem(segment.first, segment.count) + "-extras"
            segment.extras = self._put(stem, out)

    def holding(self, ids: np.ndarray) -> set[Segment]:
        """The segments that hold these steps."""
        firsts = np.array([segment.first for segment in self.segments], np.int64)
        found = np.unique(np.searchsorted(firsts, ids[ids < self.sealed], "right") - 1)
        return {self.segments[index] for index in found if index >= 0}

    def drop(self, first: int) -> None:
        """Steps before this id are evicted."""
        while self.segments and self.segments[0].stop <= first:
            self.segments.pop(0)

    def index(self) -> StateDict:
        """What a checkpoint must remember to find every step again."""
        parts = [*self.segments, *([self.partial] if self.partial else [])]
        rows = [segment.rows.record for segment in parts]
        extras = [s.extras.record if s.extras else FileRecord("", 0, 0) for s in parts]
        return {
            "first": np.array([segment.first for segment in parts], np.int64),
            "count": np.array([segment.count for segment in parts], np.int64),
            **_pack("rows", rows),
            **_pack("extras", extras),
        }

    def load(
        self, index: StateDict, oldest: int, total: int
    ) -> Iterator[tuple[Segment, Arrays]]:
        """Check the files of an index; yields the good ones, mapped.

        A bad file is put aside and reported; its steps are lost, the rest goes on.
        """
        self.abandon()
        self.refreshed.clear()
        self.partial, self.segments, self.sealed = None, [], total
        firsts, counts = np.asarray(index["first"]), np.asarray(index["count"])
        spans = list(zip(firsts.tolist(), counts.tolist(), strict=True))
        rows, extras = named_files(index, "rows"), named_files(index, "extras")
        with ThreadPoolExecutor(4) as threads:
            problems = list(
                threads.map(
                    lambda r: files.find_damage(self.directory, r) if r.name else None,
                    [*rows, *extras],
                )
            )
        for i, (first, count) in enumerate(spans):
            if first + count <= oldest:
                continue
            steps = f"steps {first} to {first + count - 1}"
            if why := problems[i]:
                effect = f"The replay goes on without {steps}."
                files.quarantine(self.directory, rows[i].name, why, effect)
                continue
            source = files.read_layout(self.directory, rows[i])
            segment = Segment(first, count, source)
            columns = source.open(self.directory)[1]
            if why := problems[len(rows) + i]:
                effect = f"Older extras are used for {steps}."
                files.quarantine(self.directory, extras[i].name, why, effect)
            elif extras[i].name:
                segment.extras = files.read_layout(self.directory, extras[i])
                columns |= segment.extras.open(self.directory)[1]
            self.segments.append(segment)
            yield segment, columns

    def lose(self, segment: Segment, why: str) -> None:
        """Put a file aside that failed while in use."""
        effect = f"The replay goes on without steps {segment.first} to "
        name = segment.rows.record.name
        self.segments.remove(segment)
        files.quarantine(self.directory, name, why, f"{effect}{segment.stop - 1}.")

    def collect(self, kept: list[StateDict]) -> None:
        """Delete files that neither the replay nor a kept index names."""
        names = set()
        for index in (self.index(), *kept):
            for record in (*named_files(index, "rows"), *named_files(index, "extras")):
                names.add(record.name)
        names |= {s.scratch.record.name for s in self.segments if s.scratch}
        for path in self.directory.iterdir():
            ours = path.suffix in (files.SUFFIX, TEMPORARY, SCRATCH)
            if ours and path.name not in names and path.is_file():
                path.unlink(missing_ok=True)

    def _next(self, timeline: Timeline) -> int:
        begun = self._pending[-1].stop if self._pending else self.sealed
        return max(begun, timeline.first)

    def _collect(
        self, timeline: Timeline, columns: Columns, first: int, count: int
    ) -> tuple[Arrays, np.ndarray]:
        """A copy of these steps as a file will hold them, and their order there."""
        ids = np.arange(first, first + count)
        stream = timeline.stream[ids % timeline.capacity]
        # steps of one environment side by side: a window is then one or two reads
        order = np.argsort(stream, kind="stable")
        ids = ids[order]
        if count == self.segment and self._buffers:
            out = self._buffers.pop()
        else:
            out = {key: space.zeros(count) for key, space in self.spaces.items()}
        columns.gather(ids, out)
        more: Arrays = {
            STREAM: stream[order].astype(np.int64),
            POSITION: timeline.position[ids % timeline.capacity],
            ORDER: order.astype(np.int32),
        }
        return {**out, **more}, order

    def _take_over(self, pending: Pending, source: ArrayFile, columns: Columns) -> None:
        """Steps are read from their file from now on."""
        segment = Segment(pending.first, len(pending.order), source)
        late = np.unique(np.concatenate([np.zeros(0, np.int64), *pending.late]))
        extras = {key: space.zeros(len(late)) for key, space in self.extras.items()}
        if len(late):
            columns.gather(late, extras)
        self._unsynced.append(source.record.name)
        self.segments.append(segment)
        self.sealed = segment.stop
        columns.seal(segment, pending.order)
        if len(late):
            columns.scatter(late, extras)
            self.refreshed.add(segment)
        self._buffers.append({key: pending.columns[key] for key in self.spaces})

    def _put(self, stem: str, columns: Arrays) -> ArrayFile:
        source = files.write_arrays(self.directory, stem, columns)
        self._unsynced.append(source.record.name)
        return source


def _pack(prefix: str, records: list[FileRecord]) -> StateDict:
    return {
        f"{prefix}_name": [record.name for record in records],
        f"{prefix}_size": np.array([record.size for record in records], np.int64),
        f"{prefix}_crc": np.array([record.crc for record in records], np.int64),
    }


def named_files(index: StateDict, prefix: str) -> list[FileRecord]:
    """The files an index names: `rows`, or the `extras` that supersede theirs."""
    columns = (index[f"{prefix}_{key}"] for key in ("name", "size", "crc"))
    return [
        FileRecord(str(name), int(size), int(crc))
        for name, size, crc in zip(*columns, strict=True)
    ]
