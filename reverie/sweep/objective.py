"""How well a run did, read from the files it leaves.

A metric is a series of values with their steps: a line per episode in `scores.jsonl`, a
line per write in `metrics.jsonl`, or the single number that an evaluation left in
`eval.json` or `judgement.json`. The first file that knows the name is taken, so
`episode/score` means episodes and not averages of them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reverie.api import UserError
from reverie.config import suggest
from reverie.log.jsonl import METRICS, SCORES, read_lines

Take = Literal["last", "best", "mean"]
Goal = Literal["min", "max"]
Points = list[tuple[float, float]]
"""(step, value), in the order they were written; a value that was not finite is NaN."""

SERIES = (SCORES, METRICS)
SINGLE = ("eval.json", "judgement.json")
SHOWN = 12
"""Names that a message lists."""


class NoSuchMetric(UserError):
    """A run that ended without the metric it is to be judged by."""


def points_of(run: Path, metric: str) -> Points:
    """What a run has of a metric so far; empty if nothing."""
    for name in SERIES:
        entries = _lines(run / name)
        found = [(float(e["step"]), _number(e[metric])) for e in entries if metric in e]
        if found:
            return found
    for name in SINGLE:
        numbers = _numbers(run / name)
        if metric in numbers:
            return [(0.0, numbers[metric])]
    return []


def names_of(run: Path) -> list[str]:
    """Every metric that a run has."""
    found: dict[str, None] = {}
    for name in SERIES:
        for entry in _lines(run / name):
            found |= dict.fromkeys(entry)
    for name in SINGLE:
        found |= dict.fromkeys(_numbers(run / name))
    found.pop("step", None)
    return sorted(found)


def outcome(points: Points, take: Take, last: int, goal: Goal) -> float:
    """The last value, the best one, or the mean of the `last` ones."""
    values = [value for _, value in points]
    if take == "best":
        real = [value for value in values if not math.isnan(value)]
        return (min if goal == "min" else max)(real, default=math.nan)
    if take == "mean":
        return float(np.mean(values[-last:]))
    return values[-1]


def complain(run: Path, metric: str) -> NoSuchMetric:
    """What to say of a run that ended without the metric."""
    names = names_of(run)
    near = suggest(metric, names)
    own = [name for name in names if not name.startswith(("timer/", "usage/", "fps/"))]
    listed = ", ".join(own[:SHOWN]) + (", ..." if len(own) > SHOWN else "")
    return NoSuchMetric(
        f"{run} has no metric {metric!r}.{near}\n"
        f"  Fix: choose another `metric`; it has {listed or 'none at all'}."
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path) if path.is_file() else []


def _numbers(path: Path) -> dict[str, float]:
    """The numbers of a JSON file by their path; of a list, the mean."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or half a file
        return {}
    found: dict[str, float] = {}
    _gather(data, "", found)
    return found


def _gather(data: Any, prefix: str, found: dict[str, float]) -> None:
    if isinstance(data, dict):
        for key, value in data.items():
            _gather(value, f"{prefix}/{key}" if prefix else str(key), found)
    elif isinstance(data, list):
        real = [_number(x) for x in data if isinstance(x, int | float)]
        if real:
            found[prefix] = float(np.mean(real))
    elif isinstance(data, int | float):
        found[prefix] = float(data)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
