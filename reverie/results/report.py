"""Tables of results: task × method, and aggregates over tasks."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reverie.results.benchmarks import Baseline, Normalization, find_normalization
from reverie.results.runs import CRAFTER_SCORE, SCORE, Groups, Run
from reverie.results.scores import ScoreWindow, final_score, final_window, has_episode
from reverie.results.statistics import (
    AGGREGATES,
    Estimate,
    Statistic,
    aggregate,
    mean,
    optimality_gap,
    probability_of_improvement,
)

PUBLISHED = "published"
"""Entry for published results in the column `command`."""


class Row(NamedTuple):
    """The result of one method on one task."""

    task: str
    method: str
    scores: list[float]
    """Final score of each run."""
    estimate: Estimate
    """Mean of the scores, with its confidence interval."""
    seeds: list[int]
    hours: float | None
    """Mean duration of the training."""
    gpu: str
    commits: list[str]
    command: str


class Report(NamedTuple):
    """Results of all tasks and methods, and their aggregates."""

    rows: list[Row]
    aggregates: dict[str, dict[str, Estimate]]
    """Statistics over tasks, by method; empty if scores of the tasks are not
    comparable."""
    improvements: dict[str, Estimate]
    """Probability of improvement, by `A over B`."""
    windows: dict[str, ScoreWindow]
    """The window of the final scores, by task."""
    sources: list[str]
    """Where published results come from."""
    runs_without_final_episodes: int = 0
    """Number of runs without an episode in the window of their task."""
    metric: str = SCORE
    normalization: Normalization | None = None
    """Makes the scores of these tasks comparable; None if that is not possible."""


def make_report(
    groups: Groups,
    key: str,
    x: str = "frames",
    budget: float = 0.0,
    fraction: float = 0.05,
    baselines: Sequence[Baseline] = (),
) -> Report:
    """Compute the final scores of all runs and their aggregates.

    The final score of a run is the mean of `key` over the episodes in the last
    `fraction` of the budget. `x` is the unit of the budget: `frames`, `step` or
    `hours`. The default budget is the length of the longest run of the task.
    """
    tasks = sorted({task for by_task in groups.values() for task in by_task})
    windows = {
        task: final_window(
            [run for by_task in groups.values() for run in by_task.get(task, [])],
            x,
            budget,
            fraction,
            key,
        )
        for task in tasks
    }
    rows = [
        row
        for task in tasks
        for method, by_task in groups.items()
        if (row := _make_row(task, method, by_task.get(task, []), key, windows[task]))
    ]
    sources = [f"{baseline.name}: {baseline.source}" for baseline in baselines]
    rows += [row for baseline in baselines for row in _baseline_rows(baseline, tasks)]
    rows.sort(key=lambda row: row.task)
    scores: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        scores.setdefault(row.method, {})[row.task] = row.scores
    normalization = find_normalization(key, {row.task for row in rows})
    aggregates = {}
    if normalization is not None:
        statistics = _statistics(normalization)
        aggregates = {
            method: {name: aggregate(values, f) for name, f in statistics.items()}
            for method, by_task in scores.items()
            if (values := normalize_scores(by_task, normalization))
        }
    # runs are compared in pairs, which is not possible if only means are published
    with_runs = [b.name for b in baselines if {*b.runs} & {*tasks}]
    methods = [*groups, *with_runs]
    improvements = {
        f"{a} over {b}": probability_of_improvement(scores[a], scores[b])
        for i, a in enumerate(methods)
        for b in methods[i + 1 :]
        if {*scores.get(a, ())} & {*scores.get(b, ())}
    }
    without_episodes = sum(
        final_score(run, key, windows[task]) is not None
        and not has_episode(run, key, windows[task])
        for by_task in groups.values()
        for task, runs in by_task.items()
        for run in runs
    )
    return Report(
        rows,
        aggregates,
        improvements,
        windows,
        sources,
        without_episodes,
        key,
        normalization,
    )


def normalize_scores(
    scores: Mapping[str, Sequence[float]], normalization: Normalization
) -> dict[str, list[float]]:
    """Return the normalized scores of all runs, by task."""
    return {
        task: normalization.function(task, np.array(values)).tolist()
        for task, values in scores.items()
    }


def _statistics(normalization: Normalization) -> dict[str, Statistic]:
    """Return the aggregates over tasks, with the target of the normalization."""
    gap = functools.partial(optimality_gap, target=normalization.target)
    return {k: gap if f is optimality_gap else f for k, f in AGGREGATES.items()}


def _make_row(
    task: str, method: str, runs: Sequence[Run], key: str, window: ScoreWindow
) -> Row | None:
    """Return the result of a method on a task; None if no run has a score."""
    scored = [(r, s) for r in runs if (s := final_score(r, key, window)) is not None]
    if not scored:
        return None
    seconds = [value for run, _ in scored if (value := run.seconds)]
    about = [run.about for run, _ in scored]
    values = [score for _, score in scored]
    return Row(
        task,
        method,
        values,
        aggregate({task: values}, mean),
        [run.seed for run, _ in scored],
        sum(seconds) / len(seconds) / 3600 if seconds else None,
        ", ".join(sorted({str(entry.get("gpu") or "CPU") for entry in about})),
        sorted({str(entry["commit"]) for entry in about if entry.get("commit")}),
        describe_command(about[0].get("command")),
    )


def _baseline_rows(baseline: Baseline, tasks: Iterable[str]) -> list[Row]:
    """Return the published results of those tasks that the baseline contains."""
    rows = []
    for task in tasks:
        if task in baseline.scores:
            scores = baseline.runs.get(task, [baseline.scores[task]])
            estimate = aggregate({task: scores}, mean)
            seeds = list(range(baseline.seeds[task]))
            row = Row(
                task, baseline.name, scores, estimate, seeds, None, "", [], PUBLISHED
            )
            rows.append(row)
    return rows


def describe_command(words: Any) -> str:
    """Return the command of a run for a shell, without the path of the program."""
    if isinstance(words, str):
        return words
    if not isinstance(words, list) or not words:
        return ""
    return shlex.join(["reverie", *map(str, words[1:])])


def format_estimate(estimate: Estimate) -> str:
    """Format a value with its interval, if it has one."""
    value, low, high = map(format_number, estimate)
    return value if math.isnan(estimate.low) else f"{value} [{low}, {high}]"


def format_number(value: float) -> str:
    """Format a score with 0, 1 or up to 3 decimals, depending on its magnitude."""
    if not math.isfinite(value):
        return str(value)
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 3
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


COLUMNS = ("task", "method", "score", "seeds", "hours", "GPU", "commit", "command")


def _cells(report: Report) -> list[list[str]]:
    """Return the texts of the table of results, with `COLUMNS`."""
    return [
        [
            row.task,
            row.method,
            format_estimate(row.estimate),
            str(len(row.seeds)),
            "" if row.hours is None else f"{row.hours:.2f}",
            row.gpu,
            ", ".join(row.commits),
            row.command,
        ]
        for row in report.rows
    ]


def _aggregate_cells(report: Report) -> list[list[str]]:
    """Return the texts of the table of aggregates: a row per method."""
    return [
        [label_method(report, method), *(format_estimate(x) for x in values.values())]
        for method, values in report.aggregates.items()
    ]


def label_method(report: Report, method: str) -> str:
    """Return the name of a method, with its number of tasks if it lacks some."""
    count = sum(row.method == method for row in report.rows)
    total = len({row.task for row in report.rows})
    return method if count == total else f"{method} ({count} of {total} tasks)"


def describe_windows(report: Report) -> str:
    """Return a sentence about the episodes whose mean is the final score."""
    metric, windows = report.metric, {w for w in report.windows.values() if w.end}
    is_episodic = metric == CRAFTER_SCORE or metric.startswith("episode/")
    value = "episode" if is_episodic else "logged value"
    percentages = {
        round(100 * (1 - window.start / window.end), 3) for window in windows
    }
    if len(windows) > 1 and len(percentages) == 1:  # each task has its own budget
        ends = sorted(window.end for window in windows)
        unit = next(iter(windows)).x
        text = (
            f"in the last {percentages.pop():g} % of the training of each task, "
            f"which ends at {ends[0]:,.6g} to {ends[-1]:,.6g} {unit}"
        )
    else:
        text = "; ".join(sorted(window.range for window in windows))
    kind = "Crafter score" if metric == CRAFTER_SCORE else "mean"
    label = "Score" if metric in (SCORE, CRAFTER_SCORE) else metric
    text = f"{label}: {kind} of {value}s {text}."
    if count := report.runs_without_final_episodes:
        runs = "1 run has" if count == 1 else f"{count} runs have"
        text += f" {runs} no {value} in this window; the window of such a run is moved "
        text += f"to its last {value}."
    estimates = [row.estimate for row in report.rows]
    if any(math.isfinite(estimate.low) for estimate in estimates):
        text += " Intervals: 95 % bootstrap over seeds."
    return text


def _describe_aggregates(report: Report) -> str:
    """Return the title of the table of aggregates."""
    assert report.normalization is not None
    count = len({row.task for row in report.rows})
    name = report.normalization.name
    return f"{name[0].upper()}{name[1:]} over {count} task{'s' * (count > 1)}"


def to_markdown(report: Report) -> str:
    parts = [describe_windows(report), "", *_markdown(COLUMNS, _cells(report))]
    if report.aggregates:
        parts += ["", f"{_describe_aggregates(report)}:", ""]
        parts += _markdown(("method", *AGGREGATES), _aggregate_cells(report))
    for name, estimate in report.improvements.items():
        parts += [
            "",
            f"Probability of improvement, {name}: {format_estimate(estimate)}",
        ]
    parts += [line for source in report.sources for line in ("", source)]
    return "\n".join(parts) + "\n"


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in lines
    ]


def to_latex(report: Report) -> str:
    parts = [
        f"% {describe_windows(report)}",
        *_latex(COLUMNS[:-1], [row[:-1] for row in _cells(report)]),
    ]
    if report.aggregates:
        parts += ["", f"% {_describe_aggregates(report)}"]
        parts += _latex(("method", *AGGREGATES), _aggregate_cells(report))
    for name, estimate in report.improvements.items():
        value = format_estimate(estimate)
        parts.append(f"% Probability of improvement, {name}: {value}")
    parts += [
        f"% {row.method} on {row.task}: {row.command}"
        for row in report.rows
        if row.command != PUBLISHED
    ]
    parts += [f"% {source}" for source in report.sources]
    return "\n".join(parts) + "\n"


def _latex(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return " & ".join(map(_escape, cells)) + r" \\"

    return [
        rf"\begin{{tabular}}{{{'l' * len(columns)}}}",
        r"\hline",
        line(columns),
        r"\hline",
        *map(line, rows),
        r"\hline",
        r"\end{tabular}",
    ]


def _escape(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, f"\\{character}")
    return text


def to_csv(report: Report) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    columns = "task method score low high seeds hours gpu commit"
    writer.writerow(f"{columns} window_start window_end x command".split())
    for row in report.rows:
        numbers = ["" if math.isnan(value) else value for value in row.estimate]
        writer.writerow(
            [
                row.task,
                row.method,
                *numbers,
                len(row.seeds),
                row.hours,
                row.gpu,
                " ".join(row.commits),
                *report.windows[row.task],
                row.command,
            ]
        )
    return file.getvalue()


def to_json(report: Report) -> str:
    def estimate(value: Estimate) -> dict[str, float | None]:
        pairs = value._asdict().items()
        return {key: None if math.isnan(x) else x for key, x in pairs}

    normalization = report.normalization
    data = {
        "metric": report.metric,
        "normalization": normalization.name if normalization else None,
        "windows": {task: w._asdict() for task, w in report.windows.items()},
        "rows": [
            row._asdict() | {"estimate": estimate(row.estimate)} for row in report.rows
        ],
        "aggregates": {
            method: {name: estimate(value) for name, value in values.items()}
            for method, values in report.aggregates.items()
        },
        "improvements": {k: estimate(v) for k, v in report.improvements.items()},
        "sources": report.sources,
    }
    return json.dumps(data, indent=1) + "\n"


FORMATS: dict[str, Callable[[Report], str]] = {
    "md": to_markdown,
    "latex": to_latex,
    "csv": to_csv,
    "json": to_json,
}
