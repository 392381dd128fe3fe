"""The progress of a campaign: a table on a terminal, lines in a file or pipe."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reverie.campaign.queue import Queue, RunState, RunStatus
from reverie.log.jsonl import METRICS, SCORES, parse_lines
from reverie.log.messages import print_message, record_output
from reverie.log.terminal import format_number, format_seconds
from reverie.storage.limits import InvalidFile, open_regular

TAIL_BYTES = 65_536
"""Bytes at the end of a log file that are read."""
SCORE_EPISODES = 20
"""Number of episodes whose mean is the score in the table."""
SUMMARY_SECONDS = 60.0
"""Time between two summaries if the output is not a terminal."""
STATES: tuple[RunState, ...] = (
    "running",
    "finished",
    "failed",
    "lost",
    "stopped",
    "waiting",
)
"""Order of the states in a summary."""
COLUMNS = ("run", "state", "done", "score", "time", "attempts", "machine")
TEXT_COLUMNS = (0, 1, 6)
"""Indices of the columns that are aligned to the left."""


class LatestValues(NamedTuple):
    """Simulator frames so far, and mean score of the last episodes of a run."""

    frames: int = 0
    score: float | None = None


class Progress:
    """Shows the state of all runs."""

    def __init__(self, queue: Queue, retries: int):
        self.queue, self.retries = queue, retries
        self._printed: dict[str, tuple[str, int]] = {}  # state and attempts by run
        self._failures: dict[str, int] = {}  # failed attempts by run
        self._table_lines = 0  # height of the table on the terminal
        self._summary_time = -math.inf

    def show(self, statuses: Sequence[RunStatus]) -> None:
        """Update the table, or print changes, and a summary every minute."""
        if sys.stderr is not None and sys.stderr.isatty():
            self._draw(statuses)
        else:
            self._print_changes(statuses)

    def _draw(self, statuses: Sequence[RunStatus]) -> None:
        """Replace the table on the terminal."""
        size = shutil.get_terminal_size((88, 24))
        shown = [status for status in statuses if status.state != "waiting"]
        shown.sort(key=lambda status: STATES.index(status.state))
        # leave room for the header, errors and the summary
        table = format_table(shown[: size.lines - 5], self.queue, self.retries)
        lines = [*table.split("\n"), self._summary(statuses)][-size.lines + 1 :]
        text = "".join(f"{line[: size.columns - 1]}\x1b[K\n" for line in lines)
        # escape codes: A moves the cursor up, K and J clear the rest of line and screen
        up = f"\x1b[{self._table_lines}A" if self._table_lines else ""
        sys.stderr.write(f"{up}{text}\x1b[J")
        sys.stderr.flush()
        record_output()
        self._table_lines = len(lines)

    def _print_changes(self, statuses: Sequence[RunStatus]) -> None:
        """Print a line for each run whose state has changed since the last call.

        Also print failures since the last call if the run has been restarted. The first
        call prints a failure only if the run has not been started again.
        """
        for status in statuses:
            key = status.run.name
            state = status.state, len(status.attempts)
            errors = [a.error for a in status.attempts if a.result == "failed"]
            printed = self._failures.get(key, len(errors) - (status.state == "failed"))
            for number, error in enumerate(errors[printed:], start=printed + 1):
                retry = "" if number > self.retries else " It will be restarted."
                print_message(f"{key}: failed: {error}{retry}")
            is_new = state != self._printed.get(key, ("waiting", 0))
            if is_new and status.state != "failed":
                print_message(f"{key}: {self._describe(status)}")
            self._printed[key], self._failures[key] = state, len(errors)
        now = time.monotonic()
        if now - self._summary_time >= SUMMARY_SECONDS:
            self._summary_time = now
            print_message(self._summary(statuses))

    def _describe(self, status: RunStatus) -> str:
        last = status.attempts[-1] if status.attempts else None
        if status.state == "running" and last is not None:
            count = len(status.attempts)
            attempt = f", attempt {count}" if count > 1 else ""
            return f"running on {last.claim.get('machine', '')}{attempt}"
        score = read_latest(self.queue.run_folder(status.run.name)).score
        if status.state == "finished" and score is not None:
            return f"finished, score {format_number(score)}"
        return status.state

    def _summary(self, statuses: Sequence[RunStatus]) -> str:
        counts = Counter(status.state for status in statuses)
        parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
        return f"{len(statuses)} runs: {', '.join(parts)}"


def format_table(statuses: Iterable[RunStatus], queue: Queue, retries: int) -> str:
    """Return a table of runs, and below it the errors of those that failed."""
    rows = [list(COLUMNS)]
    errors = []
    for status in statuses:
        latest = read_latest(queue.run_folder(status.run.name))
        frames = status.run.frames
        fraction = min(1.0, latest.frames / frames) if frames else 0.0
        done = 1.0 if status.state == "finished" else fraction
        last = status.attempts[-1] if status.attempts else None
        rows.append(
            [
                status.run.name,
                status.state,
                f"{done:.0%}" if last else "",
                "" if latest.score is None else format_number(latest.score),
                format_seconds(status.seconds) if status.seconds else "",
                str(len(status.attempts) or ""),
                str(last.claim.get("machine", "")) if last else "",
            ]
        )
        if status.error and status.state != "finished":
            attempt = f"attempt {status.failures} of {retries + 1}"
            errors.append(f"{status.run.name} failed ({attempt}): {status.error}")
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in TEXT_COLUMNS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in [*lines, *errors])


def read_latest(folder: Path) -> LatestValues:
    """Read the number of frames and the mean of the last scores of a run.

    Numbers that are too large to compute with, in a damaged file, are ignored.
    """
    scores = _last_lines(folder / SCORES)
    values = [
        float(value)
        for line in scores
        for key, value in line.items()
        if key.endswith("score") and type(value) in (int, float) and abs(value) < 1e300
    ][-SCORE_EPISODES:]
    lines = [*scores[-1:], *_last_lines(folder / METRICS)[-1:]]
    steps = [line.get("step") for line in lines]
    frames = [n for n in steps if isinstance(n, int) and abs(n) < 1 << 63]
    score = sum(values) / len(values) if values else None
    return LatestValues(max(frames, default=0), score)


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines in the last bytes of a file."""
    try:
        with open_regular(path) as file:
            start = max(0, file.seek(0, 2) - TAIL_BYTES)
            file.seek(start)
            data = file.read()
    except (OSError, InvalidFile):
        return []
    return parse_lines(data.split(b"\n")[1 if start else 0 : -1])
