"""Who follows whom: the order of stored steps, apart from what they hold.

Every stored step has a global id, 0, 1, 2, ... in the order of arrival, and lives in
row `id % capacity` of a ring. Steps of several environments arrive interleaved, so each
step also knows its *stream* (an unbroken run of steps of one environment) and its
position in it. A window is a start id and the steps that follow it in the same stream;
it may cross the ends of episodes but never the end of a stream, so experience that was
never lived in a row is never glued together.

Eviction is exact and by age: the live ids are `[first, total)`, minus the holes that a
lost file may have left.
"""

from __future__ import annotations

import numpy as np

from reverie.api import StateDict


class Timeline:
    """Stream and position of each live step, and how to walk from one to the next."""

    def __init__(self, capacity: int, slots: int) -> None:
        self.capacity = capacity
        self.first = 0
        self.total = 0
        self.stream = np.full(capacity, -1, np.int32)  # -1: never written, or a hole
        self.position = np.zeros(capacity, np.int64)
        self.ahead = np.zeros(capacity, np.int32)  # ids to the next step; 0: none yet
        self.behind = np.zeros(capacity, np.int32)
        self.slots = np.arange(slots, dtype=np.int64)  # the stream each slot writes to
        self.begin = np.zeros(slots, np.int64)  # live positions of a stream: from ...
        self.end = np.zeros(slots, np.int64)  # ... up to, not including
        self.last = np.full(slots, -1, np.int64)  # newest id of a stream

    def __len__(self) -> int:
        return int((self.end - self.begin).sum())

    @property
    def streams(self) -> int:
        """How many streams still have live steps."""
        return int((self.end > self.begin).sum())

    def new_stream(self, slot: int | None = None) -> None:
        """What this slot (or every slot) adds from now on follows nothing stored."""
        for chosen in range(len(self.slots)) if slot is None else (slot,):
            self.slots[chosen] = self.open_stream()

    def add(self, slots: np.ndarray | None = None) -> np.ndarray:
        """Append one step for each slot (all of them by default); returns their ids."""
        streams = self.slots if slots is None else self.slots[slots]
        count = len(streams)
        assert count <= self.capacity, (count, self.capacity)
        self._evict(self.total + count - self.capacity)
        ids = np.arange(self.total, self.total + count)
        rows = ids % self.capacity
        before = self.last[streams]
        step = ids - before
        known = before >= self.first
        if not known.all():
            step = np.where(known, step, 0)
            before, ahead = before[known], step[known]
        else:
            ahead = step
        self.stream[rows] = streams
        self.position[rows] = self.end[streams]
        self.ahead[rows] = 0
        self.behind[rows] = step
        self.ahead[before % self.capacity] = ahead
        self.last[streams] = ids
        self.end[streams] += 1
        self.total += count
        return ids

    def add_run(self, stream: int, count: int) -> np.ndarray:
        """Append this many steps in a row to one stream; returns their ids."""
        assert 0 < count <= self.capacity, (count, self.capacity)
        self._evict(self.total + count - self.capacity)
        ids = np.arange(self.total, self.total + count)
        rows = ids % self.capacity
        before = self.last[stream]
        step = ids[0] - before if before >= self.first else 0
        self.stream[rows] = stream
        self.position[rows] = self.end[stream] + np.arange(count)
        self.ahead[rows] = np.append(np.ones(count - 1), 0)
        self.behind[rows] = np.append(step, np.ones(count - 1))
        if step:
            self.ahead[before % self.capacity] = step
        self.last[stream] = ids[-1]
        self.end[stream] += count
        self.total += count
        return ids

    def open_stream(self) -> int:
        """A stream no slot writes to."""
        self.begin = np.append(self.begin, 0)
        self.end = np.append(self.end, 0)
        self.last = np.append(self.last, -1)
        return len(self.end) - 1

    def _evict(self, first: int) -> None:
        if first <= self.first:
            return
        rows = np.arange(self.first, first) % self.capacity
        streams = self.stream[rows]
        held = streams >= 0
        if not held.all():
            rows, streams = rows[held], streams[held]
        # ids ascend, so of several steps of one stream the newest wins
        self.begin[streams] = self.position[rows] + 1
        self.first = first

    def count(self, span: int) -> int:
        """How many windows of this many steps are stored whole."""
        return int(np.maximum(self.end - self.begin - span + 1, 0).sum())

    def live(self, ids: np.ndarray) -> np.ndarray:
        inside = (ids >= self.first) & (ids < self.total)
        return inside & (self.stream[ids % self.capacity] >= 0)

    def whole(self, ids: np.ndarray, span: int) -> np.ndarray:
        """Whether the window that starts at each id is stored whole."""
        rows = ids % self.capacity
        streams = self.stream[rows]
        fits = self.position[rows] + span <= self.end[streams]
        return fits & (streams >= 0) & (ids >= self.first) & (ids < self.total)

    def starts(self, span: int) -> np.ndarray:
        """The start of every whole window, oldest first. Reads all live steps."""
        ids = np.arange(self.first, self.total)
        return ids[self.whole(ids, span)]

    def walk(self, starts: np.ndarray, span: int) -> np.ndarray:
        """Ids of the windows at `starts`, which must be whole: (B,) -> (B, span)."""
        if span == 1:
            return starts[:, None].copy()
        # Environments in lockstep are evenly spaced: guess, check, walk only the rest.
        stride = self.ahead[starts % self.capacity]
        ids: np.ndarray = starts[:, None] + stride[:, None] * np.arange(span)
        even = self.ahead[ids[:, :-1] % self.capacity] == stride[:, None]
        rest = np.flatnonzero(~even.all(1))
        if len(rest):
            at = starts[rest]
            for t in range(span):
                ids[rest, t] = at
                at = at + self.ahead[at % self.capacity]
        return ids

    def locate(self, starts: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Ids of the steps this far behind each start: (B,), (B, T) -> (B, T).

        All of them must be stored, in one stream with their start.
        """
        rows = starts % self.capacity
        stride = self.ahead[rows].astype(np.int64)[:, None]
        ids: np.ndarray = starts[:, None] + stride * offsets
        at = ids % self.capacity
        right = self.stream[at] == self.stream[rows][:, None]
        right &= self.position[at] == self.position[rows][:, None] + offsets
        for row in np.flatnonzero(~right.all(1)):
            step, behind = int(starts[row]), 0
            for t in np.argsort(offsets[row], kind="stable"):
                while behind < offsets[row, t]:
                    step += int(self.ahead[step % self.capacity])
                    behind += 1
                ids[row, t] = step
        return ids

    def predecessors(self, ids: np.ndarray, steps: int) -> np.ndarray:
        """Every live step at most `steps` before one of `ids` in its stream."""
        found = []
        at = ids
        for _ in range(steps):
            step = self.behind[at % self.capacity]
            at = (at - step)[step > 0]
            at = at[at >= self.first]
            if not len(at):
                break
            found.append(at)
        return np.concatenate(found) if found else ids[:0]

    def state_dict(self) -> StateDict:
        """Everything but the steps themselves, which know their stream and position."""
        return {
            "first": self.first,
            "total": self.total,
            "slots": self.slots.copy(),
            "end": self.end.copy(),
            "last": self.last.copy(),
        }

    def restore(
        self,
        state: StateDict,
        ids: np.ndarray,
        stream: np.ndarray,
        position: np.ndarray,
    ) -> None:
        """Become what `state_dict` described, with the steps that could be loaded.

        Where steps of a stream are missing, what is left of it before the hole becomes
        a closed stream of its own, so no window crosses.
        """
        self.total = int(state["total"])
        self.first = max(int(state["first"]), self.total - self.capacity)
        self.end = np.array(state["end"], np.int64)
        self.last = np.array(state["last"], np.int64)
        slots = np.array(state["slots"], np.int64)
        order = np.lexsort((position, stream))
        ids, stream, position = ids[order], stream[order].copy(), position[order]
        joined = (stream[1:] == stream[:-1]) & (position[1:] == position[:-1] + 1)
        edges = np.append(True, ~joined) if len(ids) else np.zeros(0, bool)
        heads = np.flatnonzero(edges)
        stops = np.append(heads[1:], len(ids))[: len(heads)]
        broken = self.last[stream[heads]] != ids[stops - 1]
        for head, stop in zip(heads[broken], stops[broken], strict=True):
            stream[head:stop] = len(self.end)
            self.end = np.append(self.end, position[stop - 1] + 1)
            self.last = np.append(self.last, ids[stop - 1])
        self.begin = self.end.copy()  # a stream without live steps is empty
        self.begin[stream[heads]] = position[heads]
        self.stream[:] = -1
        rows = ids % self.capacity
        self.stream[rows] = stream
        self.position[rows] = position
        step = np.where(joined, np.diff(ids), 0)
        self.ahead[rows] = np.append(step, 0)[: len(ids)]
        self.behind[rows] = np.insert(step, 0, 0)[: len(ids)]
        if len(slots) == len(self.slots):
            self.slots = slots
            lost = (self.last[slots] >= self.first) & ~self.live(self.last[slots])
            for slot in np.flatnonzero(lost):
                self.new_stream(int(slot))
        else:  # another number of environments than before
            self.new_stream()
