"""The results of trials: ranking, text table and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from reverie.log.terminal import format_number, format_seconds
from reverie.sweep.objective import Goal

TrialState = Literal["waiting", "running", "done", "pruned", "failed"]
STATE_ORDER = ("done", "pruned", "failed", "running", "waiting")
"""Order of the states in a table."""


class Trial(NamedTuple):
    """The hyperparameters of a trial and its result."""

    number: int
    state: TrialState
    params: dict[str, Any]
    value: float | None = None
    """The objective, averaged over seeds."""
    std: float | None = None
    """Standard deviation of the objective over seeds."""
    seconds: float = 0.0
    """Time of all of its runs."""
    error: str = ""
    """Why the trial failed."""


def rank_trials(trials: Sequence[Trial], goal: Goal) -> list[Trial]:
    """Sort trials from best to worst; trials without a value come last."""
    sign = 1 if goal == "min" else -1

    def key(trial: Trial) -> tuple[int, float, int]:
        value = math.inf if trial.value is None else sign * trial.value
        return STATE_ORDER.index(trial.state), value, trial.number

    return sorted(trials, key=key)


def best_trial(trials: Sequence[Trial], goal: Goal) -> Trial | None:
    """Return the best finished trial; None if no trial has finished."""
    done = [trial for trial in trials if trial.state == "done"]
    return rank_trials(done, goal)[0] if done else None


def format_table(trials: Sequence[Trial], names: Iterable[str], goal: Goal) -> str:
    """Format a text table of trials, from best to worst, with these parameters."""
    names = list(names)
    rows = [["trial", "value", *names, "time", ""]]
    for trial in rank_trials(trials, goal):
        value = "" if trial.value is None else format_number(trial.value)
        if trial.std is not None:
            value += f" ± {format_number(trial.std)}"
        params = [format_param(trial.params.get(name, "")) for name in names]
        seconds = format_seconds(trial.seconds) if trial.seconds else ""
        state = "" if trial.state == "done" else trial.state
        rows.append([str(trial.number), value, *params, seconds, state])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    errors = [f"trial {t.number} failed: {t.error}" for t in trials if t.error]
    return "\n".join(line.rstrip() for line in [*lines, *errors])


def format_csv(trials: Sequence[Trial], names: Iterable[str], goal: Goal) -> str:
    """Format the trials as CSV, from best to worst, with these parameters."""
    names = list(names)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["trial", "state", "value", "std", "seconds", *names, "error"])
    for trial in rank_trials(trials, goal):
        params = [trial.params.get(name, "") for name in names]
        numbers = [trial.value, trial.std, round(trial.seconds, 1)]
        writer.writerow([trial.number, trial.state, *numbers, *params, trial.error])
    return file.getvalue()


def format_params(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={format_param(value)}" for name, value in params.items())


def format_param(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
