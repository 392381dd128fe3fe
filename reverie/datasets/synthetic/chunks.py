"""A stock of sequences that a thread replaces now and then.

What a step gets depends on nothing but the seed and the step: chunk number k has its
own generator, and so has the order in which each pass goes through it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from reverie.api import UserError
from reverie.datasets.sequences import Arrays

Make = Callable[[np.random.Generator, int], Arrays]
"""Makes so many sequences."""

TRAINING, ORDER, EVALUATION = 0, 1, 2


class Chunks:
    """Serves batches out of chunks of `size` sequences, each kept `refresh` steps."""

    def __init__(self, make: Make, size: int, refresh: int, batch: int, seed: int):
        if size < batch:
            raise UserError(
                f"A chunk of {size} sequences holds no batch of {batch}.\n"
                f"  Fix: --source.chunk {batch}"
            )
        self._make, self.size, self.refresh = make, size, refresh
        self.batch_size, self.seed = batch, seed
        self._thread = ThreadPoolExecutor(1, "sequences")
        self._waiting: dict[int, Future[Arrays]] = {}
        self._current: tuple[int, Arrays] | None = None
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    def batch(self, step: int) -> Arrays:
        number, inside = divmod(step, self.refresh) if self.refresh else (0, step)
        chunk = self._chunk(number)
        turn, place = divmod(inside, self.size // self.batch_size)
        order = self._shuffled(number, turn)
        rows = order[place * self.batch_size : (place + 1) * self.batch_size]
        return {key: value[rows] for key, value in chunk.items()}

    def evaluation(self, count: int) -> Arrays:
        return self._make(generator(self.seed, EVALUATION), count)

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _chunk(self, number: int) -> Arrays:
        if self._current is None or self._current[0] != number:
            self._current = None  # so that two are held at most
            waiting = self._waiting.pop(number, None) or self._order_chunk(number)
            self._current = number, waiting.result()
            self._waiting.clear()
            if self.refresh:
                self._waiting[number + 1] = self._order_chunk(number + 1)
        return self._current[1]

    def _order_chunk(self, number: int) -> Future[Arrays]:
        return self._thread.submit(
            lambda: self._make(generator(self.seed, TRAINING, number), self.size)
        )

    def _shuffled(self, number: int, turn: int) -> np.ndarray:
        if self._order is None or self._order[0] != (number, turn):
            rng = generator(self.seed, ORDER, number, turn)
            self._order = (number, turn), rng.permutation(self.size)
        return self._order[1]


def generator(seed: int, *purpose: int) -> np.random.Generator:
    entropy = np.random.SeedSequence([seed, *purpose])
    return np.random.Generator(np.random.SFC64(entropy))
