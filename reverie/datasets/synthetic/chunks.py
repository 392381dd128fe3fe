"""Generated sequences in chunks; a thread generates the next chunk in the background.

A batch depends only on the seed and the step: each chunk, and the shuffled order of
each pass over a chunk, has its own random generator.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from reverie.api import UserError
from reverie.datasets.rng import make_rng
from reverie.spaces import Arrays

Generate = Callable[[np.random.Generator, int], Arrays]
"""Generates the given number of sequences."""

TRAINING, ORDER, EVALUATION = 0, 1, 2
"""Uses of random numbers; each is part of the seed, so that they are independent."""


class ChunkedSequences:
    """Batches from chunks of `size` sequences, each used for `refresh` steps (0: one
    chunk for all steps)."""

    def __init__(
        self, generate: Generate, size: int, refresh: int, batch: int, seed: int
    ):
        if size < batch:
            raise UserError(
                f"A chunk of {size} sequences is smaller than a batch of {batch}.\n"
                f"  Fix: --sequences.chunk {batch}"
            )
        self._generate, self.size, self.refresh = generate, size, refresh
        self.batch_size, self.seed = batch, seed
        self._thread = ThreadPoolExecutor(1, "sequences")
        self._pending: dict[int, Future[Arrays]] = {}  # by number of the chunk
        # Number of the current chunk and its sequences.
        self._current: tuple[int, Arrays] | None = None
        # Number of the chunk and of the pass over it, and the order of sequences.
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    def batch(self, step: int) -> Arrays:
        """Return the training batch of a step."""
        number, chunk_step = divmod(step, self.refresh) if self.refresh else (0, step)
        chunk = self._get_chunk(number)
        epoch, index = divmod(chunk_step, self.size // self.batch_size)
        order = self._get_order(number, epoch)
        rows = order[index * self.batch_size : (index + 1) * self.batch_size]
        return {key: value[rows] for key, value in chunk.items()}

    def evaluation(self, count: int) -> Arrays:
        """Generate sequences that are in no training batch."""
        return self._generate(make_rng(self.seed, EVALUATION), count)

    def close(self) -> None:
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _get_chunk(self, number: int) -> Arrays:
        """Return a chunk, and start to generate the next one in the thread."""
        if self._current is None or self._current[0] != number:
            self._current = None  # at most two chunks are in memory
            future = self._pending.pop(number, None) or self._submit(number)
            self._current = number, future.result()
            self._pending.clear()
            if self.refresh:
                self._pending[number + 1] = self._submit(number + 1)
        return self._current[1]

    def _submit(self, number: int) -> Future[Arrays]:
        return self._thread.submit(
            lambda: self._generate(make_rng(self.seed, TRAINING, number), self.size)
        )

    def _get_order(self, number: int, epoch: int) -> np.ndarray:
        """Return the shuffled order of the sequences in one pass over a chunk."""
        if self._order is None or self._order[0] != (number, epoch):
            rng = make_rng(self.seed, ORDER, number, epoch)
            self._order = (number, epoch), rng.permutation(self.size)
        return self._order[1]
