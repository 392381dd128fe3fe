"""Choose episodes and place windows in them, for the replay and recorded datasets."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def chances(
    counts: Int[np.ndarray, " episodes"], alpha: float
) -> Float[np.ndarray, " episodes"]:
    """How likely each episode is chosen next, by how often it was before."""
    if not len(counts):
        return np.zeros(0)
    # next to the rarest, since weights of their own may be too small for a number
    weight = ((1.0 + counts) / (1.0 + counts.min())) ** -alpha
    return np.asarray(weight / weight.sum())


def place(
    step: Int[np.ndarray, " B"],
    offset: Int[np.ndarray, " B"],
    transitions: Int[np.ndarray, " B"],
    length: int,
    pad: str,
) -> Int[np.ndarray, " B"]:
    """Where a sequence of `length` transitions begins so that it covers a step.

    With padding on the left only it ends within the episode, so it may miss the step.
    """
    if pad == "both":
        return step - offset
    return np.minimum(transitions, step + 1 + offset) - length
