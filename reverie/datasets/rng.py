"""Random generators that depend only on a tuple of integers."""

from __future__ import annotations

import numpy as np


def make_rng(*seed: int) -> np.random.Generator:
    """Return a generator seeded by these integers, such as a seed and a step."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))
