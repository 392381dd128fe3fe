"""Rollout ensembles: evaluate the predictive uncertainty of a world model.

A rollout ensemble is several sampled rollouts of one world model from the same state,
not several models as in Plan2Explore (`nets/ensemble.py`). Every few rows of a recorded
episode, the world model observes the preceding rows and is then rolled out several
times with the recorded actions, each time with other random samples. Three statistics
are computed for every dimension of a vector and every horizon:

- `rmse`: root mean squared error of the ensemble mean;
- `spread`: standard deviation of the rollouts of an ensemble;
- `coverage`: how often the truth is between the lowest and the highest rollout.

If the truth is distributed like the n rollouts, the coverage is (n - 1) / (n + 1). The
rollouts are expected observations and do not include sensor noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from reverie.api import Metrics
from reverie.capabilities import WorldModelEnv
from reverie.config import check_minimum
from reverie.render.ensemble import EnsembleLines, draw_ensembles
from reverie.spaces import Arrays


@dataclass(frozen=True)
class RolloutEnsembleConfig:
    """Rollout ensembles of held-out episodes."""

    samples: int = 19
    """Rollouts per ensemble; 0 for no ensembles."""
    every: int = 10
    """Rows between the starts of two ensembles."""
    horizon: int = 15
    """Length of a rollout in steps."""
    keys: tuple[str, ...] = ()
    """Vectors to evaluate; empty for all that the model predicts."""
    episodes: int = 2
    """Number of episodes to evaluate."""

    def __post_init__(self) -> None:
        if self.samples < 0 or self.samples == 1:
            raise ValueError("samples must be at least 2, or 0 for no ensembles")
        prefix = "offline.eval.ensemble."
        check_minimum(self, prefix, every=1, horizon=1, episodes=1)


BATCH = 256
"""Rollouts that are computed together."""


class RolloutEnsembles(NamedTuple):
    """N ensembles of S rollouts of one key; the truth is NaN after an episode ends."""

    truth: Float[np.ndarray, "N H d"]
    rollouts: Float[np.ndarray, "N S H d"]
    last_obs: Float[np.ndarray, "N d"]
    """The last row that the model observed."""


class EnsembleStatistics(NamedTuple):
    """Statistics by horizon and dimension; NaN where there is no data."""

    rmse: Float[np.ndarray, "H d"]
    spread: Float[np.ndarray, "H d"]
    coverage: Float[np.ndarray, "H d"]
    copy_rmse: Float[np.ndarray, "H d"]
    """RMSE of a baseline that predicts the last observed row."""


def sample_ensembles(
    env: WorldModelEnv,
    episodes: Iterable[Arrays],
    config: RolloutEnsembleConfig,
    context: int,
) -> tuple[dict[str, RolloutEnsembles], Metrics]:
    """Return the ensembles of every key, and a figure of the first episode.

    `episodes` are rows `(T, ...)`; the model observes `context` rows before each
    ensemble.
    """
    keys = vector_keys(env, config.keys)
    pieces: dict[str, list[RolloutEnsembles]] = {key: [] for key in keys}
    figures: Metrics = {}
    for episode in islice(episodes, config.episodes if keys else 0):
        rows = len(episode["is_first"])
        observed = min(context, rows - 1)
        # last observed row of each ensemble
        starts = list(range(observed - 1, rows - 1, config.every))
        for key, ensembles in _sample(
            env, episode, starts, config, observed, keys
        ).items():
            pieces[key].append(ensembles)
            if f"ensemble/{key}" not in figures:
                figures[f"ensemble/{key}"] = _figure(key, episode, starts, ensembles)
    joined = {key: _concatenate(parts) for key, parts in pieces.items() if parts}
    return joined, figures


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


def vector_keys(env: WorldModelEnv, selected: tuple[str, ...] = ()) -> list[str]:
    """Return the vectors of real numbers that a model predicts."""
    vectors = [k for k in env.predicted_keys if env.obs_space[k].dtype.kind == "f"]
    return [key for key in vectors if key in selected or not selected]


def ensemble_statistics(ensembles: RolloutEnsembles) -> EnsembleStatistics:
    """Return error, spread and coverage over all ensembles."""
    truth, rollouts = ensembles.truth, ensembles.rollouts
    inside = (rollouts.min(1) <= truth) & (truth <= rollouts.max(1))
    exists = np.where(np.isnan(truth), np.nan, 1.0)
    return EnsembleStatistics(
        rmse=np.sqrt(_mean(np.square(rollouts.mean(1) - truth))),
        spread=np.sqrt(_mean(rollouts.var(1, ddof=1) * exists)),
        coverage=_mean(inside * exists),
        copy_rmse=np.sqrt(_mean(np.square(ensembles.last_obs[:, None] - truth))),
    )


def calibrated_coverage(samples: int) -> float:
    """Return the coverage if the truth is distributed like the rollouts."""
    return (samples - 1) / (samples + 1)


def ensemble_metrics(ensembles: dict[str, RolloutEnsembles]) -> Metrics:
    """Return each statistic as a mean over horizons and dimensions."""
    metrics: Metrics = {}
    for key, of_key in ensembles.items():
        for name, value in ensemble_statistics(of_key)._asdict().items():
            metrics[f"ensemble/{key}/{name}"] = float(np.nanmean(value))
    return metrics


def ensemble_table(ensembles: dict[str, RolloutEnsembles]) -> dict[str, Any]:
    """Return the statistics by key, horizon and dimension as lists; NaN for no data."""
    table: dict[str, Any] = {}
    for key, of_key in ensembles.items():
        samples = of_key.rollouts.shape[1]
        statistics = ensemble_statistics(of_key)._asdict()
        table[key] = {
            "ensembles": len(of_key.truth),
            "samples": samples,
            "calibrated_coverage": calibrated_coverage(samples),
            **{name: value.tolist() for name, value in statistics.items()},
        }
    return table


def _sample(
    env: WorldModelEnv,
    episode: Arrays,
    starts: list[int],
    config: RolloutEnsembleConfig,
    context: int,
    keys: list[str],
) -> dict[str, RolloutEnsembles]:
    """Return the ensembles of one episode.

    The model observes `context` rows before each ensemble. `starts` are the indices of
    the last of these rows.
    """
    rows = len(episode["is_first"])
    pieces: dict[str, list[RolloutEnsembles]] = {key: [] for key in keys}
    size = max(1, BATCH // config.samples)
    for first in range(0, len(starts), size):
        chunk = np.array(starts[first : first + size])
        window = chunk[:, None] + np.arange(1 - context, config.horizon + 1)
        indices = np.minimum(window, rows - 1)
        batch = {
            key: value[indices].repeat(config.samples, 0)
            for key, value in episode.items()
        }
        predictions = predict(env, batch, context, config.horizon)
        beyond_end = (window[:, context:] >= rows)[..., None]
        for key in keys:
            flat = episode[key].reshape(rows, -1).astype(np.float64)
            truth = np.where(beyond_end, np.nan, flat[indices[:, context:]])
            shape = (len(chunk), config.samples, config.horizon, -1)
            rollouts = predictions[key].astype(np.float64).reshape(shape)
            pieces[key].append(RolloutEnsembles(truth, rollouts, flat[chunk]))
    return {key: _concatenate(parts) for key, parts in pieces.items()}


def _concatenate(pieces: list[RolloutEnsembles]) -> RolloutEnsembles:
    return RolloutEnsembles(*(np.concatenate(x) for x in zip(*pieces, strict=True)))


def _figure(
    key: str, episode: Arrays, starts: list[int], ensembles: RolloutEnsembles
) -> np.ndarray:
    """Draw truth and rollouts of one episode, a panel per dimension of the vector."""
    rows = len(episode["is_first"])
    flat = episode[key].reshape(rows, -1).astype(np.float64)
    lines = [
        EnsembleLines(start, rollouts[:, : rows - 1 - start])
        for start, rollouts in zip(starts, ensembles.rollouts, strict=True)
    ]
    samples = ensembles.rollouts.shape[1]
    return draw_ensembles(flat, lines, f"{key}: {samples} sampled rollouts")


def _mean(values: np.ndarray) -> np.ndarray:
    """Mean over ensembles; NaN where no episode is long enough."""
    exists = ~np.isnan(values)
    count = exists.sum(0)
    total = np.where(exists, values, 0).sum(0)
    return np.where(count, total / np.maximum(count, 1), np.nan)
