"""Human-normalized scores, and published results of benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from reverie.api import UserError
from reverie.config import suggest

DATA = Path(__file__).parent / "data"
NOT_BASELINES = ("atari_human",)


class Baseline(NamedTuple):
    """Published scores of one method on the tasks of one suite."""

    name: str
    source: str
    scores: Mapping[str, float]
    """Mean over seeds, by task."""
    stds: Mapping[str, float]
    seeds: Mapping[str, int]
    budget: float
    """Length of the training in simulator frames."""


def human_normalized_score(task: str, score: float) -> float | None:
    """Return the human-normalized score of an Atari game; None for other tasks.

    0 is a uniformly random policy and 1 a human player.
    """
    suite, _, game = task.partition("_")
    entry = _human_scores().get(game) if suite in ("atari", "atari100k") else None
    if entry is None:
        return None
    return (score - entry["random"]) / (entry["human"] - entry["random"])


def list_baselines() -> list[str]:
    """Return the names of all published results, as `method/suite`."""
    names = []
    for path in sorted(DATA.glob("*.json")):
        if path.stem not in NOT_BASELINES:
            names += [f"{path.stem}/{suite}" for suite in _read(path.stem)["suites"]]
    return names


def find_baseline(name: str, tasks: Iterable[str]) -> Baseline:
    """Return a published result: `dreamerv3` or, with its suite, `dreamerv3/atari100k`.

    Without a suite, the one that contains some of the `tasks` is returned.
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
    rows = entry["tasks"]
    return Baseline(
        data["name"],
        data["source"],
        {task: row["score"] for task, row in rows.items()},
        {task: row["std"] for task, row in rows.items()},
        {task: row["seeds"] for task, row in rows.items()},
        entry["budget"],
    )


@cache
def _read(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def _human_scores() -> dict[str, dict[str, float]]:
    return _read("atari_human")["scores"]
