"""Statistics over tasks and seeds, with stratified bootstrap intervals.

Definitions follow Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of
the Statistical Precipice". `Scores` maps each task to the scores of its runs. Tasks may
have different numbers of runs; each task has the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Scores = Mapping[str, Sequence[float]]
Statistic = Callable[[Sequence[np.ndarray]], float]
"""Computes a number from one array of scores per task."""

RESAMPLES = 2000
"""Default number of bootstrap samples."""
CONFIDENCE = 0.95
QUANTILES = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
"""Quantiles of the bootstrap samples that bound the confidence intervals."""


class Estimate(NamedTuple):
    """A value with its confidence interval, NaN if all tasks have only one run."""

    value: float
    low: float
    high: float


def mean(scores: Sequence[np.ndarray]) -> float:
    """Mean over tasks of the mean over runs."""
    return float(np.mean([np.mean(x) for x in scores]))


def median(scores: Sequence[np.ndarray]) -> float:
    """Median over tasks of the mean over runs."""
    return float(np.median([np.mean(x) for x in scores]))


def interquartile_mean(scores: Sequence[np.ndarray]) -> float:
    """Mean of the middle half of all runs.

    As in a trimmed mean, only whole runs are left out: a quarter of the runs at each
    end, rounded down. A run of a task with fewer runs has a larger weight.
    """
    values = np.concatenate([np.asarray(x, float) for x in scores])
    weights = np.concatenate([np.full(len(x), 1 / len(x)) for x in scores])
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    num_trimmed = len(values) // 4  # at each end
    kept = slice(num_trimmed, len(values) - num_trimmed)
    return float(np.average(values[kept], weights=weights[kept]))


def optimality_gap(scores: Sequence[np.ndarray], target: float = 1.0) -> float:
    """Mean of `max(target - score, 0)` over runs, then over tasks."""
    return float(np.mean([np.mean(np.maximum(target - x, 0)) for x in scores]))


AGGREGATES: dict[str, Statistic] = {
    "mean": mean,
    "median": median,
    "IQM": interquartile_mean,
    "optimality gap": optimality_gap,
}


def aggregate(
    scores: Scores, statistic: Statistic, seed: int = 0, resamples: int | None = None
) -> Estimate:
    """Return a statistic with its bootstrap interval; runs are resampled per task."""
    arrays = _to_arrays(scores)
    value = statistic(arrays)
    if all(len(x) < 2 for x in arrays):
        return Estimate(value, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    draws = [statistic(_resample(arrays, rng)) for _ in range(resamples or RESAMPLES)]
    return Estimate(value, *_interval(draws))


def exceedance(scores: Scores, thresholds: np.ndarray) -> list[np.ndarray]:
    """Return, per task, which runs score above which thresholds: (runs, thresholds).

    The mean over runs, then over tasks, is the performance profile.
    """
    return [(x[:, None] > thresholds[None]).astype(float) for x in _to_arrays(scores)]


def mean_with_band(
    curves: Sequence[np.ndarray], seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over tasks of the mean over runs, with its stratified bootstrap interval.

    `curves` has an array of shape (runs, points) per task. Points may be NaN in runs
    without data, and are NaN in the result if a task has no run with data. The interval
    is NaN at points where every task has a single run.
    """
    rng = np.random.default_rng(seed)
    means = np.mean([_weighted_mean(x, np.ones((1, len(x))))[0] for x in curves], 0)
    low, high = np.full_like(means, np.nan), np.full_like(means, np.nan)
    draws = np.mean([_weighted_mean(x, _draw_counts(len(x), rng)) for x in curves], 0)
    has_band = np.max([np.isfinite(x).sum(0) for x in curves], 0) > 1
    has_band &= np.isfinite(means)
    if has_band.any():
        low[has_band], high[has_band] = np.nanquantile(
            draws[:, has_band], QUANTILES, axis=0
        )
    return means, low, high


def _draw_counts(runs: int, rng: np.random.Generator) -> np.ndarray:
    """Return how often each run is drawn, with shape (resamples, runs)."""
    draws = rng.integers(0, runs, (RESAMPLES, runs))
    return np.stack([np.bincount(row, minlength=runs) for row in draws]).astype(float)


def _weighted_mean(curves: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted mean over runs; NaN values of a run have no weight.

    The result is NaN where no run with a positive weight has a value.
    """
    known = np.isfinite(curves)
    total = weights @ np.where(known, curves, 0.0)
    total_weight = weights @ known.astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total_weight > 0, total / total_weight, np.nan)


def probability_of_improvement(
    scores_a: Scores, scores_b: Scores, seed: int = 0
) -> Estimate:
    """Probability that a run of A has a higher score than a run of B on a random task.

    Only tasks of both methods are used. Ties count as one half.
    """
    tasks = [task for task in scores_a if task in scores_b]
    if not tasks:
        raise ValueError("the two methods share no task")
    a = _to_arrays({task: scores_a[task] for task in tasks})
    b = _to_arrays({task: scores_b[task] for task in tasks})
    value = _improvement(a, b)
    if all(len(x) < 2 for x in (*a, *b)):
        return Estimate(value, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    draws = [
        _improvement(_resample(a, rng), _resample(b, rng)) for _ in range(RESAMPLES)
    ]
    return Estimate(value, *_interval(draws))


def _improvement(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """Return the mean over tasks of the fraction of pairs of runs that A wins."""
    wins = [
        np.mean((x[:, None] > y[None]) + 0.5 * (x[:, None] == y[None]))
        for x, y in zip(a, b, strict=True)
    ]
    return float(np.mean(wins))


def _to_arrays(scores: Scores) -> list[np.ndarray]:
    return [np.asarray(values, float) for values in scores.values()]


def _resample(
    arrays: Sequence[np.ndarray], rng: np.random.Generator
) -> list[np.ndarray]:
    """Draw as many runs of each task as it has, with replacement."""
    return [x[rng.integers(0, len(x), len(x))] for x in arrays]


def _interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(np.asarray(values), QUANTILES)
    return float(low), float(high)
