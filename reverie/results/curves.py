"""Learning curves on common bins of x, averaged over runs, with bootstrap bands.

The points of a run are an array `(n, 2)` of x (such as frames) and value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reverie.results.statistics import aggregate, interquartile_mean, mean_with_band

BINS = 40
RESAMPLES = 500
"""Bootstrap samples per bin of an aggregate over tasks."""


class Curve(NamedTuple):
    """Mean over runs at the centers of bins, with its band (NaN for one run)."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int


def bin_edges(points: Sequence[np.ndarray], bins: int = BINS) -> np.ndarray:
    """Return edges of equal bins from zero to the largest x of all runs.

    Bins are not narrower than the mean distance between the episodes of any run, so
    that long episodes do not leave bins empty.
    """
    last = max(float(run[:, 0].max()) for run in points) or 1.0
    distance = max(float(run[:, 0].max()) / len(np.unique(run[:, 0])) for run in points)
    max_bins = round(last / distance) if distance else 1
    return np.linspace(0, last, max(1, min(bins, max_bins)) + 1)


def bin_centers(edges: np.ndarray) -> np.ndarray:
    return (edges[1:] + edges[:-1]) / 2


def bin_run(points: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the mean value of a run in each bin.

    Bins without a point are interpolated between their neighbors; NaN before the first
    and after the last point of the run.
    """
    x, values = points.T
    index = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
    count = np.bincount(index, minlength=len(edges) - 1)
    total = np.bincount(index, values, minlength=len(edges) - 1)
    known = count > 0
    centers = bin_centers(edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = total / count
    filled = np.interp(centers, centers[known], means[known])
    first, last = np.flatnonzero(known)[[0, -1]]
    filled[:first], filled[last + 1 :] = np.nan, np.nan
    return filled


def make_curve(points: Sequence[np.ndarray], edges: np.ndarray) -> Curve:
    """Average the runs of one method and task on common bins."""
    curves = np.stack([bin_run(run, edges) for run in points])
    has_values = np.isfinite(curves).any(0)
    means = mean_with_band([curves[:, has_values]])
    return Curve(bin_centers(edges)[has_values], *means, len(points))


def aggregate_curve(
    points: Mapping[str, Sequence[np.ndarray]],
    edges: np.ndarray,
    scale: Callable[[str, np.ndarray], np.ndarray],
) -> Curve:
    """Interquartile mean over all runs of all tasks, in bins that all tasks reach.

    `scale` makes the values of a task comparable with those of others.
    """
    curves = {
        task: scale(task, np.stack([bin_run(run, edges) for run in runs]))
        for task, runs in points.items()
    }
    known = {task: np.isfinite(values) for task, values in curves.items()}
    complete = np.all([values.any(0) for values in known.values()], 0)
    rows = [
        aggregate(
            {t: values[known[t][:, i], i].tolist() for t, values in curves.items()},
            interquartile_mean,
            resamples=RESAMPLES,
        )
        for i in np.flatnonzero(complete)
    ]
    mean, low, high = np.array(rows, float).reshape(-1, 3).T
    runs = max(map(len, points.values()))
    return Curve(bin_centers(edges)[complete], mean, low, high, runs)
