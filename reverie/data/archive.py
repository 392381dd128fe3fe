"""The replay on disk: which files hold which steps, written as training goes on.

Saving writes only what no file holds yet. Files are never changed; the index (part of a
checkpoint) names them with their checksums. A file may go only when neither the replay
nor any kept checkpoint names it, so whenever the program is killed, the newest whole
checkpoint finds everything it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from reverie.api import Spaces, StateDict
from reverie.data import segments as files
from reverie.data.columns import SCRATCH, Columns, Segment
from reverie.data.segments import Arrays, FileRecord, Source
from reverie.data.timeline import Timeline

STREAM, POSITION, ORDER = "#stream", "#position", "#order"


class Archive:
    """Writes steps as segments, reads them back, and clears away what nobody names."""

    def __init__(
        self, directory: Path, spaces: Spaces, notes: Spaces, segment: int
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.spaces = spaces
        self.notes = notes
        self.segment = segment
        self.segments: list[Segment] = []
        self.partial: Segment | None = None  # written by a save, soon superseded
        self.sealed = 0  # the id up to which steps are in files for good
        self._unsynced: list[str] = []
        self._buffers: Arrays = {}  # kept, because fresh memory is slow to touch

    @property
    def disk_bytes(self) -> int:
        parts = [*self.segments, *([self.partial] if self.partial else [])]
        return sum(
            source.record.size
            for segment in parts
            for source in (segment.rows, segment.notes, segment.scratch)
            if source is not None
        )

    def seal(self, timeline: Timeline, columns: Columns) -> None:
        """Write the full segments among the steps that no file holds."""
        while timeline.total - (first := self._next(timeline)) >= self.segment:
            segment, order = self._write(timeline, columns, first, self.segment)
            self.segments.append(segment)
            self.sealed = segment.stop
            columns.seal(segment, order)

    def save(self, timeline: Timeline, columns: Columns) -> None:
        """Write every step that no file holds, and make sure all of it stays."""
        self.seal(timeline, columns)
        first = self._next(timeline)
        if timeline.total > first:
            count = timeline.total - first
            same = self.partial and (first, count) == (
                self.partial.first,
                self.partial.count,
            )
            if not same or self.notes:
                self.partial, _ = self._write(timeline, columns, first, count)
        else:
            self.partial = None
        index = self.index()
        named = {*index["rows_name"], *index["notes_name"]}
        files.sync(self.directory, [name for name in self._unsynced if name in named])
        self._unsynced = []

    def save_notes(
        self, timeline: Timeline, columns: Columns, changed: list[Segment]
    ) -> None:
        """Write the notes of these segments as they are now."""
        for segment in changed:
            mapped = segment.rows.open(self.directory)
            order = np.array(mapped[1][ORDER], np.int64)
            ids = np.maximum(segment.first + order, timeline.first)
            out = {key: space.zeros(segment.count) for key, space in self.notes.items()}
            columns.gather(ids, out)
            stem = f"{segment.first:012d}-{segment.count}-notes"
            segment.notes = self._put(stem, out)

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
        notes = [s.notes.record if s.notes else FileRecord("", 0, 0) for s in parts]
        return {
            "first": np.array([segment.first for segment in parts], np.int64),
            "count": np.array([segment.count for segment in parts], np.int64),
            **_pack("rows", rows),
            **_pack("notes", notes),
        }

    def load(
        self, index: StateDict, oldest: int, total: int
    ) -> Iterator[tuple[Segment, Arrays]]:
        """Check the files of an index; yields the good ones, mapped.

        A bad file is put aside and reported; its steps are lost, the rest goes on.
        """
        self.partial, self.segments, self.sealed = None, [], total
        firsts, counts = np.asarray(index["first"]), np.asarray(index["count"])
        spans = list(zip(firsts.tolist(), counts.tolist(), strict=True))
        rows, notes = named_files(index, "rows"), named_files(index, "notes")
        with ThreadPoolExecutor(4) as threads:
            problems = list(
                threads.map(
                    lambda r: files.problem(self.directory, r) if r.name else None,
                    [*rows, *notes],
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
            source = files.find(self.directory, rows[i])
            segment = Segment(first, count, source)
            columns = source.open(self.directory)[1]
            if why := problems[len(rows) + i]:
                effect = f"Older notes are used for {steps}."
                files.quarantine(self.directory, notes[i].name, why, effect)
            elif notes[i].name:
                segment.notes = files.find(self.directory, notes[i])
                columns |= segment.notes.open(self.directory)[1]
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
            for record in (*named_files(index, "rows"), *named_files(index, "notes")):
                names.add(record.name)
        names |= {s.scratch.record.name for s in self.segments if s.scratch}
        for path in self.directory.iterdir():
            ours = path.suffix in (files.SUFFIX, files.TEMPORARY, SCRATCH)
            if ours and path.name not in names and path.is_file():
                path.unlink(missing_ok=True)

    def _next(self, timeline: Timeline) -> int:
        return max(self.sealed, timeline.first)

    def _write(
        self, timeline: Timeline, columns: Columns, first: int, count: int
    ) -> tuple[Segment, np.ndarray]:
        ids = np.arange(first, first + count)
        stream = timeline.stream[ids % timeline.capacity]
        # steps of one environment side by side: a window is then one or two reads
        order = np.argsort(stream, kind="stable")
        ids = ids[order]
        if len(next(iter(self._buffers.values()), ())) != count:
            self._buffers = {k: space.zeros(count) for k, space in self.spaces.items()}
        out = dict(self._buffers)
        columns.gather(ids, out)
        out[STREAM] = stream[order].astype(np.int64)
        out[POSITION] = timeline.position[ids % timeline.capacity]
        out[ORDER] = order.astype(np.int32)
        source = self._put(f"{first:012d}-{count}", out)
        return Segment(first, count, source), order

    def _put(self, stem: str, columns: Arrays) -> Source:
        source = files.write(self.directory, stem, columns)
        self._unsynced.append(source.record.name)
        return source


def _pack(prefix: str, records: list[FileRecord]) -> StateDict:
    return {
        f"{prefix}_name": [record.name for record in records],
        f"{prefix}_size": np.array([record.size for record in records], np.int64),
        f"{prefix}_crc": np.array([record.crc for record in records], np.int64),
    }


def named_files(index: StateDict, prefix: str) -> list[FileRecord]:
    """The files an index names: `rows`, or the `notes` that supersede theirs."""
    columns = (index[f"{prefix}_{key}"] for key in ("name", "size", "crc"))
    return [
        FileRecord(str(name), int(size), int(crc))
        for name, size, crc in zip(*columns, strict=True)
    ]
