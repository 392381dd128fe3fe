"""Reward and episode flags that every observation contains, next to its own keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from reverie.api import Obs
from reverie.spaces import Space, Spaces


def flag_spaces(low: float | None = None, high: float | None = None) -> Spaces:
    """Return the spaces of `reward` (optionally with bounds) and the three flags."""
    flag = Space(bool)
    return {
        "reward": Space(np.float32, (), low, high),
        "is_first": flag,
        "is_last": flag,
        "is_terminal": flag,
    }


def flags(
    reward: Any, first: bool = False, last: bool = False, terminal: bool = False
) -> Obs:
    """Return `reward` and the three flags in the dtypes of `flag_spaces`."""
    return {
        "reward": np.float32(reward),
        "is_first": np.bool_(first),
        "is_last": np.bool_(last),
        "is_terminal": np.bool_(terminal),
    }
