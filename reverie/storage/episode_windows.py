"""Sampling of episodes and of windows inside them, for the replay and for datasets."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def episode_probabilities(
    counts: Int[np.ndarray, " episodes"], alpha: float
) -> Float[np.ndarray, " episodes"]:
    """Sampling probabilities proportional to `(1 + count) ** -alpha`, where `counts`
    is how often each episode was sampled."""
    if not len(counts):
        return np.zeros(0)
    # Relative to the smallest count, so that the weights do not underflow.
    weight = ((1.0 + counts) / (1.0 + counts.min())) ** -alpha
    return np.asarray(weight / weight.sum())


def window_start(
    step: Int[np.ndarray, " B"],
    offset: Int[np.ndarray, " B"],
    transitions: Int[np.ndarray, " B"],
    length: int,
    pad: str,
) -> Int[np.ndarray, " B"]:
    """Return the first row of a window of `length` transitions that contains `step`.

    `offset` is a random number from 0 to `length` - 1: with padding on both sides, the
    transitions before the step; with padding on the left only, those after it, without
    exceeding the episode. The start may be negative.
    """
    if pad == "both":
        return step - offset
    return np.minimum(transitions, step + 1 + offset) - length
