"""Sequences sampled at random from episodes, which are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from reverie.api import UserError
from reverie.datasets.lru_cache import LruCache
from reverie.datasets.rng import make_rng
from reverie.datasets.sequences import SequenceConfig
from reverie.datasets.synthetic.chunks import EVALUATION, TRAINING
from reverie.rows import Window
from reverie.spaces import EVENT, Arrays

ReadEpisode = Callable[[], Arrays]
"""Reads one episode; raises ValueError if it cannot be used."""


class StoredEpisodes:
    """Episodes in files, of which the most recently used stay in memory.

    Every episode is read once when it is added, to check it and to count its frames.
    """

    def __init__(self, memory: float):
        self.frames: list[int] = []
        self.has_events: list[bool] = []
        self._sources: list[tuple[str, ReadEpisode]] = []
        self._cache = LruCache(self._read, int(memory * 2**30))

    def add(self, name: str, read: ReadEpisode) -> int:
        """Add an episode and return its index; raises if it cannot be used.

        The name is used in messages.
        """
        episode, index = read(), len(self._sources)
        self.frames.append(len(next(iter(episode.values()))))
        self.has_events.append(EVENT in episode)
        self._sources.append((name, read))
        self._cache.add(index, episode)
        return index

    def windows(
        self, indices: np.ndarray, starts: np.ndarray, length: int
    ) -> list[Arrays]:
        """Return the windows of these episodes that begin at these rows."""
        places: dict[int, list[int]] = {}
        for place, index in enumerate(indices.tolist()):
            places.setdefault(index, []).append(place)
        windows: list[Arrays] = [{}] * len(indices)

        def cut(index: int, episode: Arrays) -> None:
            for place in places[index]:
                rows = slice(starts[place], starts[place] + length)
                # copies, so that the episode can be removed from memory
                windows[place] = {key: v[rows].copy() for key, v in episode.items()}

        self._cache.apply(cut, places)
        return windows

    def close(self) -> None:
        self._cache.close()

    def _read(self, index: int) -> Arrays:
        name, read = self._sources[index]
        try:
            episode = read()
            frames, had = len(next(iter(episode.values()))), self.frames[index]
            if frames != had:
                raise ValueError(f"has {frames} frames instead of {had}")
            if (EVENT in episode) != self.has_events[index]:
                raise ValueError("has other keys")
        except ValueError as error:
            raise UserError(
                f"{name} has changed since the start of the run: it {error}.\n"
                "  Fix: restore it, and run the same command again."
            ) from error
        return episode


class RandomWindows:
    """Samples windows of some episodes; a step always gives the same windows.

    Without `events`, they are removed, as in datasets in which some episodes have none.
    """

    def __init__(
        self,
        episodes: StoredEpisodes,
        indices: Sequence[int],
        window: Window,
        seed: int,
        events: bool,
    ):
        self.episodes, self.indices, self.seed = episodes, np.array(indices), seed
        self.count, self.length = window.batch, window.context + window.length
        self.events = events
        starts = [episodes.frames[index] - self.length + 1 for index in indices]
        self._cumulative = np.cumsum(starts)  # all start rows are equally likely

    def batch(self, step: int) -> Arrays:
        return self._sample(make_rng(self.seed, TRAINING, step), self.count)

    def evaluation(self, count: int) -> Arrays:
        return self._sample(make_rng(self.seed, EVALUATION), count)

    def _sample(self, rng: np.random.Generator, count: int) -> Arrays:
        draws = rng.integers(self._cumulative[-1], size=count)
        order = np.searchsorted(self._cumulative, draws, "right")
        starts = draws - np.concatenate([[0], self._cumulative])[order]
        windows = self.episodes.windows(self.indices[order], starts, self.length)
        keys = [key for key in windows[0] if self.events or key != EVENT]
        return {key: np.stack([window[key] for window in windows]) for key in keys}


class WindowedEpisodes:
    """Part of a `SequenceDataset`: windows of training and evaluation episodes.

    `train` and `test` are the indices of the episodes. Events are used if all episodes
    of a part have them, or with `common_events` all episodes of both parts; otherwise
    frames of episodes without events would count as frames without an event.
    """

    def __init__(
        self,
        episodes: StoredEpisodes,
        train: Sequence[int],
        test: Sequence[int],
        config: SequenceConfig,
        window: Window,
        seed: int,
        common_events: bool = False,
    ):
        self.config, self.episodes = config, episodes

        def windows(indices: Sequence[int]) -> RandomWindows:
            labelled = [*train, *test] if common_events else indices
            events = all(episodes.has_events[index] for index in labelled)
            return RandomWindows(episodes, indices, window, seed, events)

        self._train, self._test = windows(train), windows(test)

    @staticmethod
    def unused_settings(config: SequenceConfig) -> dict[str, str]:
        reason = "it is a setting of the task sequences_balls"
        return dict.fromkeys(("chunk", "refresh", "dt", "side"), reason)

    def batch(self, step: int) -> Arrays:
        return self._train.batch(step)

    def evaluation(self) -> Arrays:
        return self._test.evaluation(self.config.evaluation)

    def close(self) -> None:
        self.episodes.close()
