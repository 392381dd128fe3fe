"""Cache of the episodes of a reader, which are decompressed in several threads."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.lru_cache import LruCache
from reverie.datasets.readers import Reader
from reverie.spaces import STEP_KEYS

OnBadEpisode = Literal["skip", "stop"]
"""What to do with an episode that cannot be used."""


@dataclass(frozen=True)
class EpisodeCacheConfig:
    """Cache of recorded episodes during training."""

    memory: float = 2.0
    """Size of the cache of decompressed episodes in GiB."""
    workers: int = 2
    """Threads that read and decompress episodes."""
    bad: OnBadEpisode = "skip"
    """What to do with episodes that have NaN, wrong lengths or missing keys: `skip`
    them with a warning, or `stop` the run."""

    def __post_init__(self) -> None:
        if self.memory <= 0 or self.workers < 1:
            raise ValueError("memory must be above 0 and workers at least 1")


class EpisodeCache:
    """Keeps the most recently used episodes of a reader, up to a number of bytes.

    Episodes are identified by their index in `reader.names()`. Invalid episodes are
    added to `bad` and reported once.
    """

    def __init__(
        self,
        reader: Reader,
        capacity: int,
        on_bad: OnBadEpisode = "skip",
        workers: int = 2,
    ):
        self.reader, self.capacity, self.on_bad = reader, capacity, on_bad
        self.names = reader.names()
        self.bad: set[int] = set()
        self._keys = [*reader.obs_space, *reader.act_space, *STEP_KEYS]
        self._lock = threading.Lock()
        self._cache = LruCache(self._read, capacity, workers)
        self.rows = self._count_rows()

    @property
    def bytes(self) -> int:
        """Size of the episodes in memory."""
        return self._cache.bytes

    def get(self, indices: Iterable[int]) -> dict[int, Episode] | None:
        """Return these episodes by index; None if one of them cannot be used."""
        wanted = set(indices)
        episodes = self._cache.apply(lambda _, episode: episode, wanted)
        return episodes if len(episodes) == len(wanted) else None

    def read(self, index: int) -> Episode | None:
        """Return one episode without adding it to the cache; None if it is bad."""
        return self._cache.get(index) or self._read(index)

    def close(self) -> None:
        self._cache.close()

    def _read(self, index: int) -> Episode | None:
        """Read and check an episode; report it and return None if it is bad."""
        try:
            episode = self.reader.read_valid(self.names[index])
            if len(episode["reward"]) != self.rows[index]:
                raise BadEpisode(
                    f"has {len(episode['reward'])} rows, expected {self.rows[index]}"
                )
        except BadEpisode as error:
            self._report_bad(index, error)
            return None
        return {key: episode[key] for key in self._keys}

    def _count_rows(self) -> np.ndarray:
        """Return the number of rows of each episode; 0 if it is bad."""
        rows = np.zeros(len(self.names), np.int64)
        for index, name in enumerate(self.names):
            try:
                rows[index] = self.reader.rows(name)
            except BadEpisode as error:
                self._report_bad(index, error)
        return rows

    def _report_bad(self, index: int, error: BadEpisode) -> None:
        """Warn about a bad episode once, or raise `UserError` if `on_bad` is `stop`."""
        message = f"{self.reader.origin}: {self.names[index]} {error}"
        if self.on_bad == "stop":
            raise UserError(
                f"{message}.\n  Fix: repair or remove it, or skip such episodes with "
                "--offline.cache.bad skip (--bad skip in `reverie data`)."
            )
        with self._lock:
            is_reported = index in self.bad
            self.bad.add(index)
        if not is_reported:
            warnings.warn(f"{message}; skipped", RuntimeWarning, stacklevel=2)
