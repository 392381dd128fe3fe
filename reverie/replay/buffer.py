"""The replay: what was lived, kept in a ring of fixed capacity and cut into windows.

`add` takes one row per environment; `sample` cuts a batch for one window of the
windows. Several windows of different spans can be cut from the same steps. Rows are
named by a step id (`timeline.py`), by which extras and priorities are written back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from reverie.api import Metrics, StateDict, UserError
from reverie.replay.archive import PENDING, Archive
from reverie.replay.budget import make_plan
from reverie.replay.columns import (
    Columns,
    DiskColumns,
    RamColumns,
    Segment,
    SegmentLost,
)
from reverie.replay.cursor import Cursor
from reverie.replay.episodes import Episodes
from reverie.replay.sampling import (
    Fractions,
    PriorityConfig,
    Selector,
    Uniform,
    make_selector,
)
from reverie.replay.timeline import Timeline
from reverie.rows import Window
from reverie.spaces import Spaces
from reverie.storage.segments import ORDER, POSITION, STREAM


@dataclass(frozen=True)
class ReplayConfig:
    """How much experience is kept, where, and how it is chosen for training."""

    capacity: int = 5_000_000
    """Steps kept; the oldest make room for new ones."""

    storage: Literal["auto", "ram", "disk"] = "auto"
    """Where they are kept: in memory if they fit, else on disk (auto)."""

    device_memory: float = 0.5
    """Part of the free GPU memory that may hold the steps as well, so that batches are
    cut there; 0 keeps them off the GPU."""

    save: bool = True
    """Keep the steps across restarts, in files beside the checkpoints."""

    segment: int = 1024
    """Steps per file."""

    online: bool = True
    """Serve every fresh step once before sampling old ones."""

    fracs: Fractions = field(default_factory=Fractions)
    """How sequences are chosen, as parts of one."""

    prio: PriorityConfig = field(default_factory=PriorityConfig)
    """How priorities are understood, where `fracs.priority` is above zero."""

    recexp: float = 1.0
    """Power of age by which old sequences grow rare, for `fracs.recency`."""

    def __post_init__(self) -> None:
        for name in ("capacity", "segment"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"replay.{name} is {getattr(self, name)}, but must be at least 1.\n"
                    f"  Fix: --replay.{name} 1024"
                )
        if not 0 <= self.device_memory <= 1:
            raise UserError(
                f"replay.device_memory is {self.device_memory}, but must be a part of "
                "one.\n  Fix: --replay.device_memory 0.5"
            )


class Follower(Protocol):
    """Whoever holds a part of a replay elsewhere, and is told what it must know."""

    def settle(self) -> None:
        """The replay will be saved: give back what it does not know yet."""
        ...

    def reload(self) -> None:
        """The replay holds other steps now."""
        ...

    def take_count(self) -> int:
        """Rows whose extras were written elsewhere since the last call."""
        ...


class Replay:
    """Stores steps, cuts batches, takes back extras and priorities; see the module."""

    def __init__(
        self,
        spaces: Spaces,
        extras: Spaces,
        config: ReplayConfig,
        *,
        capacity: int,
        streams: int,
        windows: dict[str, Window],
        directory: Path | None,
        seed: int,
        exact_extras: bool = False,
    ) -> None:
        self.config = config
        self.windows = windows
        spaces = {k: v for k, v in spaces.items() if not k.startswith("log/")}
        self.spaces = {**spaces, **extras}
        self.extras = extras
        self.exact_extras = exact_extras
        least = _check_capacity(config, streams, windows)
        self.capacity = capacity = max(capacity, least)
        segment = min(config.segment, max(1, capacity // 4))
        unit = max(segment, streams)
        tail = (1 + PENDING) * unit
        mixing = [w for w in windows.values() if w.select == "mixture"]
        self.plan = make_plan(
            spaces,
            extras,
            capacity=capacity,
            storage=config.storage,
            tail=tail + PENDING * segment,
            saves=config.save,
            directory=directory,
            extra=26 * len(mixing) if config.fracs.priority else 0,
            least=least,
        )
        self.timeline = Timeline(capacity, streams)
        self.episodes: Episodes | None = None
        if any(window.select == "episodes" for window in windows.values()):
            self.episodes = Episodes(self.timeline)
        self.archive: Archive | None = None
        if directory is not None and (config.save or self.plan.storage == "disk"):
            self.archive = Archive(directory, self.spaces, extras, segment)
        self.columns: Columns = RamColumns({}, capacity)
        if self.plan.storage == "ram":
            self.columns = RamColumns(self.spaces, capacity)
        else:
            assert directory is not None
            self.columns = DiskColumns(self.spaces, extras, capacity, tail, directory)
        self._unit, self._tail = unit, tail
        self._recorded: int | None = None  # the stream of recorded episodes
        self._changed: set[Segment] = set()  # whose extras differ from their files
        self._cursors = {
            name: Cursor(
                name,
                window,
                self.timeline,
                partial(self._selector, window),
                self.episodes,
                seed,
            )
            for name, window in windows.items()
        }
        self._online = [
            cursor
            for cursor in self._cursors.values()
            if config.online and cursor.window.online and cursor.cutter is None
        ]
        self._inserts = self._samples = self._updates = self._replayed = 0
        self._lock = threading.RLock()
        self.followers: list[Follower] = []

    def __len__(self) -> int:
        """Steps stored now."""
        return len(self.timeline)

    def add(
        self, rows: dict[str, np.ndarray], streams: np.ndarray | None = None
    ) -> np.ndarray:
        """Store one row for each environment, or for those named; returns step ids."""
        count = len(self.timeline.slots) if streams is None else len(streams)
        for key, space in self.spaces.items():
            value = rows[key]
            fits = value.dtype == space.dtype and value.shape[1:] == space.shape
            assert fits and len(value) == count, (  # noqa: PT018
                f"replay key {key!r} is {value.dtype} {value.shape}, "
                f"wanted {space.dtype} {(count, *space.shape)}"
            )
        with self._lock:
            if self.plan.storage == "disk":
                self._make_room(count)
            ids = self.timeline.add(streams)
            self.columns.write(int(ids[0]), rows)
            if self.episodes is not None:
                self.episodes.add(ids, rows["is_first"])
            self._inserts += count
            for cursor in self._online:
                cursor.enqueue(ids)
        return ids

    def add_episode(self, episode: dict[str, np.ndarray]) -> np.ndarray:
        """Store a recorded episode; extras it does not bring are zero.

        Episodes added so follow each other, and never what an environment adds.
        """
        count = len(episode["is_first"])
        if count > self.capacity:
            raise UserError(
                f"A recorded episode has {count} steps, the replay only room for "
                f"{self.capacity}.\n  Fix: --replay.capacity {count} or more (and as "
                "many --run.steps)."
            )
        with self._lock:
            if self._recorded is None:
                self._recorded = self.timeline.open_stream()
            found = []
            for start in range(0, count, self._unit):
                stop = min(count, start + self._unit)
                rows = {}
                for key, space in self.spaces.items():
                    if key in self.extras and key not in episode:
                        rows[key] = space.zeros(stop - start)
                    else:
                        rows[key] = np.asarray(episode[key][start:stop], space.dtype)
                if self.plan.storage == "disk":
                    self._make_room(stop - start)
                ids = self.timeline.add_run(self._recorded, stop - start)
                self.columns.write(int(ids[0]), rows)
                if self.episodes is not None:
                    self.episodes.add(ids, rows["is_first"])
                for cursor in self._online:
                    cursor.enqueue(ids)
                self._inserts += stop - start
                found.append(ids)
        return np.concatenate(found)

    def new_stream(self, environment: int | None = None) -> None:
        """What this environment (or each) adds next follows nothing stored before.

        To be called when it begins anew without its saved state.
        """
        with self._lock:
            self.timeline.new_stream(environment)

    def items(self, name: str) -> int:
        """How many different windows of this kind could be served now."""
        return self.timeline.count(self.windows[name].span)

    def ready(self, name: str) -> bool:
        """Whether enough is stored to begin cutting batches of this kind.

        DreamerV3 begins at `batch * length` steps; a smaller replay when it is full.
        """
        window = self.windows[name]
        with self._lock:
            cutter = self._cursors[name].cutter
            if cutter is not None:  # one transition will do: the rest is padding
                return cutter.can_cut
            spread = (window.span - 1) * len(self.timeline.slots)
            return len(self) >= min(
                window.batch * window.length, self.capacity
            ) and self.items(name) >= min(window.batch, self.capacity - spread)

    def sample(
        self, name: str, out: dict[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Cut the next batch of this kind: every key as (B, context + length, ...).

        Fills and returns `out` where given: arrays as `buffers` makes them, of which
        keys but for the flags may be left out.
        """
        batch = self.buffers(name) if out is None else out
        with self._lock:
            while True:
                try:
                    self._sample(self._cursors[name], batch)
                    return batch
                except SegmentLost as error:
                    self._lose(error)

    def buffers(self, name: str) -> dict[str, np.ndarray]:
        """Empty arrays for one batch of this kind."""
        window = self.windows[name]
        shape = (window.batch, window.context + window.length)
        batch = {
            k: np.empty((*shape, *s.shape), s.dtype) for k, s in self.spaces.items()
        }
        batch["stepid"] = np.empty(shape, np.int64)
        batch["consec"] = np.empty(shape, np.int64)
        if window.select == "episodes":
            batch["mask"] = np.empty(shape, bool)
        return batch

    def read(self, ids: np.ndarray, out: dict[str, np.ndarray]) -> bool:
        """Copy live steps; False if some were lost just now, and are live no more."""
        with self._lock:
            try:
                self.columns.gather(ids, out)
            except SegmentLost as error:
                self._lose(error)
                return False
        return True

    def put_back(self, name: str) -> None:
        """The last batch of this kind was never used: let it be the next again."""
        with self._lock:
            cursor = self._cursors[name]
            cursor.put_back()
            self._samples -= cursor.window.batch
            self._replayed -= cursor.window.batch * cursor.window.length

    def write_back(self, stepid: np.ndarray, extras: dict[str, np.ndarray]) -> None:
        """Write fresher extras for these steps; evicted ones are passed over."""
        with self._lock:
            self._updates += self.rewrite(stepid, extras)

    def rewrite(self, stepid: np.ndarray, extras: dict[str, np.ndarray]) -> int:
        """`write_back` without counting; returns the number of steps written."""
        with self._lock:
            ids = stepid.reshape(-1)
            live = self.timeline.live(ids)
            ids = ids[live]
            values = {}
            for key, value in extras.items():
                space = self.extras[key]
                flat = value.reshape(-1, *space.shape)
                assert flat.dtype == space.dtype and len(flat) == len(live), (  # noqa: PT018
                    f"note {key!r} is {value.dtype} {value.shape}, "
                    f"wanted {space.dtype} {(*stepid.shape, *space.shape)}"
                )
                values[key] = flat if live.all() else flat[live]
            try:
                self.columns.scatter(ids, values)
            except SegmentLost as error:
                self._lose(error)
            if self.archive is not None:
                self.archive.touch(ids)
                if self.exact_extras:
                    self._changed |= self.archive.holding(ids)
            return len(ids)

    def prioritize(self, stepid: np.ndarray, priority: np.ndarray) -> None:
        """Say how much these steps deserve to be replayed."""
        with self._lock:
            flat = np.asarray(priority, np.float64).reshape(-1)
            for cursor in self._cursors.values():
                cursor.selector.prioritize(stepid.reshape(-1), flat)

    def count_uses(self, name: str, on: bool) -> None:
        """Whether batches of this kind count as uses of their episodes from now on."""
        cutter = self._cursors[name].cutter
        assert cutter is not None, f"{name!r} is not cut by episode"
        with self._lock:
            cutter.counting = on

    def save(self) -> StateDict:
        """Write the steps no file holds yet; returns what a checkpoint must remember.

        The files of earlier saves stay until `collect` is told they may go.
        """
        self._await_files()
        for follower in self.followers:  # which may wait for a thread that samples
            follower.settle()
        with self._lock:
            self._count_elsewhere()
            state: StateDict = {
                "spaces": _signature(self.spaces),
                "timeline": self.timeline.state_dict(),
                "cursors": {
                    name: cursor.state_dict() for name, cursor in self._cursors.items()
                },
                "counts": [
                    self._inserts,
                    self._samples,
                    self._updates,
                    self._replayed,
                ],
                "files": None,
            }
            if self.episodes is not None:
                state["episodes"] = self.episodes.state_dict()
            if self.archive is not None and self.config.save:
                self._await_files()
                self.archive.drop(self.timeline.first)
                if self.exact_extras:
                    changed = self._changed.intersection(self.archive.segments)
                    ordered = sorted(changed, key=lambda segment: segment.first)
                    self.archive.save_extras(self.timeline, self.columns, ordered)
                    self._changed.clear()
                self.archive.save(self.timeline, self.columns)
                state["files"] = self.archive.index()
            return state

    def load(self, state: StateDict) -> None:
        """Become the replay that was saved: same steps, ids, queues and next draws.

        Files that are missing or damaged are named, put aside and done without.
        """
        for follower in self.followers:
            follower.reload()
        with self._lock:
            _check_signature(state["spaces"], self.spaces)
            timeline = state["timeline"]
            total = int(timeline["total"])
            oldest = max(int(timeline["first"]), total - self.capacity)
            ids = [np.zeros(0, np.int64)]
            stream, position = list(ids), list(ids)
            self.columns.clear()
            self._changed.clear()
            if self.archive is not None and state["files"] is not None:
                files = self.archive.load(state["files"], oldest, total)
                for segment, columns in files:
                    order = np.array(columns[ORDER], np.int64)
                    steps = segment.first + order
                    live = steps >= oldest
                    self.columns.restore(segment, steps, live, columns)
                    ids.append(steps[live])
                    stream.append(np.array(columns[STREAM])[live])
                    position.append(np.array(columns[POSITION])[live])
            elif total > oldest:
                timeline = {**timeline, "first": total}  # nothing was kept
            self.timeline.restore(
                timeline,
                np.concatenate(ids),
                np.concatenate(stream),
                np.concatenate(position),
            )
            self._list_episodes(state)
            for name, cursor in self._cursors.items():
                if name in state["cursors"]:
                    saved = state["cursors"][name]
                    cursor.load_state_dict(saved, state.get("episodes"))
            counts = [int(count) for count in state["counts"]]
            self._inserts, self._samples, self._updates, self._replayed = counts

    def collect(self, kept: list[StateDict]) -> None:
        """Delete files that neither this replay nor any of these saves needs."""
        if self.archive is not None:
            with self._lock:
                self._await_files()
                self.archive.drop(self.timeline.first)
                self.columns.drop(self.timeline.first)
                indices = [state["files"] for state in kept if state["files"]]
                self.archive.collect(indices)

    def close(self) -> None:
        """Let go of files and threads."""
        if self.archive is not None:
            self.archive.close()
        self.columns.close()

    def metrics(self) -> Metrics:
        """Counts since the last call, and how much is stored."""
        with self._lock:
            self._count_elsewhere()
            inserts, replayed = self._inserts, self._replayed
            found: Metrics = {
                "items": max((self.items(name) for name in self.windows), default=0),
                "steps": len(self),
                "streams": self.timeline.streams,
                "ram_gb": self.columns.ram_bytes / 1e9,
                "disk_gb": self.archive.disk_bytes / 1e9 if self.archive else 0.0,
                "inserts": inserts,
                "samples": self._samples,
                "updates": self._updates,
                "online": sum(len(cursor.queue) for cursor in self._online),
            }
            if inserts:
                found["replay_ratio"] = replayed / inserts
            self._inserts = self._samples = self._updates = self._replayed = 0
            return found

    def _sample(self, cursor: Cursor, batch: dict[str, np.ndarray]) -> None:
        window = cursor.window
        if cursor.cutter is not None:
            ids, batch["mask"][:] = cursor.cut()
            self._gather(ids, batch)
            batch["consec"][:] = 0
        else:
            self._assemble(cursor, cursor.walk(), batch)
            cursor.piece += 1
        self._samples += window.batch
        self._replayed += window.batch * window.length

    def _count_elsewhere(self) -> None:
        self._updates += sum(follower.take_count() for follower in self.followers)

    def _lose(self, error: SegmentLost) -> None:
        """Go on without the steps of a file that cannot be read any more."""
        assert self.archive is not None
        lost, timeline = error.segment, self.timeline
        self.archive.lose(lost, error.why)
        self.columns.lose(lost)
        ids = np.arange(timeline.first, timeline.total)
        ids = ids[timeline.live(ids) & ((ids < lost.first) | (ids >= lost.stop))]
        rows = ids % self.capacity
        states = {name: c.state_dict() for name, c in self._cursors.items()}
        listed: StateDict = {}
        if self.episodes is not None:
            listed["episodes"] = self.episodes.state_dict()
        stream, position = timeline.stream[rows], timeline.position[rows]
        timeline.restore(timeline.state_dict(), ids, stream.astype(np.int64), position)
        self._list_episodes(listed)
        for name, state in states.items():
            self._cursors[name].load_state_dict(state, listed.get("episodes"))

    def _list_episodes(self, state: StateDict) -> None:
        if self.episodes is None:
            return
        timeline = self.timeline
        ids = np.arange(timeline.first, timeline.total)
        ids = ids[timeline.live(ids)]
        first = np.zeros(len(ids), bool)
        self.columns.gather(ids, {"is_first": first})
        self.episodes.rebuild(ids, first, state.get("episodes", {"begin": ()}))

    def _selector(self, window: Window) -> Selector:
        if window.select != "mixture":
            return Uniform(self.timeline, window.span)
        config = self.config
        return make_selector(
            self.timeline, window.span, config.fracs, config.prio, config.recexp
        )

    def _make_room(self, count: int) -> None:
        """Have full segments of the tail written before it overflows."""
        archive, timeline = self.archive, self.timeline
        assert archive is not None
        if timeline.total + count - max(archive.sealed, timeline.first) <= self._unit:
            return
        archive.seal(timeline, self.columns)
        archive.await_sealed(self.columns, timeline.total + count - self._tail)
        self._note_refreshed()
        held = timeline.total - max(archive.sealed, timeline.first)
        assert held + count <= self._tail, (held, count, self._tail)
        archive.drop(timeline.first)
        self.columns.drop(timeline.first)

    def _await_files(self) -> None:
        """Wait for the segments that are being written."""
        if self.archive is not None:
            with self._lock:
                self.archive.await_sealed(self.columns, most=0)
                self._note_refreshed()

    def _note_refreshed(self) -> None:
        assert self.archive is not None
        if self.exact_extras:
            self._changed |= self.archive.refreshed
        self.archive.refreshed.clear()

    def _gather(self, ids: np.ndarray, batch: dict[str, np.ndarray]) -> None:
        wanted = {k: s.shape for k, s in self.spaces.items() if k in batch}
        targets = {k: batch[k].reshape(-1, *shape) for k, shape in wanted.items()}
        self.columns.gather(ids.reshape(-1), targets)
        batch["stepid"][:] = ids

    def _assemble(
        self, cursor: Cursor, ids: np.ndarray, batch: dict[str, np.ndarray]
    ) -> None:
        """Gather the piece each row is at, and mend its flags."""
        window, piece = cursor.window, cursor.piece
        width = window.context + window.length
        if window.consec == 1:
            part, beyond = ids, None
        else:
            columns = piece[:, None] * window.length + np.arange(width)
            part = np.take_along_axis(ids, columns, 1)
            after = np.minimum(columns[:, -1:] + 1, window.span - 1)
            beyond = np.take_along_axis(ids, after, 1)
        self._gather(part, batch)
        batch["consec"][:] = piece[:, None]
        first, last = batch["is_first"], batch["is_last"]
        last[:, :-1] |= first[:, 1:]  # an episode that was abandoned ends there too
        if beyond is not None:
            row = np.empty((window.batch,), first.dtype)
            self.columns.gather(beyond.reshape(-1), {"is_first": row})
            last[:, -1] |= row & (piece < window.consec - 1)
        first[piece == 0, 0] = True


def _check_capacity(
    config: ReplayConfig, streams: int, windows: dict[str, Window]
) -> int:
    """Room for one window at least, which the configured capacity must allow."""
    widest = max((window.span for window in windows.values()), default=1)
    needed = max((widest - 1) * streams + 1, streams)
    if config.capacity < needed:
        raise UserError(
            f"A replay of {config.capacity} steps from {streams} environments never "
            f"holds a window of {widest} steps.\n"
            f"  Fix: --replay.capacity {needed} or more."
        )
    return needed


def _signature(spaces: Spaces) -> dict[str, str]:
    return {k: f"{s.dtype.name} {list(s.shape)}" for k, s in sorted(spaces.items())}


def _check_signature(saved: dict[str, str], spaces: Spaces) -> None:
    mine = _signature(spaces)
    keys = sorted({*saved, *mine})
    other = [k for k in keys if saved.get(k, "nothing") != mine.get(k, "nothing")]
    if other:
        listed = "; ".join(
            f"{k}: {saved.get(k, 'nothing')}, now {mine.get(k, 'nothing')}"
            for k in other[:4]
        )
        raise UserError(
            f"The saved replay holds other data than this run ({listed}).\n"
            "  Fix: use the settings it was recorded with, or a new --logdir."
        )
