"""The objective: read a metric of a run from its files and summarize it as one number.

A metric is a series of values with their steps: one value per episode in `scores.jsonl`
or per log interval in `metrics.jsonl`, or a single number in `eval.json`. The first
file that contains the name is used, so `episode/score` is the score of single episodes
and not the average in `metrics.jsonl`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np

from reverie.api import UserError
from reverie.config import flatten, suggest
from reverie.log.jsonl import METRICS, SCORES, read_lines
from reverie.storage.limits import read_json

Summary = Literal["last", "best", "mean"]
Goal = Literal["min", "max"]
MetricSeries = list[tuple[float, float]]
"""(step, value) pairs in the order of writing; values that are not finite are NaN."""

SERIES_FILES = (SCORES, METRICS)
EVAL_FILE = "eval.json"
"""Result file of `reverie eval`."""
MAX_LISTED = 12
"""Maximum number of metrics that an error message lists."""


class MetricNotFound(UserError):
    """A finished run does not have the metric of the objective."""


def read_metric(run: Path, metric: str) -> MetricSeries:
    """Return the values of a metric so far; empty if the run does not have it."""
    for name in SERIES_FILES:
        lines = [line for line in read_lines(run / name) if metric in line]
        values = [math.nan if x[metric] is None else float(x[metric]) for x in lines]
        series = [(float(x["step"]), y) for x, y in zip(lines, values, strict=True)]
        if series:
            return series
    numbers = _read_summary(run / EVAL_FILE)
    return [(0.0, numbers[metric])] if metric in numbers else []


def metric_names(run: Path) -> list[str]:
    """Return the names of all metrics of a run."""
    names: set[str] = set()
    for name in SERIES_FILES:
        names.update(*read_lines(run / name))
    names.update(_read_summary(run / EVAL_FILE))
    return sorted(names - {"step"})


def summarize(series: MetricSeries, summary: Summary, count: int, goal: Goal) -> float:
    """Return the last value, the best value, or the mean of the last `count` values."""
    values = [value for _, value in series]
    if summary == "best":
        finite = [value for value in values if not math.isnan(value)]
        return (min if goal == "min" else max)(finite, default=math.nan)
    if summary == "mean":
        return float(np.mean(values[-count:]))
    return values[-1]


def metric_not_found(run: Path, metric: str) -> MetricNotFound:
    """Return an error that lists the metrics of the run."""
    names = metric_names(run)
    omitted = ("timer/", "usage/", "fps/")
    listed = [name for name in names if not name.startswith(omitted)]
    more = ["..."] if len(listed) > MAX_LISTED else []
    text = ", ".join(listed[:MAX_LISTED] + more)
    return MetricNotFound(
        f"{run} has no metric {metric!r}.{suggest(metric, names)}\n"
        f"  Fix: choose another `metric`; this run has {text or 'none'}."
    )


def _read_summary(path: Path) -> dict[str, float]:
    """Return the metrics of an evaluation by name; lists are averaged."""
    try:
        data = read_json(path)["summary"]
    except (OSError, ValueError, KeyError, TypeError):  # missing or incomplete
        return {}
    numbers: dict[str, float] = {}
    for name, value in flatten(data, separator="/").items():
        values = value if isinstance(value, list) else [value]
        scalars = [float(x) for x in values if isinstance(x, int | float)]
        if scalars:
            numbers[name] = float(np.mean(scalars))
    return numbers
