"""The replay: what was lived, kept in a ring of fixed capacity and cut into windows.

`add` takes one row per environment; `sample` cuts a batch for one window of the diet.
Several windows of different spans can be cut from the same steps. Rows are named by a
step id (`timeline.py`), by which notes and priorities are written back.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from reverie.api import Metrics, Spaces, StateDict, UserError, Window
from reverie.data.columns import Columns, RamColumns
from reverie.data.sampling import Selector, Uniform
from reverie.data.timeline import Timeline


@dataclass(frozen=True)
class ReplayConfig:
    """How much experience is kept, where, and how it is chosen for training."""

    capacity: int = 5_000_000
    """Steps kept; the oldest make room for new ones."""

    storage: Literal["auto", "ram", "disk"] = "auto"
    """Where they are kept: in memory if they fit, else on disk (auto)."""

    online: bool = True
    """Serve every fresh step once before sampling old ones."""


@dataclass
class Cursor:
    """Where the batches of one window stand."""

    window: Window
    selector: Selector
    rng: np.random.Generator
    starts: np.ndarray
    piece: np.ndarray  # which of the `consec` pieces each row serves next
    queue: deque[int] = field(default_factory=deque)  # online windows not yet served
    pending: dict[int, int] = field(default_factory=dict)  # stream -> online start


class Replay:
    """Stores steps, cuts batches, takes back notes and priorities; see the module."""

    def __init__(
        self,
        spaces: Spaces,
        notes: Spaces,
        config: ReplayConfig,
        *,
        capacity: int,
        streams: int,
        windows: dict[str, Window],
        directory: Path | None,
        seed: int,
        exact_notes: bool = False,
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.windows = windows
        self.spaces = {
            key: space
            for key, space in {**spaces, **notes}.items()
            if not key.startswith("log/")
        }
        self.notes = notes
        widest = max((w.span for w in windows.values()), default=1)
        needed = (widest - 1) * streams + 1
        if capacity < needed:
            raise UserError(
                f"A replay of {capacity} steps from {streams} environments never holds "
                f"a window of {widest} steps.\n"
                f"  Fix: --replay.capacity {needed} or more."
            )
        self.timeline = Timeline(capacity, streams)
        self.columns: Columns = RamColumns(self.spaces, capacity)
        self._cursors = {
            name: Cursor(
                window=window,
                selector=Uniform(self.timeline, window.span),
                rng=np.random.default_rng([seed, zlib.crc32(name.encode())]),
                starts=np.zeros(window.batch, np.int64),
                piece=np.full(window.batch, window.consec, np.int64),
            )
            for name, window in windows.items()
        }
        self._online = [
            cursor
            for cursor in self._cursors.values()
            if config.online and cursor.window.online
        ]
        self._inserts = self._samples = self._updates = self._replayed = 0
        self._lock = threading.RLock()

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
            ids = self.timeline.add(streams)
            self.columns.write(int(ids[0]), rows)
            self._inserts += count
            for cursor in self._online:
                self._enqueue(cursor, ids)
        return ids

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
            spread = (window.span - 1) * len(self.timeline.slots)
            return len(self) >= min(
                window.batch * window.length, self.capacity
            ) and self.items(name) >= min(window.batch, self.capacity - spread)

    def sample(
        self, name: str, out: dict[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Cut the next batch of this kind: every key as (B, context + length, ...).

        Fills and returns `out` where given (arrays as `buffers` makes them).
        """
        batch = self.buffers(name) if out is None else out
        cursor = self._cursors[name]
        window = cursor.window
        with self._lock:
            fresh = cursor.piece >= window.consec
            if window.consec > 1:
                fresh |= ~self.timeline.live(cursor.starts)
            if fresh.any():
                cursor.starts[fresh] = self._choose(cursor, int(fresh.sum()))
                cursor.piece[fresh] = 0
            ids = self.timeline.walk(cursor.starts, window.span)
            self._assemble(cursor, ids, batch)
            cursor.piece += 1
            self._samples += window.batch
            self._replayed += window.batch * window.length
        return batch

    def buffers(self, name: str) -> dict[str, np.ndarray]:
        """Empty arrays for one batch of this kind."""
        window = self.windows[name]
        shape = (window.batch, window.context + window.length)
        batch = {
            k: np.empty((*shape, *s.shape), s.dtype) for k, s in self.spaces.items()
        }
        batch["stepid"] = np.empty(shape, np.int64)
        batch["consec"] = np.empty(shape, np.int64)
        return batch

    def update(self, stepid: np.ndarray, notes: dict[str, np.ndarray]) -> None:
        """Write fresher notes for these steps; evicted ones are passed over."""
        with self._lock:
            ids = stepid.reshape(-1)
            live = self.timeline.live(ids)
            self._updates += int(live.sum())
            for key, value in notes.items():
                space = self.notes[key]
                flat = value.reshape(-1, *space.shape)
                assert flat.dtype == space.dtype and len(flat) == len(ids), (  # noqa: PT018
                    f"note {key!r} is {value.dtype} {value.shape}, "
                    f"wanted {space.dtype} {(*stepid.shape, *space.shape)}"
                )
                if live.all():
                    self.columns.scatter(key, ids, flat)
                else:
                    self.columns.scatter(key, ids[live], flat[live])

    def prioritize(self, stepid: np.ndarray, priority: np.ndarray) -> None:
        """Say how much these steps deserve to be replayed."""

    def save(self) -> StateDict:
        raise NotImplementedError

    def load(self, state: StateDict) -> None:
        raise NotImplementedError

    def collect(self, kept: list[StateDict]) -> None:
        raise NotImplementedError

    def metrics(self) -> Metrics:
        """Counts since the last call, and how much is stored."""
        with self._lock:
            inserts, replayed = self._inserts, self._replayed
            found: Metrics = {
                "items": max((self.items(name) for name in self.windows), default=0),
                "steps": len(self),
                "streams": self.timeline.streams,
                "ram_gb": self.columns.ram_bytes / 1e9,
                "disk_gb": self.columns.disk_bytes / 1e9,
                "inserts": inserts,
                "samples": self._samples,
                "updates": self._updates,
                "replay_ratio": replayed / inserts if inserts else np.nan,
                "online": sum(len(cursor.queue) for cursor in self._online),
            }
            self._inserts = self._samples = self._updates = self._replayed = 0
            return found

    def _enqueue(self, cursor: Cursor, ids: np.ndarray) -> None:
        """Note which online windows begin or are completed by these steps."""
        span = cursor.window.span
        rows = ids % self.capacity
        phase = self.timeline.position[rows] % span
        streams = self.timeline.stream[rows]
        for i in np.flatnonzero(phase == 0):
            cursor.pending[int(streams[i])] = int(ids[i])
        for i in np.flatnonzero(phase == span - 1):
            start = cursor.pending.pop(int(streams[i]), -1)
            if start >= self.timeline.first:
                cursor.queue.append(start)
        while cursor.queue and cursor.queue[0] < self.timeline.first:
            cursor.queue.popleft()

    def _choose(self, cursor: Cursor, count: int) -> np.ndarray:
        starts: list[int] = []
        while cursor.queue and len(starts) < count:
            start = cursor.queue.popleft()
            if start >= self.timeline.first:
                starts.append(start)
        rest = count - len(starts)
        drawn = np.array(starts, np.int64)
        if rest:
            drawn = np.append(drawn, cursor.selector.draw(rest, cursor.rng))
        return drawn

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
        flat = part.reshape(-1)
        for key in self.spaces:
            out = batch[key]
            self.columns.gather(key, flat, out.reshape(-1, *out.shape[2:]))
        batch["stepid"][:] = part
        batch["consec"][:] = piece[:, None]
        first, last = batch["is_first"], batch["is_last"]
        last[:, :-1] |= first[:, 1:]  # an episode that was abandoned ends there too
        if beyond is not None:
            row = np.empty((window.batch,), first.dtype)
            self.columns.gather("is_first", beyond.reshape(-1), row)
            last[:, -1] |= row & (piece < window.consec - 1)
        first[piece == 0, 0] = True
