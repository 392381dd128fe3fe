"""What has become of the trials of a sweep: as a table, as CSV, as sentences."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from reverie.log.terminal import format_number, format_seconds
from reverie.sweep.objective import Goal
from reverie.sweep.ranges import Range

State = Literal["waiting", "running", "done", "pruned", "failed"]
ORDER = ("done", "pruned", "failed", "running", "waiting")


class Trial(NamedTuple):
    """One point of a sweep and how it went."""

    number: int
    state: State
    point: dict[str, Any]
    value: float | None = None
    spread: float | None = None
    """The deviation between seeds."""
    seconds: float = 0.0
    note: str = ""
    """Why it failed."""


def ranked(trials: Sequence[Trial], goal: Goal) -> list[Trial]:
    """The best one first; those without a value last."""
    sign = 1 if goal == "min" else -1

    def place(trial: Trial) -> tuple[int, float, int]:
        worth = math.inf if trial.value is None else sign * trial.value
        return ORDER.index(trial.state), worth, trial.number

    return sorted(trials, key=place)


def best_of(trials: Sequence[Trial], goal: Goal) -> Trial | None:
    done = [trial for trial in trials if trial.state == "done"]
    return ranked(done, goal)[0] if done else None


def table(trials: Sequence[Trial], ranges: Mapping[str, Range], goal: Goal) -> str:
    """The trials for people, from best to worst."""
    rows = [["trial", "value", *ranges, "time", ""]]
    for trial in ranked(trials, goal):
        value = "" if trial.value is None else format_number(trial.value)
        if trial.spread is not None:
            value += f" ± {format_number(trial.spread)}"
        point = [in_short(trial.point.get(name, "")) for name in ranges]
        spent = format_seconds(trial.seconds) if trial.seconds else ""
        state = "" if trial.state == "done" else trial.state
        rows.append([str(trial.number), value, *point, spent, state])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    extras = [f"trial {t.number} failed: {t.note}" for t in trials if t.note]
    return "\n".join(line.rstrip() for line in [*lines, *extras])


def as_csv(trials: Sequence[Trial], ranges: Mapping[str, Range], goal: Goal) -> str:
    """The trials for programs, from best to worst."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["trial", "state", "value", "spread", "seconds", *ranges, "note"])
    for trial in ranked(trials, goal):
        point = [trial.point.get(name, "") for name in ranges]
        numbers = [trial.value, trial.spread, round(trial.seconds, 1)]
        writer.writerow([trial.number, trial.state, *numbers, *point, trial.note])
    return out.getvalue()


def in_words(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {in_short(value)}" for name, value in point.items())


def in_short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
