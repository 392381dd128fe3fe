"""Final scores of runs: the mean score in a window at the end of the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reverie.results.runs import CRAFTER_SCORE, Run


class ScoreWindow(NamedTuple):
    """The part of a run whose episodes are averaged to the final score."""

    start: float
    """Start, exclusive."""
    end: float
    """End, inclusive."""
    x: str
    """Unit of start and end: `frames`, `step` or `hours`."""

    def __str__(self) -> str:
        return f"episodes {self.range}"

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def range(self) -> str:
        """Start and end as text."""
        return f"at {self.start:,.6g} to {self.end:,.6g} {self.x}"


def final_window(
    runs: Sequence[Run], x: str, budget: float, fraction: float, key: str
) -> ScoreWindow:
    """Return the window with the last `fraction` of the budget.

    For the Crafter score, it is the whole budget. A budget of 0 means the length of the
    longest run.
    """
    if not budget:
        ends = [float(p[:, 0].max()) for r in runs if len(p := r.points(key, x))]
        budget = max(ends, default=0.0)
    start = 0.0 if key == CRAFTER_SCORE else budget * (1 - fraction)
    return ScoreWindow(start, budget, x)


def final_score(run: Run, key: str, window: ScoreWindow) -> float | None:
    """Return the mean of a metric in the window.

    If a run has no value there, because it ended earlier, the window is moved to its
    last value. The Crafter score is a value of all episodes up to a point, so its last
    value is returned. None if the run has no value up to the end of the window.
    """
    points = run.points(key, window.x)
    points = points[points[:, 0] <= window.end]
    if not len(points):
        return None
    if key == CRAFTER_SCORE:
        return float(points[-1, 1])
    last = float(points[:, 0].max())
    start = window.start if last > window.start else last - window.length
    return float(points[points[:, 0] > start][:, 1].mean())


def has_episode(run: Run, key: str, window: ScoreWindow) -> bool:
    """True if a run has a value in the window."""
    x = run.points(key, window.x)[:, 0]
    return bool(((x > window.start) & (x <= window.end)).any())
