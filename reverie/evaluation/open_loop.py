"""Open-loop predictions: a world model continues recorded rows with their actions."""

from __future__ import annotations

from typing import Any

import numpy as np

from reverie.capabilities import WorldModelEnv
from reverie.storage.array_file import Arrays


def predict(env: WorldModelEnv, batch: Arrays, context: int, horizon: int) -> Arrays:
    """Return predictions `(N, H, ...)` of the rows after the first `context` rows.

    The action of row t leads to row t + 1, so the first action is that of the last
    context row.
    """
    observed = {key: value[:, :context] for key, value in batch.items()}
    state, rows = env.begin(observed), list[Any]()
    for t in range(context - 1, context - 1 + horizon):
        action = {key: batch[key][:, t] for key in env.act_space}
        state, row = env.step(state, action)
        rows.append(row)
    keys = [key for key in env.predicted_keys if key in rows[0] and key in batch]
    return {key: np.stack([row[key] for row in rows], 1) for key in keys}
