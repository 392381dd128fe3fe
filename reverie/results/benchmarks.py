"""Scores that are comparable between tasks, and published results of benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.api import UserError
from reverie.config import suggest
from reverie.results.runs import CRAFTER_SCORE, SCORE, SUCCESS

DATA = Path(__file__).parent / "data"
NOT_BASELINES = ("atari_human", "procgen_ranges")
"""Data files that normalize scores and contain no results of a method."""
RATES = (SUCCESS,)
"""Metrics between 0 and 1."""
MAX_DMC_RETURN = 1000.0
"""Return of an episode of dm_control with the reward 1 in all of its 1,000 steps."""


class Normalization(NamedTuple):
    """Makes the values of different tasks comparable."""

    name: str
    """Name of the normalized values, for labels and tables."""
    function: Callable[[str, np.ndarray], np.ndarray]
    """Normalizes values of a task."""
    target: float = 1.0
    """Normalized value of a solved task, for the optimality gap."""


class Baseline(NamedTuple):
    """Published scores of one method on the tasks of one suite."""

    name: str
    source: str
    scores: Mapping[str, float]
    """Mean over seeds, by task."""
    stds: Mapping[str, float]
    """Standard deviation over seeds, by task."""
    seeds: Mapping[str, int]
    """Number of seeds, by task."""
    budget: float
    """Length of the training in simulator frames."""
    runs: Mapping[str, list[float]]
    """Score of each run, by task; empty if only means are published."""


def find_normalization(key: str, tasks: Collection[str]) -> Normalization | None:
    """Return the normalization with which benchmarks compare a metric between tasks.

    Scores of Atari games are human-normalized and those of Procgen min-max normalized,
    as in the papers of these benchmarks. Returns of dm_control, success rates and
    Crafter scores have the same range in all tasks. None for other metrics and tasks.
    """
    if key in RATES:
        return Normalization("success rate", _unchanged)
    if key == CRAFTER_SCORE:
        return Normalization("Crafter score (%)", _unchanged, target=100.0)
    if key != SCORE or not tasks:
        return None
    for name, normalize in (
        ("human-normalized score", human_normalized_score),
        ("normalized score", procgen_normalized_score),
    ):
        if all(normalize(task, 0.0) is not None for task in tasks):
            return Normalization(name, _on_arrays(normalize))
    if all(task.startswith("dmc_") for task in tasks):
        return Normalization("episode return", _unchanged, target=MAX_DMC_RETURN)
    return None


def human_normalized_score(task: str, score: float) -> float | None:
    """Return the human-normalized score of an Atari game; None for other tasks.

    A uniformly random policy has the score 0, and a human player 1.
    """
    suite, _, game = task.partition("_")
    if suite not in ("atari", "atari100k"):
        return None
    return _scale_linearly(
        _read("atari_human")["scores"].get(game), "random", "human", score
    )


def procgen_normalized_score(task: str, score: float) -> float | None:
    """Return the normalized score of a Procgen game; None for other tasks.

    A trivial policy has the score 0, and the best possible one 1, in the distribution
    mode `hard`.
    """
    suite, _, game = task.partition("_")
    if suite != "procgen":
        return None
    return _scale_linearly(
        _read("procgen_ranges")["scores"].get(game), "min", "max", score
    )


def _scale_linearly(
    entry: Mapping[str, float] | None, low: str, high: str, score: float
) -> float | None:
    """Scale a score linearly: `low` of the entry becomes 0 and `high` becomes 1."""
    if entry is None:
        return None
    return (score - entry[low]) / (entry[high] - entry[low])


def _unchanged(task: str, values: np.ndarray) -> np.ndarray:
    """Return values that are already comparable between tasks."""
    return values


def _on_arrays(
    normalize: Callable[[str, float], float | None],
) -> Callable[[str, np.ndarray], np.ndarray]:
    """Apply a linear normalization of numbers to arrays."""

    def function(task: str, values: np.ndarray) -> np.ndarray:
        zero, one = normalize(task, 0.0), normalize(task, 1.0)
        assert zero is not None
        assert one is not None
        return zero + (one - zero) * np.asarray(values, float)

    return function


def list_baselines() -> list[str]:
    """Return the names of all published results, as `method/suite`."""
    names = []
    for path in sorted(DATA.glob("*.json")):
        if path.stem not in NOT_BASELINES:
            names += [f"{path.stem}/{suite}" for suite in _read(path.stem)["suites"]]
    return names


def find_baseline(name: str, tasks: Iterable[str]) -> Baseline:
    """Return the published results `method` or `method/suite`.

    Without a suite, the suite that contains some of the `tasks` is used.
    """
    method, _, suite = name.partition("/")
    available = list_baselines()
    methods = sorted({other.split("/")[0] for other in available})
    if method not in methods or (suite and name not in available):
        raise UserError(
            f"There are no published results named {name!r}."
            f"{suggest(name, [*methods, *available])}\n"
            f"  Fix: choose from {', '.join([*methods, *available])}."
        )
    data = _read(method)
    wanted = {*tasks}
    found = [
        other
        for other, entry in data["suites"].items()
        if (suite or other) == other and wanted & {*entry["tasks"]}
    ]
    if len(found) != 1:
        problem = (
            f"are ambiguous for these tasks: {', '.join(found)}"
            if found
            else f"do not contain {', '.join(sorted(wanted))}"
        )
        choices = found or list(data["suites"])
        raise UserError(
            f"The published results {name!r} {problem}.\n"
            f"  Fix: --baseline {method}/{choices[0]}, or remove --baseline."
        )
    entry = data["suites"][found[0]]
    rows = {task: _with_statistics(row) for task, row in entry["tasks"].items()}
    return Baseline(
        data["name"],
        data["source"],
        {task: row["score"] for task, row in rows.items()},
        {task: row["std"] for task, row in rows.items()},
        {task: row["seeds"] for task, row in rows.items()},
        entry["budget"],
        {task: row["runs"] for task, row in rows.items() if "runs" in row},
    )


def _with_statistics(row: dict[str, Any]) -> dict[str, Any]:
    """Add mean, standard deviation and number of seeds to a list of published runs."""
    if "runs" not in row:
        return row
    values = np.array(row["runs"], float)
    mean, std = float(values.mean()), float(values.std(ddof=1))
    return {"score": mean, "std": std, "seeds": len(values), **row}


@cache
def _read(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())
