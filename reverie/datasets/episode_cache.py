"""Unpacked episodes, as many as fit, read by threads when somebody wants them."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode, problems
from reverie.datasets.readers import Reader
from reverie.spaces import FLAGS

Bad = Literal["skip", "stop"]


class Shelf:
    """Keeps the episodes of a reader that were used last, within a number of bytes.

    An episode that cannot be used is remembered in `bad`, and named once.
    """

    def __init__(
        self, reader: Reader, capacity: int, bad: Bad = "skip", workers: int = 2
    ):
        self.reader, self.capacity, self.on_bad = reader, capacity, bad
        self.names = reader.names()
        self.bad: set[int] = set()
        self.bytes = 0
        self._keys = [*reader.obs_space, *reader.act_space, *FLAGS]
        self._kept: OrderedDict[int, Episode] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max(1, workers), "episodes")
        self.rows = self._measure()

    def take(self, wanted: Iterable[int]) -> dict[int, Episode] | None:
        """These episodes by number; None if one of them turned out to be bad."""
        numbers = sorted(set(wanted))
        futures = {}
        found: dict[int, Episode] = {}
        with self._lock:
            for number in numbers:
                if number in self._kept:
                    self._kept.move_to_end(number)
                    found[number] = self._kept[number]
        for number in numbers:
            if number not in found:
                futures[number] = self._threads.submit(self._read, number)
        for number, future in futures.items():
            episode = future.result()
            if episode is not None:
                found[number] = episode
                self._keep(number, episode)
        return found if len(found) == len(numbers) else None

    def read(self, number: int) -> Episode | None:
        """One episode, not to be kept; None if it is bad."""
        with self._lock:
            if number in self._kept:
                return self._kept[number]
        return self._read(number)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._kept.clear()
            self.bytes = 0

    def _keep(self, number: int, episode: Episode) -> None:
        size = sum(value.nbytes for value in episode.values())
        with self._lock:
            if number in self._kept:
                return
            self._kept[number] = episode
            self.bytes += size
            while self.bytes > self.capacity and len(self._kept) > 1:
                _, gone = self._kept.popitem(last=False)
                self.bytes -= sum(value.nbytes for value in gone.values())

    def _read(self, number: int) -> Episode | None:
        reader, name = self.reader, self.names[number]
        try:
            episode = reader.read(name)
            if wrong := problems(episode, reader.obs_space, reader.act_space):
                raise BadEpisode("; ".join(wrong))
            if len(episode["reward"]) != self.rows[number]:
                raise BadEpisode(
                    f"has {len(episode['reward'])} rows, not {self.rows[number]}"
                )
        except BadEpisode as error:
            self._drop(number, error)
            return None
        return {key: episode[key] for key in self._keys}

    def _measure(self) -> np.ndarray:
        rows = np.zeros(len(self.names), np.int64)
        for number, name in enumerate(self.names):
            try:
                rows[number] = self.reader.rows(name)
            except BadEpisode as error:
                self._drop(number, error)
        return rows

    def _drop(self, number: int, error: BadEpisode) -> None:
        sentence = f"{self.reader.origin}: {self.names[number]} {error}"
        if self.on_bad == "stop":
            raise UserError(
                f"{sentence}.\n  Fix: mend or remove it, or pass over such episodes "
                "with --offline.keep.bad skip (--bad skip in `reverie data`)."
            )
        with self._lock:
            known = number in self.bad
            self.bad.add(number)
        if not known:
            warnings.warn(f"{sentence}; skipped", RuntimeWarning, stacklevel=2)
