"""Samples the step ids of one kind of batch (`Window`).

Sequences of new steps are queued and returned first, each once (online sampling). When
the queue is empty, a selector samples. `select="episodes"` uses an `EpisodeSampler`.
"""

from __future__ import annotations

import json
import zlib
from collections import deque

import numpy as np

from reverie.api import StateDict
from reverie.replay.config import ReplayConfig
from reverie.replay.episode_sampler import EpisodeIndex, EpisodeSampler
from reverie.replay.selectors import make_selector
from reverie.replay.step_index import StepIndex
from reverie.rows import MAX_PUT_BACK, Window


class WindowSampler:
    """Samples the step ids of each batch.

    With `consec` > 1, each sampled sequence is divided into that many chunks, which are
    returned in consecutive batches; `chunk` (B,) counts them.
    """

    def __init__(
        self,
        name: str,
        window: Window,
        index: StepIndex,
        config: ReplayConfig,
        episodes: EpisodeIndex | None,
        seed: int,
    ) -> None:
        self.window = window
        self.index = index
        self.config = config
        self.selector = make_selector(index, window, config)
        # Each kind of batch has its own sequence of random numbers.
        self.rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.starts = np.zeros(window.batch, np.int64)
        self.chunk = np.full(window.batch, window.consec, np.int64)
        # For online sampling: start ids of complete windows of new steps, and for each
        # stream the start id of its incomplete window.
        self.queue: deque[int] = deque()
        self.pending: dict[int, int] = {}
        self._episodes = episodes if window.select == "episodes" else None
        self.episode_sampler = self._make_episode_sampler()
        # Ids and masks of the last batches sampled by episode, and of those put back.
        self._served: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=MAX_PUT_BACK)
        self._put_back: list[tuple[np.ndarray, np.ndarray]] = []

    def enqueue(self, ids: np.ndarray) -> None:
        """Queue the windows completed by these new steps, for online sampling.

        Each stream is divided into adjacent windows, so every step is queued once.
        """
        index, span = self.index, self.window.span
        rows = ids % index.capacity
        offset = index.position[rows] % span
        streams = index.stream[rows]
        for i in np.flatnonzero((offset == 0) | (offset == span - 1)):
            stream = int(streams[i])
            if offset[i] == 0:
                self.pending[stream] = int(ids[i])
            if offset[i] == span - 1:
                start = self.pending.pop(stream, -1)
                if start >= index.first:
                    self.queue.append(start)
        while self.queue and self.queue[0] < index.first:
            self.queue.popleft()

    def sample_episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Sample a sequence of each of B episodes; return step ids and mask (B, T)."""
        assert self.episode_sampler is not None
        batch = self._put_back.pop() if self._put_back else None
        if batch is None or not self.index.is_live(batch[0]).all():
            batch = self.episode_sampler.sample(self.rng)
        self._served.append(batch)
        return batch

    def sample_windows(self) -> np.ndarray:
        """Return the step ids (B, span) of the sequences that form the next batch.

        A sequence is replaced when all its chunks were returned or steps were evicted.
        """
        is_done = self.chunk >= self.window.consec
        is_done |= ~self.index.is_live(self.starts)
        if is_done.any():
            self.starts[is_done] = self._sample_starts(int(is_done.sum()))
            self.chunk[is_done] = 0
        return self.index.window_ids(self.starts, self.window.span)

    def put_back(self) -> None:
        """Make the next call return the last batch again, because it was not used."""
        if self.episode_sampler is not None:
            self._put_back.append(self._served.pop())
        else:
            self.chunk -= 1

    def state_dict(self) -> StateDict:
        sampler = self.episode_sampler
        return {
            "rng": json.dumps(self.rng.bit_generator.state),
            "starts": self.starts.copy(),
            "chunk": self.chunk.copy(),
            "queue": np.array(self.queue, np.int64),
            "pending": np.array(list(self.pending.values()), np.int64),
            "pending_streams": np.array(list(self.pending), np.int64),
            "selector": self.selector.state_dict(),
            "put_back": [list(batch) for batch in self._put_back],
            **({"episode_sampler": sampler.state_dict()} if sampler else {}),
        }

    def load_state_dict(self, state: StateDict, episodes: StateDict | None) -> None:
        """Load a state, without the sequences that are no longer stored.

        `episodes` is the `EpisodeIndex` state that was saved with it, if any.
        """
        index, span = self.index, self.window.span
        self.rng.bit_generator.state = json.loads(state["rng"])
        if np.shape(state["starts"]) == self.starts.shape:
            self.starts = np.array(state["starts"], np.int64)
            self.chunk = np.array(state["chunk"], np.int64).reshape(self.starts.shape)
            self.chunk[~index.has_window(self.starts, span)] = self.window.consec
        queue = np.array(state["queue"], np.int64)
        self.queue = deque(queue[index.has_window(queue, span)].tolist())
        starts = np.array(state["pending"], np.int64)
        streams = np.array(state["pending_streams"], np.int64)
        is_same = index.stream[starts % index.capacity] == streams
        is_same &= index.is_live(starts)
        pairs = zip(streams[is_same].tolist(), starts[is_same].tolist(), strict=True)
        self.pending = dict(pairs)
        self._served.clear()
        self._put_back = [(ids, mask) for ids, mask in state["put_back"]]
        try:
            self.selector.load_state_dict(state["selector"])
        except KeyError:  # saved with other fractions: treat all steps as new
            self.selector = make_selector(index, self.window, self.config)
        saved = state.get("episode_sampler")
        if self.episode_sampler is not None and saved and episodes is not None:
            self.episode_sampler.load_state_dict(saved, episodes)
        else:
            self.episode_sampler = self._make_episode_sampler()

    def _make_episode_sampler(self) -> EpisodeSampler | None:
        if self._episodes is None:
            return None
        return EpisodeSampler(self._episodes, self.window)

    def _sample_starts(self, count: int) -> np.ndarray:
        """Return start ids from the online queue, then from the selector."""
        queued: list[int] = []
        while self.queue and len(queued) < count:
            start = self.queue.popleft()
            if start >= self.index.first:
                queued.append(start)
        missing = count - len(queued)
        starts = np.array(queued, np.int64)
        if missing:
            starts = np.append(starts, self.selector.sample(missing, self.rng))
        return starts
