"""Figures of several runs: learning curves, performance profiles and aggregates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from reverie.results.benchmarks import (
    RATES,
    Baseline,
    Normalization,
    find_normalization,
)
from reverie.results.curves import (
    BINS,
    Curve,
    aggregate_curve,
    bin_edges,
    make_curve,
)
from reverie.results.report import (
    Report,
    describe_windows,
    label_method,
    normalize_scores,
)
from reverie.results.runs import CRAFTER_SCORE, SCORE, SUCCESS, Groups
from reverie.results.statistics import (
    AGGREGATES,
    exceedance,
    interquartile_mean,
    mean_with_band,
)

NAMES = {
    SCORE: "score",
    SUCCESS: "success rate",
    "episode/length": "episode length",
    CRAFTER_SCORE: "Crafter score (%)",
}
"""Labels of metrics in figures."""
UNITS = {"frames": "frames", "step": "agent steps", "hours": "hours"}
LOWER_IS_BETTER = "optimality gap"
BAND = "band: 95 % stratified bootstrap over seeds"

Points = dict[str, dict[str, list[np.ndarray]]]
"""(x, value) of the episodes of each run, by method and task."""


def read_points(groups: Groups, key: str, x: str) -> Points:
    """Return the values of a metric in all runs that have logged it."""
    points: Points = {}
    for method, by_task in groups.items():
        for task, runs in by_task.items():
            logged = [p for run in runs if len(p := run.points(key, x))]
            if logged:
                points.setdefault(method, {})[task] = logged
    return points


def draw_curves(
    points: Points,
    key: str,
    x: str,
    bins: int = BINS,
    baselines: Sequence[Baseline] = (),
) -> Any:
    """Draw learning curves: a panel per task, and one for the aggregate over tasks."""
    tasks = _tasks_of(points)
    label, y_range = NAMES.get(key, key), (0.0, 1.0) if key in RATES else None
    labels, prefix = _method_labels(points), _common_suite(tasks)
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
        references = {b.name: b.scores[task] for b in baselines if task in b.scores}
        title = task.removeprefix(prefix).replace("_", " ") if prefix else task
        panels.append(Panel(title, lines, references, UNITS[x], label, y_range))
    if len(tasks) > 1:
        panel = _aggregate_panel(points, key, x, bins, baselines, y_range)
        panels += [panel] if panel.lines else []
    return draw_panels(panels, _curve_caption(panels, widths, key, x, prefix))


def _curve_caption(
    panels: Sequence[Panel], widths: set[float], key: str, x: str, prefix: str
) -> str:
    """Return sentences about the lines and bands of learning curves."""
    width = _format_width(min(widths))
    # widths that differ by less than 1 % are described as one
    if max(widths) > 1.01 * min(widths):
        width += f" to {_format_width(max(widths))}"
    values = "episodes" if key.startswith("episode/") else "logged values"
    if key == CRAFTER_SCORE:
        values = "the scores of all episodes so far"
    caption = f"Mean of {values} in bins of {width} {UNITS[x]}"
    has_band = any(np.isfinite(line.low).any() for p in panels for line in p.lines)
    caption += f"; {BAND}." if has_band else "; one seed, so there is no band."
    if any(panel.references for panel in panels):
        caption += " Dashed lines: published scores at the end of the training."
    return caption + (f" Tasks: {prefix}*." if prefix else "")


def _common_suite(tasks: Sequence[str]) -> str:
    """Return the suite that all tasks have as a prefix, such as `atari100k_`."""
    suites = {task.partition("_")[0] for task in tasks if "_" in task}
    has_suite = len(tasks) > 1 and len(suites) == 1 and all("_" in t for t in tasks)
    return f"{suites.pop()}_" if has_suite else ""


def draw_profiles(report: Report) -> Any:
    """Draw performance profiles: the fraction of runs above each score, by method."""
    scores: dict[str, dict[str, list[float]]] = {}
    for row in report.rows:
        scores.setdefault(row.method, {})[row.task] = row.scores
    tasks = sorted({task for by_task in scores.values() for task in by_task})
    name = NAMES.get(report.metric, report.metric)
    scale = report.normalization or Normalization(name, lambda task, values: values)
    if len(tasks) > 1 and report.normalization is None:
        raise UserError(
            f"The scores of {', '.join(tasks[:4])} have no common scale for a "
            "performance profile.\n  Fix: give the runs of one task, or of one suite "
            "with normalized scores: Atari, Procgen or DMC."
        )
    scaled = {m: normalize_scores(by_task, scale) for m, by_task in scores.items()}
    values = [x for by_task in scaled.values() for t in by_task.values() for x in t]
    low, high = min(*values, 0.0), max(values)
    thresholds = np.linspace(low, high + 0.02 * (high - low), 401)
    labels = _method_labels(scaled)
    lines = []
    for method, by_task in scaled.items():
        curve = mean_with_band(exceedance(by_task, thresholds))
        lines.append(Line(labels[method], thresholds, *curve))
    title = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
    panel = Panel(title, lines, {}, scale.name, "fraction of runs above", (0.0, 1.0))
    return draw_panels([panel], describe_windows(report))


def draw_aggregates(report: Report) -> Any:
    """Draw mean, median, IQM and optimality gap of normalized scores, by method."""
    if report.normalization is None:
        raise UserError(
            "The tasks of these runs have no normalized scores to aggregate.\n"
            "  Fix: --kind curves, whose last panel is an aggregate over tasks."
        )
    panels = [
        IntervalPanel(
            f"{name} (lower is better)" if name == LOWER_IS_BETTER else name,
            [
                Interval(label_method(report, method), *row[name])
                for method, row in report.aggregates.items()
            ],
            report.normalization.name,
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
    baselines: Sequence[Baseline],
    y_range: tuple[float, float] | None,
) -> Panel:
    """Return a panel with the IQM of every method that has runs of all tasks."""
    tasks = _tasks_of(points)
    runs = [
        run
        for by_task in points.values()
        for task_runs in by_task.values()
        for run in task_runs
    ]
    edges = bin_edges(runs, bins)
    normalization = _choose_normalization(points, key)
    labels = _method_labels(points)
    lines = [
        _to_line(labels[method], curve)
        for method, by_task in points.items()
        if len(by_task) == len(tasks)
        and len((curve := aggregate_curve(by_task, edges, normalization.function)).x)
    ]
    references = {
        baseline.name: interquartile_mean(
            [
                normalization.function(task, np.array(_runs_of(baseline, task)))
                for task in tasks
            ]
        )
        for baseline in baselines
        if {*tasks} <= {*baseline.scores}
    }
    title = f"IQM of {len(tasks)} tasks"
    return Panel(title, lines, references, UNITS[x], normalization.name, y_range)


def _runs_of(baseline: Baseline, task: str) -> list[float]:
    """Return the published scores of all runs, or their mean."""
    return baseline.runs.get(task, [baseline.scores[task]])


def _choose_normalization(points: Points, key: str) -> Normalization:
    """Return the normalization of the benchmark; without one, min-max per task."""
    tasks = _tasks_of(points)
    if (found := find_normalization(key, tasks)) is not None:
        return found
    ranges = {}
    for task in tasks:
        runs = [r for by_task in points.values() for r in by_task.get(task, [])]
        curves = np.concatenate([run[:, 1] for run in runs])
        ranges[task] = (float(curves.min()), float(np.ptp(curves)) or 1.0)
    return Normalization(
        f"{NAMES.get(key, key)}, min-max normalized per task",
        lambda task, values: (values - ranges[task][0]) / ranges[task][1],
    )


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
        seeds = f"{count} seed{'s' if high > 1 else ''}"
        has_remark = method.endswith(")")  # as in `IRIS (published)`
        labels[method] = (
            f"{method[:-1]}, {seeds})" if has_remark else f"{method} ({seeds})"
        )
    return labels
