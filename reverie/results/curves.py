"""Learning curves on common bins of x, averaged over runs, with bootstrap intervals.

The points of a run are an array `(n, 2)` of x (such as frames) and value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reverie.results.statistics import aggregate, interquartile_mean, mean_with_band

BINS = 40
"""Default maximum number of bins."""
RESAMPLES = 500
"""Bootstrap samples per bin of an aggregate over tasks."""


class Curve(NamedTuple):
    """Mean or interquartile mean over runs in each bin, with confidence interval.

    The interval is NaN if there is only one run.
    """

    x: np.ndarray  # centers of the bins
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int  # number of runs; over several tasks, the largest number of a task


def bin_edges(points: Sequence[np.ndarray], bins: int = BINS) -> np.ndarray:
    """Return the edges of at most `bins` bins from zero to the largest x of all runs.

    The width of a bin is a round number. If the mean distance between the episodes of a
    run is larger than this width, the width is this distance, so that long episodes do
    not leave bins empty. The last bin can be up to half a width shorter or longer.
    """
    last = max(float(run[:, 0].max()) for run in points) or 1.0
    distance = max(float(run[:, 0].max()) / len(np.unique(run[:, 0])) for run in points)
    width = distance if distance > last / bins else _round_up(last / bins)
    count = max(1, round(last / width))
    return np.append(width * np.arange(count), last)


def _round_up(value: float) -> float:
    """Round a positive number up to 1, 2, 2.5 or 5 times a power of ten.

    The tolerance of 1e-9 keeps rounding errors from changing an exact value.
    """
    power = 10.0 ** np.floor(np.log10(value) + 1e-9)
    factors = (1, 2, 2.5, 5, 10)
    return float(next(m * power for m in factors if m * power >= value * (1 - 1e-9)))


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
    has_points = count > 0
    centers = bin_centers(edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = total / count
    filled = np.interp(centers, centers[has_points], means[has_points])
    first, last = np.flatnonzero(has_points)[[0, -1]]
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
    normalize: Callable[[str, np.ndarray], np.ndarray],
) -> Curve:
    """Return the interquartile mean over all runs of all tasks, by bin.

    Bins in which a task has no data are left out.

    `normalize` makes the values of a task comparable with those of other tasks.
    """
    curves = {
        task: normalize(task, np.stack([bin_run(run, edges) for run in runs]))
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
