"""Learning curves on common bins of x, and final scores with their window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reverie.results.runs import Run
from reverie.results.statistics import mean_band

BINS = 40


class Curve(NamedTuple):
    """Mean over runs at the centers of bins, with its band (NaN for one run)."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int


def bin_edges(points: Sequence[np.ndarray], bins: int = BINS) -> np.ndarray:
    """Return edges of equal bins from zero to the largest x of all runs.

    No more bins than the shortest run has distinct positions: where episodes have a
    fixed length, narrower bins would be empty in turns.
    """
    last = max(float(run[:, 0].max()) for run in points)
    distinct = min(len(np.unique(run[:, 0])) for run in points)
    return np.linspace(0, last or 1.0, max(1, min(bins, distinct)) + 1)


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
    centers = (edges[1:] + edges[:-1]) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        means = total / count
    filled = np.interp(centers, centers[known], means[known])
    first, last = np.flatnonzero(known)[[0, -1]]
    filled[:first], filled[last + 1 :] = np.nan, np.nan
    return filled


def make_curve(points: Sequence[np.ndarray], edges: np.ndarray) -> Curve:
    """Average the runs of one method and task on common bins."""
    curves = np.stack([bin_run(run, edges) for run in points])
    some = np.isfinite(curves).any(0)
    centers, curves = ((edges[1:] + edges[:-1]) / 2)[some], curves[:, some]
    return Curve(centers, np.nanmean(curves, 0), *mean_band(curves), len(points))


class Window(NamedTuple):
    """The part of a run whose episodes count for its final score."""

    start: float
    end: float
    x: str

    def __str__(self) -> str:
        return f"episodes at {self.start:,.6g} to {self.end:,.6g} {self.x}"


def final_window(
    runs: Sequence[Run], x: str, budget: float, share: float, key: str
) -> Window:
    """Return the last `share` of the budget; without one, of the longest run."""
    if not budget:
        ends = [float(p[:, 0].max()) for r in runs if len(p := r.points(key, x))]
        budget = max(ends, default=0.0)
    return Window(budget * (1 - share), budget, x)


def final_score(run: Run, key: str, window: Window) -> float | None:
    """Return the mean in the window; the last value before it if there is none."""
    points = run.points(key, window.x)
    points = points[points[:, 0] <= window.end]
    if not len(points):
        return None
    inside = points[points[:, 0] > window.start]
    return float(inside[:, 1].mean() if len(inside) else points[-1, 1])
