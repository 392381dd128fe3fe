"""Sampling of episodes and of windows inside them, for the replay and for datasets."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def episode_probabilities(
    counts: Int[np.ndarray, " episodes"], alpha: float
) -> Float[np.ndarray, " episodes"]:
    """Return sampling probabilities proportional to `(1 + count) ** -alpha`.

    `counts` is how often each episode was sampled.
    """
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

    `step` is the index of a transition in its episode, which has this number of
    `transitions`. Transition i leads from row i to row i + 1.

    `pad` says on which sides the window may extend beyond the episode. If it is
    `both`, the window has `offset` transitions before `step`. If it is `left`, it has
    `offset` transitions after `step`, or fewer if the episode ends before.

    `offset` is from 0 to `length - 1`. The start is negative if the window begins
    before the episode.
    """
    if pad == "both":
        return step - offset
    return np.minimum(transitions, step + 1 + offset) - length
