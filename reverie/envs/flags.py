"""What every row has besides its observations: the reward and the three flags."""

from __future__ import annotations

from typing import Any

import numpy as np

from reverie.api import Obs
from reverie.spaces import Space, Spaces


def flag_spaces() -> Spaces:
    flag = Space(np.dtype(bool))
    return {
        "reward": Space(np.dtype(np.float32)),
        "is_first": flag,
        "is_last": flag,
        "is_terminal": flag,
    }


def flags(
    reward: Any, first: bool = False, last: bool = False, terminal: bool = False
) -> Obs:
    return {
        "reward": np.float32(reward),
        "is_first": np.bool_(first),
        "is_last": np.bool_(last),
        "is_terminal": np.bool_(terminal),
    }
