"""Sequences by episode: the seldom served first, cut anywhere, even over the edge.

`Episodes` knows which stored rows belong together. A `Cutter` chooses among them for
one window: episodes in proportion to `(1 + n) ** -alpha`, where n counts how often they
were served, whatever their length. An episode of R rows has R - 1 transitions: the last
row has no outcome, as the episode is over or its next row is still to come.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

from reverie.api import StateDict, UserError
from reverie.replay.timeline import Timeline
from reverie.rows import Window
from reverie.storage.episode_windows import episode_probabilities, window_start


class Episodes:
    """Where each stored episode begins, and how many rows of it are stored.

    Episodes are numbered in the order they began. One that loses its first rows to age
    goes on with the rest; one that lost all has none until the older ones are gone too.
    """

    FIELDS = ("begin", "rows", "stream", "position")

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.clear()

    def clear(self) -> None:
        self.dropped = 0  # episodes that were listed once, all before the first here
        self._size = 0
        self._table = {name: np.zeros(64, np.int64) for name in self.FIELDS}
        self._open: dict[int, int] = {}  # stream -> index of its newest episode
        self._seen = self.timeline.first

    def __len__(self) -> int:
        return self._size

    @property
    def begin(self) -> Int[np.ndarray, " episodes"]:
        """The id of each episode's first live row."""
        return self._table["begin"][: self._size]

    @property
    def rows(self) -> Int[np.ndarray, " episodes"]:
        return self._table["rows"][: self._size]

    @property
    def transitions(self) -> Int[np.ndarray, " episodes"]:
        """How many steps of each episode have a known outcome."""
        return np.maximum(self.rows - 1, 0)

    def add(self, ids: np.ndarray, is_first: np.ndarray) -> None:
        """Take note of stored rows; `is_first` marks those that begin an episode."""
        streams = self.timeline.stream[ids % self.timeline.capacity]
        for step, stream, first in zip(
            ids.tolist(), streams.tolist(), is_first.tolist(), strict=True
        ):
            index = self._open.get(stream)
            rows = self._table["rows"]
            if first or index is None or not rows[index]:  # none of its rows is left
                self._append(step, 1)
            else:
                rows[index] += 1

    def follow(self) -> None:
        """Let go of rows that were evicted."""
        timeline, oldest = self.timeline, self.timeline.first
        if oldest == self._seen:
            return
        self._seen = oldest
        begin, rows, stream, position = (
            self._table[name][: self._size] for name in self.FIELDS
        )
        for i in np.flatnonzero((begin < oldest) & (rows > 0)).tolist():
            lost = min(int(timeline.begin[stream[i]] - position[i]), int(rows[i]))
            position[i] += lost
            rows[i] -= lost
            begin[i] = _oldest_of(timeline, int(stream[i])) if rows[i] else -1
        drop = self._size if not rows.any() else int(np.argmax(rows > 0))
        if drop:
            self.dropped += drop
            self._size -= drop
            for column in self._table.values():
                column[: self._size] = column[drop : drop + self._size]
            self._open = {s: i - drop for s, i in self._open.items() if i >= drop}

    def rebuild(self, ids: np.ndarray, is_first: np.ndarray, like: StateDict) -> None:
        """List the episodes of all live rows anew, in the order they had in `like`."""
        self.clear()
        timeline = self.timeline
        rows = ids % timeline.capacity
        order = np.lexsort((timeline.position[rows], timeline.stream[rows]))
        ids, rows, heads = ids[order], rows[order], is_first[order].copy()
        heads |= timeline.behind[rows] == 0
        at = np.flatnonzero(heads)
        counts = np.diff(np.append(at, len(ids)))
        known = {step: i for i, step in enumerate(np.asarray(like["begin"]).tolist())}
        found = sorted(
            (known.get(int(step), len(known)), int(step), int(count))
            for step, count in zip(ids[at], counts, strict=True)
        )
        newest: dict[int, tuple[int, int]] = {}
        for _, step, count in found:
            self._append(step, count)
            stream = int(timeline.stream[step % timeline.capacity])
            if step >= newest.get(stream, (-1, 0))[0]:
                newest[stream] = (step, self._size - 1)
        self._open = {stream: index for stream, (_, index) in newest.items()}

    def state_dict(self) -> StateDict:
        self.follow()
        return {"begin": self.begin[self.rows > 0].copy()}

    def _append(self, step: int, rows: int) -> None:
        if self._size == len(self._table["begin"]):
            for name, column in self._table.items():
                self._table[name] = np.append(column, np.zeros_like(column))
        row = step % self.timeline.capacity
        stream = int(self.timeline.stream[row])
        values = (step, rows, stream, int(self.timeline.position[row]))
        for name, value in zip(self.FIELDS, values, strict=True):
            self._table[name][self._size] = value
        self._open[stream] = self._size
        self._size += 1


class Cutter:
    """Chooses the sequences of one window, and counts how often episodes were used."""

    def __init__(self, episodes: Episodes, window: Window) -> None:
        self.episodes, self.window = episodes, window
        self.counting = False
        self._dropped = episodes.dropped
        self._counts = np.zeros(len(episodes), np.int64)

    @property
    def counts(self) -> Int[np.ndarray, " episodes"]:
        """How often each listed episode was served while that counted."""
        episodes = self.episodes
        episodes.follow()
        gone, self._dropped = episodes.dropped - self._dropped, episodes.dropped
        self._counts = self._counts[gone:]
        new = len(episodes) - len(self._counts)
        if new:
            self._counts = np.append(self._counts, np.zeros(new, np.int64))
        return self._counts

    @property
    def can_cut(self) -> bool:
        """Whether any transition is stored; the last one may be evicted again."""
        self.episodes.follow()
        return bool(self.episodes.rows.max(initial=0) > 1)

    def cut(
        self, rng: np.random.Generator
    ) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
        """The ids of the next batch, and which of its rows are in the episode."""
        if not self.can_cut:
            raise UserError(
                f"The replay holds {int(self.episodes.rows.sum())} steps, and none has "
                "a next one in its episode.\n  Fix: check that only the first step of "
                "an episode has is_first, or give the replay more --replay.capacity."
            )
        window, counts = self.window, self.counts
        able = np.flatnonzero(self.episodes.transitions)
        chance = np.cumsum(episode_probabilities(counts[able], window.alpha))
        point = rng.random(window.batch) * chance[-1]
        found = np.searchsorted(chance, point, "right")
        chosen = able[np.minimum(found, len(able) - 1)]
        rows = self.episodes.rows[chosen]
        step = rng.integers(0, rows - 1)
        offset = rng.integers(0, window.length - 1, window.batch)
        start = window_start(step, offset, rows - 1, window.length - 1, window.pad)
        at = start[:, None] + np.arange(window.length)
        inside = (at >= 0) & (at < rows[:, None])
        at = np.clip(at, 0, rows[:, None] - 1)
        if self.counting:
            np.add.at(counts, chosen, 1)
        return self.episodes.timeline.locate(self.episodes.begin[chosen], at), inside

    def state_dict(self) -> StateDict:
        counts = self.counts  # which also lets go of what is gone
        alive = self.episodes.rows > 0
        return {"counting": self.counting, "counts": counts[alive]}

    def load_state_dict(self, state: StateDict, like: StateDict) -> None:
        """Take over counts; `like` says of which episodes they are."""
        self.counting = bool(state["counting"])
        self._dropped = self.episodes.dropped
        saved = zip(
            np.asarray(like["begin"]).tolist(),
            np.asarray(state["counts"]).tolist(),
            strict=True,
        )
        known = dict(saved)
        begin = self.episodes.begin.tolist()
        self._counts = np.array([known.get(step, 0) for step in begin], np.int64)


def _oldest_of(timeline: Timeline, stream: int) -> int:
    """The id of a stream's first live row, which is among the oldest of all."""
    width, first = 64, timeline.first
    while True:
        ids = np.arange(first, min(first + width, timeline.total))
        found = np.flatnonzero(timeline.stream[ids % timeline.capacity] == stream)
        if len(found):
            return int(ids[found[0]])
        assert len(ids) == width, f"stream {stream} has no live rows"
        first, width = first + width, 4 * width
