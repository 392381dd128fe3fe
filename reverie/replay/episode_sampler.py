"""Samples an episode first, then a sequence of it, as Δ-IRIS does.

`EpisodeIndex` lists the stored episodes. `EpisodeSampler` samples an episode with
probability proportional to `(1 + n) ** -alpha`, where n is the number of times it was
sampled before; the length of the episode has no influence. It then samples a sequence
around a random transition. An episode of R rows has R - 1 transitions.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

from reverie.api import StateDict, UserError
from reverie.replay.step_index import StepIndex
from reverie.rows import Window
from reverie.storage.episode_windows import episode_probabilities, window_start


class EpisodeIndex:
    """First row and number of stored rows of each episode.

    Episodes are listed in the order in which they began. An episode whose first rows
    are evicted becomes shorter. An episode without rows is removed from the list when
    all older episodes are removed.
    """

    # Of each episode: id of its first live row, number of live rows, number of its
    # stream, and position of its first live row in the stream.
    FIELDS = ("begin", "rows", "stream", "position")

    def __init__(self, index: StepIndex) -> None:
        self.index = index
        self.clear()

    def clear(self) -> None:
        self.num_removed = 0  # episodes that were removed from the front of the list
        self._size = 0
        self._table = np.zeros(64, [(name, np.int64) for name in self.FIELDS])
        self._newest: dict[int, int] = {}  # stream -> table index of its last episode
        self._first = self.index.first  # oldest live step at the last eviction

    def __len__(self) -> int:
        return self._size

    @property
    def begin(self) -> Int[np.ndarray, " episodes"]:
        """Id of the first live row of each episode."""
        return self._table["begin"][: self._size]

    @property
    def rows(self) -> Int[np.ndarray, " episodes"]:
        """Number of live rows of each episode."""
        return self._table["rows"][: self._size]

    @property
    def transitions(self) -> Int[np.ndarray, " episodes"]:
        """Number of rows of each episode whose next row is stored."""
        return np.maximum(self.rows - 1, 0)

    def add(self, ids: np.ndarray, is_first: np.ndarray) -> None:
        """Add new steps to their episodes."""
        streams = self.index.stream[ids % self.index.capacity]
        for step, stream, first in zip(
            ids.tolist(), streams.tolist(), is_first.tolist(), strict=True
        ):
            number = self._newest.get(stream)
            rows = self._table["rows"]
            # An episode whose rows are all evicted is listed again.
            if first or number is None or not rows[number]:
                self._append(step, 1)
            else:
                rows[number] += 1

    def remove_evicted(self) -> None:
        """Remove the rows that were evicted since the last call."""
        index, oldest = self.index, self.index.first
        if oldest == self._first:
            return
        self._first = oldest
        listed = self._table[: self._size]
        begin, rows, stream, position = (listed[name] for name in self.FIELDS)
        for i in np.flatnonzero((begin < oldest) & (rows > 0)).tolist():
            evicted = int(index.stream_begin[stream[i]] - position[i])
            evicted = min(evicted, int(rows[i]))
            position[i] += evicted
            rows[i] -= evicted
            begin[i] = _first_live_id(index, int(stream[i])) if rows[i] else -1
        # remove the episodes without live rows at the front of the list
        count = self._size if not rows.any() else int(np.argmax(rows > 0))
        if count:
            self.num_removed += count
            self._size -= count
            self._table[: self._size] = listed[count:]
            self._newest = {s: i - count for s, i in self._newest.items() if i >= count}

    def rebuild(self, ids: np.ndarray, is_first: np.ndarray, saved: StateDict) -> None:
        """List the episodes of all live steps, in the order of a saved state.

        `ids` are all live steps, and `is_first` their flags.
        """
        self.clear()
        index = self.index
        rows = ids % index.capacity
        order = np.lexsort((index.position[rows], index.stream[rows]))
        ids, rows = ids[order], rows[order]
        # an episode also begins where the previous step is not stored
        begins_episode = is_first[order] | (index.prev_offset[rows] == 0)
        starts = np.flatnonzero(begins_episode)
        counts = np.diff(np.append(starts, len(ids)))
        saved_order = {
            step: i for i, step in enumerate(np.asarray(saved["begin"]).tolist())
        }
        episodes = sorted(
            (saved_order.get(int(step), len(saved_order)), int(step), int(count))
            for step, count in zip(ids[starts], counts, strict=True)
        )
        for _, step, count in episodes:
            self._append(step, count)
        order = np.argsort(self.begin)  # the newest episode of a stream comes last
        streams = self._table["stream"][order]
        self._newest = dict(zip(streams.tolist(), order.tolist(), strict=True))

    def state_dict(self) -> StateDict:
        self.remove_evicted()
        return {"begin": self.begin[self.rows > 0].copy()}

    def _append(self, step: int, rows: int) -> None:
        if self._size == len(self._table):
            self._table = np.append(self._table, np.zeros_like(self._table))
        row = step % self.index.capacity
        stream = int(self.index.stream[row])
        self._table[self._size] = (step, rows, stream, self.index.position[row])
        self._newest[stream] = self._size
        self._size += 1


class EpisodeSampler:
    """Samples sequences for one kind of batch and counts the uses of each episode."""

    def __init__(self, episodes: EpisodeIndex, window: Window) -> None:
        self.episodes, self.window = episodes, window
        self.is_counting = False
        self._num_removed = episodes.num_removed
        self._counts = np.zeros(len(episodes), np.int64)

    @property
    def counts(self) -> Int[np.ndarray, " episodes"]:
        """How often each listed episode was sampled while counting was on."""
        episodes = self.episodes
        episodes.remove_evicted()
        removed = episodes.num_removed - self._num_removed
        self._num_removed = episodes.num_removed
        self._counts = self._counts[removed:]
        new = len(episodes) - len(self._counts)
        if new:
            self._counts = np.append(self._counts, np.zeros(new, np.int64))
        return self._counts

    @property
    def can_sample(self) -> bool:
        """True if a transition is stored; may become False when steps are evicted."""
        self.episodes.remove_evicted()
        return bool(self.episodes.rows.max(initial=0) > 1)

    def sample(
        self, rng: np.random.Generator
    ) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
        """Sample a batch: step ids, and a mask that is True inside the episode."""
        if not self.can_sample:
            raise UserError(
                f"The replay holds {int(self.episodes.rows.sum())} steps, but no two "
                "consecutive steps of an episode.\n  Fix: check that only the first "
                "step of an episode has is_first, or increase --replay.capacity."
            )
        window, counts = self.window, self.counts
        candidates = np.flatnonzero(self.episodes.transitions)
        probabilities = episode_probabilities(counts[candidates], window.alpha)
        cumulative = np.cumsum(probabilities)
        points = rng.random(window.batch) * cumulative[-1]
        chosen = np.searchsorted(cumulative, points, "right")
        chosen = candidates[np.minimum(chosen, len(candidates) - 1)]
        rows = self.episodes.rows[chosen]
        step = rng.integers(0, rows - 1)
        offset = rng.integers(0, window.length - 1, window.batch)
        start = window_start(step, offset, rows - 1, window.length - 1, window.pad)
        offsets = start[:, None] + np.arange(window.length)
        mask = (offsets >= 0) & (offsets < rows[:, None])
        offsets = np.clip(offsets, 0, rows[:, None] - 1)
        if self.is_counting:
            np.add.at(counts, chosen, 1)
        ids = self.episodes.index.ids_at(self.episodes.begin[chosen], offsets)
        return ids, mask

    def state_dict(self) -> StateDict:
        counts = self.counts  # also removes evicted episodes
        is_stored = self.episodes.rows > 0
        return {"is_counting": self.is_counting, "counts": counts[is_stored]}

    def load_state_dict(self, state: StateDict, episodes: StateDict) -> None:
        """Load the counts; `episodes` is the `EpisodeIndex` state saved with them."""
        self.is_counting = bool(state["is_counting"])
        self._num_removed = self.episodes.num_removed
        saved_begin = np.asarray(episodes["begin"]).tolist()
        saved_counts = np.asarray(state["counts"]).tolist()
        counts = dict(zip(saved_begin, saved_counts, strict=True))
        begin = self.episodes.begin.tolist()
        self._counts = np.array([counts.get(step, 0) for step in begin], np.int64)


def _first_live_id(index: StepIndex, stream: int) -> int:
    """Return the id of the first live step of a stream.

    Searches blocks of ids of increasing width, from the oldest live step on.
    """
    width, first = 64, index.first
    while True:
        ids = np.arange(first, min(first + width, index.total))
        matches = np.flatnonzero(index.stream[ids % index.capacity] == stream)
        if len(matches):
            return int(ids[matches[0]])
        assert len(ids) == width, f"stream {stream} has no live rows"
        first, width = first + width, 4 * width
