"""The files of the replay: which file contains which steps.

A segment is a file with consecutive steps. Threads write full segments during training;
until a file is complete, its steps are read from memory. A save waits for these files
and writes the remaining steps to a partial segment. Files are never changed. The
manifest, which is part of a checkpoint, lists them with their checksums. A file is
deleted only if neither the replay nor a kept checkpoint lists it, so the files of the
newest complete checkpoint exist even if the program is killed at any time.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reverie.replay.column_store import (
    SCRATCH_SUFFIX,
    ColumnStore,
    RamStore,
    ReplaySegment,
    SegmentLost,
)
from reverie.replay.step_index import StepIndex
from reverie.spaces import Arrays, Space, Spaces
from reverie.storage import array_file
from reverie.storage.array_file import ArrayFile, FileRecord, GatheredRows
from reverie.storage.atomic import TEMPORARY, fsync, make_folder
from reverie.storage.limits import InvalidFile, quote
from reverie.storage.os_errors import FILE_INTACT, explain_write_errors
from reverie.storage.segments import ORDER, POSITION, SEGMENT_NAME, STREAM, segment_stem

INDEX_SPACES = {
    STREAM: Space(np.int64),
    POSITION: Space(np.int64),
    ORDER: Space(np.int32),
}
"""Arrays of a segment file that locate its steps in the step index."""

WRITERS = 2
"""Number of threads that write files."""

MAX_PENDING = WRITERS + 1
"""Maximum number of segments that are being written or queued."""

FileArrays = Mapping[str, np.ndarray | GatheredRows]

Manifest = list[list[Any]]
"""For each segment: id of the first step, number of steps, record of the file, and
record of a file with newer extras or None."""


@dataclass
class PendingSegment:
    """Consecutive steps in memory that a thread is writing to a file."""

    first: int  # id of the first step
    order: np.ndarray  # row i of the file is the step `first + order[i]`
    file: Future[ArrayFile]
    changed_ids: list[np.ndarray] = field(default_factory=list)
    """Steps whose extras have changed, perhaps after they were written."""

    @property
    def stop(self) -> int:
        return self.first + len(self.order)


@dataclass(eq=False)
class SegmentFiles:
    """Writes steps to segment files, loads them, and deletes unused files.

    With `exact_extras`, a save writes all extras that were changed by write-backs, so
    that a resumed run continues exactly.
    """

    directory: Path
    index: StepIndex
    store: ColumnStore
    spaces: Spaces
    extras: Spaces
    segment: int  # steps per file
    max_add: int  # most steps that are added at once
    tail: int  # number of steps that a disk store can hold in memory
    exact_extras: bool

    def __post_init__(self) -> None:
        make_folder(self.directory, parents=True)
        self.segments: list[ReplaySegment] = []
        self.partial: ReplaySegment | None = None  # incomplete, replaced by next save
        self.first_unwritten = 0  # steps before this id are in full segments
        self._changed: set[ReplaySegment] = set()  # extras differ from the file
        self._pending: deque[PendingSegment] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._unsynced: list[str] = []  # names of files that need `fsync`

    @property
    def disk_bytes(self) -> int:
        return sum(
            file.record.size
            for segment in self._listed_segments()
            for file in (segment.rows, segment.extras, segment.scratch)
            if file is not None
        )

    def prepare_add(self, count: int) -> None:
        """Make room in the tail for `count` new steps by writing full segments."""
        index = self.index
        if index.total + count - max(self.first_unwritten, index.first) <= self.max_add:
            return
        self._write_full_segments()
        self.wait(MAX_PENDING, until=index.total + count - self.tail)
        num_in_tail = index.total - max(self.first_unwritten, index.first)
        assert num_in_tail + count <= self.tail, (num_in_tail, count, self.tail)
        self.evict()

    def wait(self, max_pending: int = 0, until: int = 0) -> None:
        """Wait until steps before the id `until` are in files.

        Also wait until at most `max_pending` files are still being written. The steps
        of all completed files are from now on read from the files.
        """
        while self._pending and (
            self._pending[0].file.done()
            or len(self._pending) > max_pending
            or self.first_unwritten < until
        ):
            try:
                file = self._pending[0].file.result()
            except BaseException:
                self._discard_pending()  # segments must be added in order
                raise
            self._use_file(self._pending.popleft(), file)

    def mark_extras_changed(self, ids: np.ndarray) -> None:
        """Record that the extras of these steps were overwritten."""
        for pending in self._pending:
            inside = (ids >= pending.first) & (ids < pending.stop)
            if inside.any():
                pending.changed_ids.append(ids[inside])
        if self.exact_extras:
            firsts = np.array([segment.first for segment in self.segments], np.int64)
            written = ids[ids < self.first_unwritten]
            numbers = np.unique(np.searchsorted(firsts, written, "right") - 1)
            self._changed |= {self.segments[n] for n in numbers if n >= 0}

    def evict(self) -> None:
        """Release the segments whose steps are all evicted."""
        while self.segments and self.segments[0].stop <= self.index.first:
            self.segments.pop(0)
        self.store.evict_before(self.index.first)

    def save(self) -> Manifest:
        """Write all steps that are not in files yet, and flush; return the manifest.

        Files that another program deleted are written again from memory. If the steps
        are not in memory, `SegmentLost` is raised.
        """
        self.wait()
        self.evict()
        make_folder(self.directory)
        self._replace_deleted()
        if self.exact_extras:
            self._write_changed_extras()
        self._write_full_segments()
        self.wait()
        self._write_partial()
        manifest = self._manifest()
        listed = {record.name for record in listed_files(manifest)}
        with explain_write_errors(self.directory / "segments"):
            for name in self._unsynced:
                if name in listed:
                    fsync(self.directory / name)
            fsync(self.directory)
        self._unsynced = []
        return manifest

    def load(
        self, manifest: Manifest, oldest: int, total: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Load the steps from the id `oldest` on; return ids, streams and positions.

        A damaged file is moved to quarantine with a warning, and its steps are lost.
        """
        listed_files(manifest)  # raises if it is not valid
        self._discard_pending()
        self._changed.clear()
        self.partial, self.segments, self.first_unwritten = None, [], total
        ids = [np.zeros(0, np.int64)]
        stream, position = list(ids), list(ids)
        for segment, arrays in self._open_listed(manifest, oldest):
            steps = segment.first + np.array(arrays[ORDER], np.int64)
            live = steps >= oldest
            self.store.load_segment(segment, steps, live, arrays)
            ids.append(steps[live])
            stream.append(np.array(arrays[STREAM])[live])
            position.append(np.array(arrays[POSITION])[live])
        return np.concatenate(ids), np.concatenate(stream), np.concatenate(position)

    def remove_lost(self, lost: SegmentLost) -> None:
        """Move files that failed while in use to quarantine."""
        for segment in lost.segments:
            self.segments.remove(segment)
            rows = segment.rows.record
            self._quarantine_rows(rows, lost.reason, segment.first, segment.count)
            self.store.remove_segment(segment)

    def delete_unused(self, kept: list[Manifest]) -> None:
        """Delete files that neither the replay nor one of these manifests lists."""
        self.wait()
        self.evict()
        names = set()
        for manifest in (self._manifest(), *kept):
            names |= {record.name for record in listed_files(manifest)}
        names |= {s.scratch.record.name for s in self.segments if s.scratch}
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        for path in paths:
            has_suffix = path.suffix in (array_file.SUFFIX, TEMPORARY, SCRATCH_SUFFIX)
            if has_suffix and path.name not in names and path.is_file():
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _listed_segments(self) -> list[ReplaySegment]:
        return [*self.segments, *([self.partial] if self.partial else [])]

    def _manifest(self) -> Manifest:
        return [
            [s.first, s.count, s.rows.record, s.extras.record if s.extras else None]
            for s in self._listed_segments()
        ]

    def _open_listed(
        self, manifest: Manifest, oldest: int
    ) -> Iterator[tuple[ReplaySegment, Arrays]]:
        """Verify the listed files; map and yield those with steps from `oldest` on."""
        records = listed_files(manifest)
        find_corruption = partial(array_file.find_corruption, self.directory)
        with ThreadPoolExecutor(4) as executor:
            found = executor.map(find_corruption, records)
            problems = dict(zip(records, found, strict=True))  # None if intact
        for first, count, rows_record, extras_record in manifest:
            if first + count <= oldest:
                continue
            rows = FileRecord(*rows_record)
            if problem := problems[rows]:
                self._quarantine_rows(rows, problem, first, count)
                continue
            try:
                file = array_file.read_layout(self.directory, rows)
                arrays = file.open(self.directory)[1]
                check_columns(arrays, self.spaces | INDEX_SPACES, count)
                if not np.array_equal(np.sort(arrays[ORDER]), np.arange(count)):
                    raise InvalidFile("has steps in an invalid order")
            except (OSError, ValueError) as error:
                _raise_if_intact(error)
                self._quarantine_rows(rows, str(error), first, count)
                continue
            segment = ReplaySegment(first, count, file)
            if extras_record:
                extras = FileRecord(*extras_record)
                problem = problems[extras] or self._add_extras(segment, extras, arrays)
                if problem:
                    consequence = (
                        f"Older extras are used for {_describe_steps(first, count)}."
                    )
                    array_file.quarantine(
                        self.directory, extras.name, problem, consequence
                    )
            self.segments.append(segment)
            yield segment, arrays

    def _add_extras(
        self, segment: ReplaySegment, record: FileRecord, arrays: Arrays
    ) -> str | None:
        """Replace extras in `arrays` by those of a file with newer values.

        Returns why the file cannot be used, or None if it was used.
        """
        try:
            file = array_file.read_layout(self.directory, record)
            extras = file.open(self.directory)[1]
            check_columns(extras, self.extras, segment.count)
        except (OSError, ValueError) as error:
            _raise_if_intact(error)
            return str(error)
        segment.extras = file
        arrays |= extras
        return None

    def _quarantine_rows(
        self, record: FileRecord, problem: str, first: int, count: int
    ) -> None:
        consequence = f"The replay continues without {_describe_steps(first, count)}."
        array_file.quarantine(self.directory, record.name, problem, consequence)

    def _next_to_write(self) -> int:
        """Id of the first step that is neither in a full segment nor pending."""
        stop = self._pending[-1].stop if self._pending else self.first_unwritten
        return max(stop, self.index.first)

    def _write_full_segments(self) -> None:
        """Start writing all full segments, in threads."""
        while self.index.total - (first := self._next_to_write()) >= self.segment:
            make_folder(self.directory)
            self.wait(MAX_PENDING - 1)
            arrays, order = self._file_arrays(first, self.segment)
            if self._executor is None:
                self._executor = ThreadPoolExecutor(WRITERS, "replay-files")
            stem = segment_stem(first, self.segment)
            file = self._executor.submit(
                array_file.write_arrays, self.directory, stem, arrays
            )
            self._pending.append(PendingSegment(first, order, file))

    def _write_partial(self) -> None:
        """Write the steps after the last full segment, if they have changed."""
        first = self._next_to_write()
        count = self.index.total - first
        if not count:
            self.partial = None
            return
        old = self.partial
        if old and (old.first, old.count) == (first, count) and not self.extras:
            return
        arrays, _ = self._file_arrays(first, count)
        file = self._write(segment_stem(first, count), arrays)
        self.partial = ReplaySegment(first, count, file)

    def _replace_deleted(self) -> None:
        """Write the files again that another program deleted."""
        names = set(os.listdir(self.directory))
        deleted = []
        if self.partial and self.partial.rows.record.name not in names:
            self.partial = None  # all of its steps are in memory
        for segment in self.segments:
            if segment.extras and segment.extras.record.name not in names:
                self._warn_deleted(segment.extras)
                segment.extras = None
                self._changed.add(segment)
            if segment.rows.record.name not in names:
                deleted.append(segment)
        self._write_again(deleted, "was deleted while in use")

    def _write_again(self, segments: list[ReplaySegment], reason: str) -> None:
        """Write the steps of lost files to new files; raise if not in memory."""
        if segments and not isinstance(self.store, RamStore):
            raise SegmentLost(segments, reason)
        for segment in segments:
            self._warn_deleted(segment.rows)
            first = max(segment.first, self.index.first)
            segment.first, segment.count = first, segment.stop - first
            arrays, _ = self._file_arrays(first, segment.count)
            segment.rows = self._write(segment_stem(first, segment.count), arrays)
            segment.extras = None
            self._changed.discard(segment)

    def _warn_deleted(self, file: ArrayFile) -> None:
        path = self.directory / file.record.name
        message = f"{path} was deleted while in use; it is written again from memory."
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _write_changed_extras(self) -> None:
        """Write the extras of segments that have changed since the last save."""
        changed = self._changed.intersection(self.segments)
        for segment in sorted(changed, key=lambda segment: segment.first):
            try:
                _, arrays = segment.rows.open(self.directory)
            except (OSError, InvalidFile) as error:
                _raise_if_intact(error)
                self._write_again([segment], f"was lost while in use ({error})")
                continue
            order = np.array(arrays[ORDER], np.int64)
            # rows of evicted steps get the values of the oldest live step
            ids = np.maximum(segment.first + order, self.index.first)
            extras = {k: space.zeros(segment.count) for k, space in self.extras.items()}
            self.store.gather(ids, extras)
            stem = segment_stem(segment.first, segment.count) + "-extras"
            segment.extras = self._write(stem, extras)
        self._changed.clear()

    def _write(self, stem: str, arrays: FileArrays) -> ArrayFile:
        file = array_file.write_arrays(self.directory, stem, arrays)
        self._unsynced.append(file.record.name)
        return file

    def _file_arrays(self, first: int, count: int) -> tuple[FileArrays, np.ndarray]:
        """Return consecutive steps as in a file, and the order of its rows.

        Row i is the step `first + order[i]`.
        """
        ids = np.arange(first, first + count)
        stream = self.index.stream[ids % self.index.capacity]
        # Steps of one stream are contiguous, so that a window is one or two reads.
        order = np.argsort(stream, kind="stable")
        ids = ids[order]
        positions: Arrays = {
            STREAM: stream[order].astype(np.int64),
            POSITION: self.index.position[ids % self.index.capacity],
            ORDER: order.astype(np.int32),
        }
        return {**self.store.rows_to_write(ids), **positions}, order

    def _use_file(self, pending: PendingSegment, file: ArrayFile) -> None:
        """Read the steps of a completed file from disk from now on, not from memory."""
        segment = ReplaySegment(pending.first, len(pending.order), file)
        no_ids = np.zeros(0, np.int64)
        changed = np.unique(np.concatenate([no_ids, *pending.changed_ids]))
        extras = {key: space.zeros(len(changed)) for key, space in self.extras.items()}
        if len(changed):
            self.store.gather(changed, extras)
        self._unsynced.append(file.record.name)
        self.segments.append(segment)
        self.first_unwritten = segment.stop
        self.store.add_segment(segment, pending.order)
        if len(changed):
            self.store.scatter(changed, extras)
            if self.exact_extras:
                self._changed.add(segment)

    def _discard_pending(self) -> None:
        """Wait for the files being written and ignore them; the steps are in memory."""
        while self._pending:
            self._pending.popleft().file.exception()


def listed_files(manifest: Any) -> list[FileRecord]:
    """Return the records of all files of a manifest; raise `InvalidFile` if not valid.

    Only names of segments are accepted, because listed files are moved and deleted.
    """
    records = []
    for entry in manifest if isinstance(manifest, list) else [None]:
        match entry:
            case [int(first), int(count), rows, extras] if first >= 0 and count > 0:
                records += [_record(x) for x in (rows, extras) if x is not None]
            case _:
                raise InvalidFile("has a list of replay files that is not valid")
    return records


def _record(entry: Any) -> FileRecord:
    match entry:
        case [str(name), int(size), int(crc)] if SEGMENT_NAME.fullmatch(name):
            return FileRecord(name, size, crc)
    raise InvalidFile(f"lists {quote(str(entry))}, which is not a file of the replay")


def _raise_if_intact(error: Exception) -> None:
    """Raise the error again if the file is not damaged (e.g. too many open files)."""
    if isinstance(error, OSError) and error.errno in FILE_INTACT:
        raise error


def check_columns(arrays: Arrays, spaces: Spaces, rows: int) -> None:
    """Raise `InvalidFile` unless the arrays have these keys, types and shapes."""
    for key, space in spaces.items():
        found = arrays.get(key)
        if found is None:
            raise InvalidFile(f"has no {key!r}")
        if found.dtype != space.dtype or found.shape != (rows, *space.shape):
            raise InvalidFile(
                f"has {key!r} as {found.dtype} {found.shape}, expected {space.dtype} "
                f"{(rows, *space.shape)}"
            )


def _describe_steps(first: int, count: int) -> str:
    return f"steps {first} to {first + count - 1}"
