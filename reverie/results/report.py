"""Tables of results: task × method, and aggregates over tasks."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from reverie.results.benchmarks import Baseline, human_normalized_score
from reverie.results.runs import Groups, Run
from reverie.results.scores import ScoreWindow, final_score, final_window, has_episode
from reverie.results.statistics import (
    AGGREGATES,
    Estimate,
    aggregate,
    mean,
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
    seeds: list[int]
    hours: float | None
    gpu: str
    commits: list[str]
    command: str


class Report(NamedTuple):
    """Results of all tasks and methods, and their aggregates."""

    rows: list[Row]
    aggregates: dict[str, dict[str, Estimate]]
    """Statistics over normalized scores, by method; empty if tasks have none."""
    improvements: dict[str, Estimate]
    """Probability of improvement, by `A over B`."""
    windows: dict[str, ScoreWindow]
    """By task."""
    sources: list[str]
    """Where published results come from."""
    runs_without_final_episodes: int = 0
    """Number of runs without an episode in the window of their task."""


def make_report(
    groups: Groups,
    key: str,
    x: str = "frames",
    budget: float = 0.0,
    fraction: float = 0.05,
    baseline: Baseline | None = None,
) -> Report:
    """Compute the final scores of all runs and their aggregates.

    The final score of a run is the mean of the episodes in the last `fraction` of
    the budget; without a budget, of the longest run of the task.
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
    scores = {m: _scores_of(rows, m) for m in groups}
    normalized = {m: _normalized(by_task) for m, by_task in scores.items()}
    sources = []
    if baseline is not None:
        rows += _baseline_rows(baseline, tasks)
        published = {
            task: [baseline.scores[task]] for task in tasks if task in baseline.scores
        }
        scores[baseline.name] = published
        normalized[baseline.name] = _normalized(published)
        sources.append(f"{baseline.name}: {baseline.source}")
    aggregates = {
        method: {name: aggregate(values, f) for name, f in AGGREGATES.items()}
        for method, values in normalized.items()
        if values and len(values) == len(scores[method])
    }
    methods = list(groups)
    improvements = {
        f"{a} over {b}": probability_of_improvement(scores[a], scores[b])
        for i, a in enumerate(methods)
        for b in methods[i + 1 :]
        if {*scores[a]} & {*scores[b]}
    }
    without_episodes = sum(
        final_score(run, key, windows[task]) is not None
        and not has_episode(run, key, windows[task])
        for by_task in groups.values()
        for task, runs in by_task.items()
        for run in runs
    )
    return Report(rows, aggregates, improvements, windows, sources, without_episodes)


def _make_row(
    task: str, method: str, runs: Sequence[Run], key: str, window: ScoreWindow
) -> Row | None:
    scored = [(r, s) for r in runs if (s := final_score(r, key, window)) is not None]
    if not scored:
        return None
    seconds = [run.seconds for run, _ in scored]
    known = [value for value in seconds if value]
    about = [run.about for run, _ in scored]
    values = [score for _, score in scored]
    return Row(
        task,
        method,
        values,
        aggregate({task: values}, mean),
        [run.seed for run, _ in scored],
        sum(known) / len(known) / 3600 if known else None,
        _join(str(entry.get("gpu") or "CPU") for entry in about),
        sorted({str(entry["commit"]) for entry in about if entry.get("commit")}),
        describe_command(about[0].get("command")),
    )


def _baseline_rows(baseline: Baseline, tasks: Iterable[str]) -> list[Row]:
    nan = float("nan")
    return [
        Row(
            task,
            baseline.name,
            [baseline.scores[task]],
            Estimate(baseline.scores[task], nan, nan),
            list(range(baseline.seeds[task])),
            None,
            "",
            [],
            PUBLISHED,
        )
        for task in tasks
        if task in baseline.scores
    ]


def _scores_of(rows: Iterable[Row], method: str) -> dict[str, list[float]]:
    return {row.task: row.scores for row in rows if row.method == method}


def _normalized(scores: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return human-normalized scores of the tasks for which they are defined."""
    result = {}
    for task, values in scores.items():
        normalized = [human_normalized_score(task, value) for value in values]
        if all(value is not None for value in normalized):
            result[task] = [float(value or 0.0) for value in normalized]
    return result


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted({*names}))


def describe_command(words: Any) -> str:
    """Return the command of a run without the path of the program."""
    if isinstance(words, str):
        return words
    if not isinstance(words, list) or not words:
        return ""
    return " ".join(["reverie", *map(str, words[1:])])


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
    return [
        [method, *(format_estimate(values[name]) for name in AGGREGATES)]
        for method, values in report.aggregates.items()
    ]


def describe_windows(report: Report) -> str:
    """Return a sentence that states which episodes the final scores average."""
    windows = {window for window in report.windows.values() if window.end}
    shares = {round(100 * (1 - window.start / window.end), 3) for window in windows}
    if len(windows) > 1 and len(shares) == 1:  # each task has its own budget
        ends = sorted(window.end for window in windows)
        unit = next(iter(windows)).x
        text = (
            f"episodes in the last {shares.pop():g} % of the training of each task, "
            f"which ends at {ends[0]:,.6g} to {ends[-1]:,.6g} {unit}"
        )
    else:
        text = "; ".join(sorted(map(str, windows)))
    text = f"Score: mean of {text}."
    if count := report.runs_without_final_episodes:
        runs = "1 run has" if count == 1 else f"{count} runs have"
        text += f" {runs} no episode there; the last earlier episode counts instead."
    estimates = [row.estimate for row in report.rows]
    if any(math.isfinite(estimate.low) for estimate in estimates):
        text += " Intervals: 95 % bootstrap over seeds."
    return text


def to_markdown(report: Report) -> str:
    parts = [describe_windows(report), "", *_markdown(COLUMNS, _cells(report))]
    if report.aggregates:
        parts += ["", "Human-normalized scores over tasks:", ""]
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
        parts += ["", *_latex(("method", *AGGREGATES), _aggregate_cells(report))]
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

    data = {
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
