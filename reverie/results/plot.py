"""Figures of several runs: learning curves, performance profiles and aggregates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reverie.api import UserError
from reverie.render.panels import (
    Interval,
    IntervalPanel,
    Line,
    Panel,
    draw_intervals,
    draw_panels,
)
from reverie.results.benchmarks import Baseline, human_normalized_score
from reverie.results.curves import (
    BINS,
    Curve,
    aggregate_curve,
    bin_edges,
    make_curve,
)
from reverie.results.report import Report, describe_windows
from reverie.results.runs import Groups
from reverie.results.statistics import (
    AGGREGATES,
    aggregate,
    exceedance,
    interquartile_mean,
    mean_with_band,
)

NAMES = {
    "episode/score": "score",
    "episode/success": "success rate",
    "episode/length": "episode length",
}
"""Labels of metrics in figures."""
UNITS = {"frames": "frames", "step": "agent steps", "hours": "hours"}
RATES = ("episode/success",)
"""Metrics between 0 and 1, which need no normalization across tasks."""
BAND = "band: 95 % stratified bootstrap over seeds"

Points = dict[str, dict[str, list[np.ndarray]]]
"""(x, value) of the episodes of each run, by method and task."""


class ScoreNormalization(NamedTuple):
    """Makes the values of different tasks comparable."""

    name: str
    function: Callable[[str, np.ndarray], np.ndarray]


def read_points(groups: Groups, key: str, x: str) -> Points:
    """Return the values of all runs that have values of this metric."""
    points: Points = {}
    for method, by_task in groups.items():
        for task, runs in by_task.items():
            known = [p for run in runs if len(p := run.points(key, x))]
            if known:
                points.setdefault(method, {})[task] = known
    return points


def draw_curves(
    points: Points,
    key: str,
    x: str,
    bins: int = BINS,
    baseline: Baseline | None = None,
) -> Any:
    """Draw learning curves: a panel per task, and one of the aggregate over tasks."""
    tasks = _tasks_of(points)
    label, y_range = NAMES.get(key, key), (0.0, 1.0) if key in RATES else None
    labels = _method_labels(points)
    panels, widths = [], set()
    for task in tasks:
        runs = [r for by_task in points.values() for r in by_task.get(task, [])]
        edges = bin_edges(runs, bins)
        widths.add(float(edges[1]))
        lines = [
            _to_line(labels[method], make_curve(by_task[task], edges))
            for method, by_task in points.items()
            if task in by_task
        ]
        references = {}
        if baseline is not None and task in baseline.scores:
            references[baseline.name] = baseline.scores[task]
        panels.append(Panel(task, lines, references, UNITS[x], label, y_range))
    if len(tasks) > 1:
        panel = _aggregate_panel(points, key, x, bins, baseline, y_range)
        panels += [panel] if panel.lines else []
    width = _format_width(min(widths))
    if max(widths) > 1.01 * min(widths):
        width += f" to {_format_width(max(widths))}"
    caption = f"Mean of episodes in bins of {width} {UNITS[x]}"
    has_band = any(np.isfinite(line.low).any() for p in panels for line in p.lines)
    caption += f"; {BAND}." if has_band else "; one seed, so there is no band."
    return draw_panels(panels, caption)


def draw_profiles(report: Report) -> Any:
    """Draw the fraction of runs that exceed each score, by method."""
    scores: dict[str, dict[str, list[float]]] = {}
    for row in report.rows:
        scores.setdefault(row.method, {})[row.task] = row.scores
    tasks = sorted({task for by_task in scores.values() for task in by_task})
    scaled = {
        method: {
            task: [
                x if (y := human_normalized_score(task, x)) is None else y
                for x in values
            ]
            for task, values in by_task.items()
        }
        for method, by_task in scores.items()
    }
    if len(tasks) > 1 and any(
        human_normalized_score(task, 0.0) is None for task in tasks
    ):
        raise UserError(
            f"The scores of {', '.join(tasks[:4])} have no common scale for a "
            "performance profile.\n  Fix: give the runs of one task, or of Atari games "
            "only, whose scores are normalized."
        )
    values = [x for by_task in scaled.values() for t in by_task.values() for x in t]
    low, high = min(*values, 0.0), max(values)
    thresholds = np.linspace(low, high + 0.02 * (high - low), 401)
    labels = _method_labels(scaled)
    lines = []
    for method, by_task in scaled.items():
        curve = mean_with_band(exceedance(by_task, thresholds))
        lines.append(Line(labels[method], thresholds, *curve))
    label = (
        "human-normalized score"
        if human_normalized_score(tasks[0], 0.0) is not None
        else "score"
    )
    title = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
    panel = Panel(title, lines, {}, label, "fraction of runs above", (0.0, 1.0))
    return draw_panels([panel], describe_windows(report))


def draw_aggregates(report: Report) -> Any:
    """Draw mean, median, IQM and optimality gap of normalized scores, by method."""
    if not report.aggregates:
        raise UserError(
            "The tasks of these runs have no normalized scores to aggregate.\n"
            "  Fix: --kind curves, whose last panel is an aggregate over tasks."
        )
    panels = [
        IntervalPanel(
            name,
            [Interval(method, *row[name]) for method, row in report.aggregates.items()],
            "human-normalized score",
        )
        for name in AGGREGATES
    ]
    return draw_intervals(panels, describe_windows(report))


def draw_improvements(report: Report) -> Any:
    """Draw the probability of improvement of each pair of methods."""
    if not report.improvements:
        raise UserError(
            "A probability of improvement needs two methods with runs of the same "
            "task.\n  Fix: give runs of two agents or settings, or choose the setting "
            "that distinguishes them: --by SETTING."
        )
    rows = [
        Interval(name.replace(" over ", "\nover "), *value)
        for name, value in report.improvements.items()
    ]
    panel = IntervalPanel("", rows, "probability of improvement", 0.5, (0.0, 1.0))
    return draw_intervals([panel], describe_windows(report))


def _aggregate_panel(
    points: Points,
    key: str,
    x: str,
    bins: int,
    baseline: Baseline | None,
    y_range: tuple[float, float] | None,
) -> Panel:
    """Interquartile mean of the methods that have runs of all tasks."""
    tasks = _tasks_of(points)
    runs = [r for by_task in points.values() for rs in by_task.values() for r in rs]
    edges = bin_edges(runs, bins)
    scale = _make_scale(points, key)
    labels = _method_labels(points)
    lines = [
        _to_line(labels[method], curve)
        for method, by_task in points.items()
        if len(by_task) == len(tasks)
        and len((curve := aggregate_curve(by_task, edges, scale.function)).x)
    ]
    references = {}
    if baseline is not None and {*tasks} <= {*baseline.scores}:
        published = {
            task: scale.function(task, np.array([baseline.scores[task]])).tolist()
            for task in tasks
        }
        estimate = aggregate(published, interquartile_mean)
        references[baseline.name] = estimate.value
    title = f"IQM of {len(tasks)} tasks"
    return Panel(title, lines, references, UNITS[x], scale.name, y_range)


def _make_scale(points: Points, key: str) -> ScoreNormalization:
    """Return the human normalization, or a min-max normalization per task."""
    tasks = _tasks_of(points)
    if key in RATES:
        return ScoreNormalization(NAMES[key], lambda task, values: values)
    if key == "episode/score" and all(
        human_normalized_score(t, 0.0) is not None for t in tasks
    ):
        return ScoreNormalization("human-normalized score", _normalize_array)
    ranges = {}
    for task in tasks:
        runs = [r for by_task in points.values() for r in by_task.get(task, [])]
        curves = np.concatenate([run[:, 1] for run in runs])
        ranges[task] = (float(curves.min()), float(np.ptp(curves)) or 1.0)
    return ScoreNormalization(
        f"{NAMES.get(key, key)}, min-max normalized per task",
        lambda task, values: (values - ranges[task][0]) / ranges[task][1],
    )


def _normalize_array(task: str, values: np.ndarray) -> np.ndarray:
    zero, one = human_normalized_score(task, 0.0), human_normalized_score(task, 1.0)
    assert zero is not None
    assert one is not None
    return zero + (one - zero) * values


def _format_width(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _to_line(name: str, curve: Curve) -> Line:
    return Line(name, curve.x, curve.mean, curve.low, curve.high)


def _tasks_of(points: Points) -> list[str]:
    return sorted({task for by_task in points.values() for task in by_task})


def _method_labels(groups: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, str]:
    """Return the label of each method: its name and number of seeds."""
    labels = {}
    for method, by_task in groups.items():
        low, high = (f(len(runs) for runs in by_task.values()) for f in (min, max))
        count = str(low) if low == high else f"{low}–{high}"
        labels[method] = f"{method} ({count} seed{'s' if high > 1 else ''})"
    return labels
