"""`Rows` that a collector returns, and `Window`, the shape of a sampled batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

MAX_PUT_BACK = 64
"""Maximum number of unused batches that a feed takes back with `put_back`."""


@dataclass(frozen=True)
class Rows:
    """One row from each of several environments: observations, actions and extras."""

    values: dict[str, np.ndarray]
    """Arrays `(rows, ...)` by key."""
    streams: np.ndarray | None = None
    """Index of the environment, and so of the replay stream, of each row; None if there
    is one row of every environment."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Scores, lengths and videos of the episodes that ended in these rows."""

    def __len__(self) -> int:
        return len(self.values["is_first"])

    @property
    def env_steps(self) -> int:
        """Number of actions taken: the last row of an episode has none."""
        return int((~self.values["is_last"]).sum())


@dataclass(frozen=True)
class Window:
    """One kind of batch: `batch` sequences of `context + length` rows.

    Context rows come first and only provide stored extras (`replay_context` in
    DreamerV3). With `consec` > 1, each sampled sequence is returned as that many
    consecutive batches, counted by the batch key `consec`.

    `select="mixture"` samples with the mixture of uniform, priority and recency weights
    in the replay settings. With `online`, new sequences are returned first, each once.

    `select="episodes"` samples an episode with probability proportional to
    `(1 + n) ** -alpha` after n uses (`Feed.count_uses`), then a sequence around a
    random transition of it. The sequence may extend beyond the episode on both sides or
    only on the left (`pad`); the batch key `mask` is False for those rows.
    """

    batch: int
    length: int
    context: int = 0
    consec: int = 1
    select: Literal["uniform", "mixture", "episodes"] = "mixture"
    online: bool = True
    pad: Literal["both", "left"] = "both"
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.select == "episodes":
            assert self.length > 1, "length must be at least 2, for one transition"
            assert (self.context, self.consec) == (0, 1), "not supported for episodes"

    @property
    def span(self) -> int:
        """Rows of one sampled sequence."""
        return self.context + self.consec * self.length
