"""Sum tree for sampling in proportion to weights that change."""

from __future__ import annotations

import numpy as np


class SumTree:
    """Updates and samples many weights at once.

    Every node is the sum of its sixteen children, recomputed from them, so the tree
    depends only on the leaves and rounding errors do not accumulate.
    """

    WIDTH = 16

    def __init__(self, size: int) -> None:
        self.levels = []
        while True:
            size = -(-size // self.WIDTH)
            self.levels.append(np.zeros((size, self.WIDTH)))
            if size == 1:
                break

    @property
    def total(self) -> float:
        return float(self.levels[-1].sum())

    def set(self, leaves: np.ndarray, weights: np.ndarray) -> None:
        if not len(leaves):
            return
        self.levels[0].reshape(-1)[leaves] = weights
        nodes = leaves
        for lower, upper in zip(self.levels[:-1], self.levels[1:], strict=True):
            nodes = np.unique(nodes // self.WIDTH)
            upper.reshape(-1)[nodes] = lower[nodes].sum(1)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Sample leaves with probability proportional to their weight."""
        remaining = rng.random(count) * self.total
        node = np.zeros(count, np.int64)
        samples = np.arange(count)
        for level in reversed(self.levels):
            children = level[node]
            cumulative = np.cumsum(children, 1)
            child = (remaining[:, None] >= cumulative).sum(1)
            # Rounding may select a child after the last one with a positive weight.
            last = self.WIDTH - 1 - np.argmax(children[:, ::-1] > 0, axis=1)
            child = np.minimum(child, last)
            skipped = cumulative[samples, child] - children[samples, child]
            remaining = remaining - skipped
            node = node * self.WIDTH + child
        return node
