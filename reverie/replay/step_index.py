"""Index of the stored steps: their order and neighbors, without their values.

Every step has an id (0, 1, 2, ... in the order of arrival) and is stored in row
`id % capacity` of a ring buffer. Environments add steps in turns, so each step also has
a *stream* (an uninterrupted sequence of steps of one environment) and a position in it.
A window of `span` steps is a start id and the steps that follow it in the same stream.
It may cross episode boundaries but not gaps in the data.

The oldest steps are evicted first: the live (stored) ids are `[first, total)`, except
for gaps left by files that could not be read.
"""

from __future__ import annotations

import numpy as np

from reverie.api import StateDict


class StepIndex:
    """Stream, position and neighbors of each live step."""

    def __init__(self, capacity: int, num_envs: int) -> None:
        self.capacity = capacity
        self.first = 0  # id of the oldest live step
        self.total = 0  # id of the next step
        # Per row of the ring buffer.
        self.stream = np.full(capacity, -1, np.int32)  # -1: never written or lost
        self.position = np.zeros(capacity, np.int64)
        self.next_offset = np.zeros(capacity, np.int32)  # to the next id; 0: none yet
        self.prev_offset = np.zeros(capacity, np.int32)  # to the previous; 0: none
        # Per environment: the stream it adds to.
        self.env_stream = np.arange(num_envs, dtype=np.int64)
        # Per stream: live positions [begin, end), and the id of the newest step.
        self.stream_begin = np.zeros(num_envs, np.int64)
        self.stream_end = np.zeros(num_envs, np.int64)
        self.stream_last = np.full(num_envs, -1, np.int64)

    def __len__(self) -> int:
        """Number of live steps."""
        return int((self.stream_end - self.stream_begin).sum())

    @property
    def num_streams(self) -> int:
        """Number of streams with live steps."""
        return int((self.stream_end > self.stream_begin).sum())

    def new_stream(self, env: int | None = None) -> None:
        """Start a new stream for this environment, or for all of them."""
        for i in range(len(self.env_stream)) if env is None else (env,):
            self.env_stream[i] = self.create_stream()

    def create_stream(self) -> int:
        """Create a stream that belongs to no environment; return its number."""
        self.stream_begin = np.append(self.stream_begin, 0)
        self.stream_end = np.append(self.stream_end, 0)
        self.stream_last = np.append(self.stream_last, -1)
        return len(self.stream_end) - 1

    def add(self, envs: np.ndarray | None = None) -> np.ndarray:
        """Append one step of each of these environments (default: all); return ids."""
        streams = self.env_stream if envs is None else self.env_stream[envs]
        ids, rows = self._allocate(len(streams))
        previous = self.stream_last[streams]
        offset = ids - previous
        is_live = previous >= self.first
        offset[~is_live] = 0
        self.stream[rows] = streams
        self.position[rows] = self.stream_end[streams]
        self.next_offset[rows] = 0
        self.prev_offset[rows] = offset
        self.next_offset[previous[is_live] % self.capacity] = offset[is_live]
        self.stream_last[streams] = ids
        self.stream_end[streams] += 1
        return ids

    def add_sequence(self, stream: int, count: int) -> np.ndarray:
        """Append `count` consecutive steps to one stream; return their ids."""
        assert count > 0
        ids, rows = self._allocate(count)
        previous = self.stream_last[stream]
        offset = ids[0] - previous if previous >= self.first else 0
        self.stream[rows] = stream
        self.position[rows] = self.stream_end[stream] + np.arange(count)
        self.next_offset[rows] = np.append(np.ones(count - 1), 0)
        self.prev_offset[rows] = np.append(offset, np.ones(count - 1))
        if offset:
            self.next_offset[previous % self.capacity] = offset
        self.stream_last[stream] = ids[-1]
        self.stream_end[stream] += count
        return ids

    def num_windows(self, span: int) -> int:
        """Number of windows of `span` steps that are completely stored."""
        lengths = self.stream_end - self.stream_begin
        return int(np.maximum(lengths - span + 1, 0).sum())

    def is_live(self, ids: np.ndarray) -> np.ndarray:
        """True for each step that is stored."""
        in_range = (ids >= self.first) & (ids < self.total)
        return in_range & (self.stream[ids % self.capacity] >= 0)

    def has_window(self, ids: np.ndarray, span: int) -> np.ndarray:
        """True for each step whose window of `span` steps is completely stored."""
        rows = ids % self.capacity
        streams = self.stream[rows]
        fits = self.position[rows] + span <= self.stream_end[streams]
        return fits & (streams >= 0) & (ids >= self.first) & (ids < self.total)

    def window_starts(self, span: int) -> np.ndarray:
        """Start ids of all complete windows, oldest first; takes time O(live steps)."""
        ids = np.arange(self.first, self.total)
        return ids[self.has_window(ids, span)]

    def window_ids(self, starts: np.ndarray, span: int) -> np.ndarray:
        """Ids of the complete windows at `starts`: (B,) -> (B, span)."""
        if span == 1:
            return starts[:, None].copy()
        # If all environments step together, the ids of a window are evenly spaced.
        # Assume this, then follow the links step by step where it is wrong.
        stride = self.next_offset[starts % self.capacity]
        ids: np.ndarray = starts[:, None] + stride[:, None] * np.arange(span)
        even = self.next_offset[ids[:, :-1] % self.capacity] == stride[:, None]
        uneven = np.flatnonzero(~even.all(1))
        if len(uneven):
            current = starts[uneven]
            for t in range(span):
                ids[uneven, t] = current
                current = current + self.next_offset[current % self.capacity]
        return ids

    def ids_at(self, starts: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Ids of the steps `offsets` after each start: (B,), (B, T) -> (B, T).

        All of them must be stored, in the stream of their start. As in `window_ids`,
        the ids are first computed as if they were evenly spaced.
        """
        rows = starts % self.capacity
        stride = self.next_offset[rows].astype(np.int64)[:, None]
        ids: np.ndarray = starts[:, None] + stride * offsets
        guess = ids % self.capacity
        correct = self.stream[guess] == self.stream[rows][:, None]
        correct &= self.position[guess] == self.position[rows][:, None] + offsets
        for i in np.flatnonzero(~correct.all(1)):
            current, offset = int(starts[i]), 0
            for t in np.argsort(offsets[i], kind="stable"):
                while offset < offsets[i, t]:
                    current += int(self.next_offset[current % self.capacity])
                    offset += 1
                ids[i, t] = current
        return ids

    def predecessors(self, ids: np.ndarray, steps: int) -> np.ndarray:
        """Return all live steps up to `steps` before one of `ids` in its stream."""
        result = []
        current = ids
        for _ in range(steps):
            offset = self.prev_offset[current % self.capacity]
            current = (current - offset)[offset > 0]
            current = current[current >= self.first]
            if not len(current):
                break
            result.append(current)
        return np.concatenate(result) if result else ids[:0]

    def state_dict(self) -> StateDict:
        """Return the state without arrays per step, which are in the segment files."""
        return {
            "first": self.first,
            "total": self.total,
            "env_stream": self.env_stream.copy(),
            "stream_end": self.stream_end.copy(),
            "stream_last": self.stream_last.copy(),
        }

    def restore(
        self,
        state: StateDict,
        ids: np.ndarray,
        stream: np.ndarray,
        position: np.ndarray,
    ) -> None:
        """Load a state, and the steps `ids` that could be read from files.

        If steps of a stream are missing, the part before the gap becomes a stream of
        its own, so that no window crosses the gap. Raises `ValueError` if the state
        does not fit the steps.
        """
        self.total = int(state["total"])
        self.first = max(int(state["first"]), self.total - self.capacity)
        self.stream_end = np.array(state["stream_end"], np.int64)
        self.stream_last = np.array(state["stream_last"], np.int64)
        env_stream = np.array(state["env_stream"], np.int64)
        is_flat = self.stream_end.ndim == self.stream_last.ndim == env_stream.ndim == 1
        if not is_flat or (stream < 0).any() or (env_stream < 0).any():
            raise ValueError("the index of the replay is damaged")
        order = np.lexsort((position, stream))
        ids, stream, position = ids[order], stream[order].copy(), position[order]
        joined = (stream[1:] == stream[:-1]) & (position[1:] == position[:-1] + 1)
        # Divide the streams into parts without gaps; the last part of a stream keeps
        # the number of the stream.
        begins_part = np.append(True, ~joined) if len(ids) else np.zeros(0, bool)
        starts = np.flatnonzero(begins_part)
        stops = np.append(starts[1:], len(ids))[: len(starts)]
        before_gap = self.stream_last[stream[starts]] != ids[stops - 1]
        for start, stop in zip(starts[before_gap], stops[before_gap], strict=True):
            stream[start:stop] = len(self.stream_end)
            self.stream_end = np.append(self.stream_end, position[stop - 1] + 1)
            self.stream_last = np.append(self.stream_last, ids[stop - 1])
        if (self.stream_end[stream[starts]] != position[stops - 1] + 1).any():
            raise ValueError("the replay has streams of another length than its index")
        self.stream_begin = self.stream_end.copy()  # empty without live steps
        self.stream_begin[stream[starts]] = position[starts]
        self.stream[:] = -1
        rows = ids % self.capacity
        self.stream[rows] = stream
        self.position[rows] = position
        offset = np.where(joined, np.diff(ids), 0)
        self.next_offset[rows] = np.append(offset, 0)[: len(ids)]
        self.prev_offset[rows] = np.insert(offset, 0, 0)[: len(ids)]
        if len(env_stream) == len(self.env_stream):
            self.env_stream = env_stream
            last = self.stream_last[env_stream]
            lost = (last >= self.first) & ~self.is_live(last)
            for env in np.flatnonzero(lost):
                self.new_stream(int(env))
        else:  # the number of environments has changed
            self.new_stream()

    def _allocate(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and rows for new steps, after evicting the steps in these rows."""
        assert count <= self.capacity, (count, self.capacity)
        self._evict(self.total + count - self.capacity)
        ids = np.arange(self.total, self.total + count)
        self.total += count
        return ids, ids % self.capacity

    def _evict(self, first: int) -> None:
        """Evict all steps before the id `first`."""
        if first <= self.first:
            return
        rows = np.arange(self.first, first) % self.capacity
        streams = self.stream[rows]
        stored = streams >= 0
        if not stored.all():
            rows, streams = rows[stored], streams[stored]
        # If a stream occurs several times, its newest step is assigned last.
        self.stream_begin[streams] = self.position[rows] + 1
        self.first = first
