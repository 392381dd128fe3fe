"""Sequences sampled at random from episodes in memory."""

from __future__ import annotations

import numpy as np

from reverie.datasets.rng import make_rng
from reverie.datasets.sequences import SequenceConfig
from reverie.datasets.synthetic.chunks import EVALUATION, TRAINING
from reverie.rows import Window
from reverie.spaces import EVENT
from reverie.storage.array_file import Arrays


class RandomWindows:
    """Samples windows of episodes; a step always gives the same windows."""

    def __init__(self, episodes: list[Arrays], window: Window, seed: int):
        self.episodes, self.seed = episodes, seed
        self.count, self.length = window.batch, window.context + window.length
        starts = [len(next(iter(e.values()))) - self.length + 1 for e in episodes]
        self._cumulative = np.cumsum(starts)  # all start rows are equally likely

    def batch(self, step: int) -> Arrays:
        return self._sample(make_rng(self.seed, TRAINING, step), self.count)

    def evaluation(self, count: int) -> Arrays:
        return self._sample(make_rng(self.seed, EVALUATION), count)

    def _sample(self, rng: np.random.Generator, count: int) -> Arrays:
        draws = rng.integers(self._cumulative[-1], size=count)
        indices = np.searchsorted(self._cumulative, draws, "right")
        starts = draws - np.concatenate([[0], self._cumulative])[indices]
        rows = [
            {k: v[start : start + self.length] for k, v in self.episodes[i].items()}
            for i, start in zip(indices, starts, strict=True)
        ]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


class WindowedEpisodes:
    """Part of a `SequenceDataset`: windows of training and evaluation episodes."""

    def __init__(
        self,
        train: list[Arrays],
        test: list[Arrays],
        config: SequenceConfig,
        window: Window,
        seed: int,
    ):
        self.config = config
        self._train = RandomWindows(train, window, seed)
        self._test = RandomWindows(test, window, seed)

    def batch(self, step: int) -> Arrays:
        return self._train.batch(step)

    def evaluation(self) -> Arrays:
        return self._test.evaluation(self.config.evaluation)

    def close(self) -> None:
        pass


def with_common_events(episodes: list[Arrays]) -> list[Arrays]:
    """Remove the events unless every episode has them.

    Otherwise frames of episodes without events would count as frames without an event.
    """
    if all(EVENT in episode for episode in episodes):
        return episodes
    return [{k: v for k, v in episode.items() if k != EVENT} for episode in episodes]
