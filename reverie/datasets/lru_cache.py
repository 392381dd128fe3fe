"""Cache of episodes with limited memory; missing ones are read by several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from reverie.spaces import Arrays

T = TypeVar("T")


class LruCache:
    """Keeps the most recently used episodes in memory, up to `capacity` bytes.

    `read` returns an episode by its index, or None if it cannot be used; it is called
    from several threads.
    """

    def __init__(
        self, read: Callable[[int], Arrays | None], capacity: int, workers: int = 2
    ):
        self.capacity = capacity
        self.bytes = 0
        self._read = read
        self._cached: OrderedDict[int, Arrays] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max(1, workers), "episodes")

    def apply(
        self, function: Callable[[int, Arrays], T], indices: Iterable[int]
    ) -> dict[int, T]:
        """Return `function(index, episode)` by index, for several episodes.

        Episodes that cannot be used have no result. For episodes that are not in
        memory, the function is called in the thread that reads them.
        """
        results, futures = {}, {}
        for index in sorted(set(indices)):
            episode = self.get(index)
            if episode is None:
                futures[index] = self._threads.submit(self._load, function, index)
            else:
                results[index] = function(index, episode)
        for index, future in futures.items():
            for result in future.result():
                results[index] = result
        return results

    def get(self, index: int) -> Arrays | None:
        """Return an episode if it is in memory."""
        with self._lock:
            if index in self._cached:
                self._cached.move_to_end(index)
            return self._cached.get(index)

    def add(self, index: int, episode: Arrays) -> None:
        """Add an episode, and remove the least recently used ones until all fit."""
        with self._lock:
            if index in self._cached:
                return
            self._cached[index] = episode
            self.bytes += _size(episode)
            while self.bytes > self.capacity and len(self._cached) > 1:
                self.bytes -= _size(self._cached.popitem(last=False)[1])

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._cached.clear()
            self.bytes = 0

    def _load(self, function: Callable[[int, Arrays], T], index: int) -> list[T]:
        """Read an episode; return `[function(index, episode)]`, or `[]` if unusable."""
        episode = self._read(index)
        if episode is None:
            return []
        self.add(index, episode)
        return [function(index, episode)]


def _size(episode: Arrays) -> int:
    return sum(value.nbytes for value in episode.values())
