"""What a world foresees of recorded rows, by the recorded actions alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from reverie.capabilities import WorldModelEnv
from reverie.storage.array_file import Arrays


def dream_on(
    dreams: WorldModelEnv, batch: Arrays, context: int, horizon: int
) -> Arrays:
    """What a world draws for the rows `(N, H, ...)` after the context.

    The action of row t leads to row t + 1, so the first one it is told is that of the
    last row it has seen.
    """
    seen = {key: value[:, :context] for key, value in batch.items()}
    state, rows = dreams.begin(seen), list[Any]()
    for t in range(context - 1, context - 1 + horizon):
        action = {key: batch[key][:, t] for key in dreams.act_space}
        state, row = dreams.step(state, action)
        rows.append(row)
    keys = [key for key in dreams.predicted_keys if key in rows[0] and key in batch]
    return {key: np.stack([row[key] for row in rows], 1) for key in keys}
