"""Random windows of episodes, which are read from files when they are needed."""

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
"""Reads one episode; raises `ValueError` if it cannot be used."""


class StoredEpisodes:
    """Episodes in files, of which the most recently used stay in memory.

    Every episode is read once when it is added, to check it and to count its frames.
    `memory` is the size of the cache in GiB.
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
        """Return one window of each of these episodes, from the given start rows."""
        positions: dict[int, list[int]] = {}  # in the result, by episode
        for position, index in enumerate(indices.tolist()):
            positions.setdefault(index, []).append(position)
        windows: list[Arrays] = [{}] * len(indices)

        def copy_windows(index: int, episode: Arrays) -> None:
            for i in positions[index]:
                rows = slice(starts[i], starts[i] + length)
                # copies, so that the episode can be removed from memory
                windows[i] = {key: value[rows].copy() for key, value in episode.items()}

        self._cache.apply(copy_windows, positions)
        return windows

    def close(self) -> None:
        self._cache.close()

    def _read(self, index: int) -> Arrays:
        """Read an episode again; raise `UserError` if its file has changed."""
        name, read = self._sources[index]
        try:
            episode = read()
            frames, expected = len(next(iter(episode.values()))), self.frames[index]
            if frames != expected:
                raise ValueError(f"has {frames} frames instead of {expected}")
            if (EVENT in episode) != self.has_events[index]:
                raise ValueError("has other keys")
        except ValueError as error:
            raise UserError(
                f"{name} has changed since the start of the run: it {error}.\n"
                "  Fix: restore it, and run the same command again."
            ) from error
        return episode


class RandomWindows:
    """Samples windows of some episodes; the same step gives the same windows.

    If `events` is False, ground-truth events are removed.
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
        num_starts = [episodes.frames[index] - self.length + 1 for index in indices]
        self._cumulative = np.cumsum(num_starts)  # all start rows are equally likely

    def batch(self, step: int) -> Arrays:
        return self._sample(make_rng(self.seed, TRAINING, step), self.count)

    def evaluation(self, count: int) -> Arrays:
        return self._sample(make_rng(self.seed, EVALUATION), count)

    def _sample(self, rng: np.random.Generator, count: int) -> Arrays:
        draws = rng.integers(self._cumulative[-1], size=count)
        chosen = np.searchsorted(self._cumulative, draws, "right")
        starts = draws - np.concatenate([[0], self._cumulative])[chosen]
        windows = self.episodes.windows(self.indices[chosen], starts, self.length)
        keys = [key for key in windows[0] if self.events or key != EVENT]
        return {key: np.stack([window[key] for window in windows]) for key in keys}


class WindowedEpisodes:
    """Base class of a `SequenceDataset`: windows of training and evaluation episodes.

    `train` and `test` are the indices of the episodes. Windows have ground-truth events
    only if all episodes of their set have them (with `common_events`: of both sets),
    because an episode without labels would otherwise count as one without events.
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
