"""Sink that prints metrics and a progress line to the terminal."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO

from reverie.api import UserError
from reverie.log.messages import record_output
from reverie.log.record import Record, Sink
from reverie.patterns import check_pattern, select_names

REFRESH_SECONDS = 0.5
"""Time between two updates of the progress line."""

RATE_SECONDS = 60.0
"""Time over which the steps per second are averaged."""

RATE_EPOCHS = 10
"""Number of epochs over which their duration is averaged."""

LOSSES = ("train/opt/loss", "train/loss")
"""Metrics with the total loss; if none exists, it is the sum of `train/loss/*`."""

MAX_SHORT = 60
"""Maximum length of name and value of a metric that is printed in columns."""

NOTHING = "(?!)"
"""Regular expression that matches nothing."""


class Epochs(NamedTuple):
    """Progress of a run that is counted in epochs."""

    current: int
    """Number of the current epoch, from 1."""
    completed: int
    total: int | None
    """Number of epochs; None if `run.steps` ends the run earlier."""

    def describe(self) -> str:
        """Return the current epoch and the number of epochs as text."""
        of_total = f" of {self.total:,}" if self.total else ""
        return f"epoch {max(1, self.current):,}{of_total}"


@functools.cache
def _null_stream() -> TextIO:
    """Return a stream to use if user code has closed the standard output."""
    return open(os.devnull, "w")


class TerminalSink(Sink):
    """Prints the metrics whose name matches the filter, and the progress of the run.

    On a terminal the progress line is updated in place; in a file or pipe it is
    printed once per write.
    """

    name = "terminal"

    def __init__(
        self,
        filter: str,
        total: int | None = None,
        stream: TextIO | None = None,
        progress_metrics: Sequence[str] = (),
        epochs: Callable[[], Epochs] | None = None,
    ):
        try:
            check_pattern(filter)
        except re.error as error:
            raise UserError(
                f"logger.filter is not a regular expression: {filter!r} ({error}).\n"
                "  Fix: write alternatives like --logger.filter 'score|train/loss/'"
            ) from error
        self.filter = filter
        self._is_shown: dict[str, bool] = {}  # by the name of the metric
        self.total, self.epochs = total, epochs
        self._stream = stream
        self._loss = self._score = ""  # newest values, formatted
        self._progress_metrics = dict.fromkeys(progress_metrics, "")
        self._step_times: deque[tuple[float, int]] = deque()  # times and steps
        # Time and number of completed epochs, at the end of each epoch. Rates are
        # computed from the end of the first epoch, which takes longer than others.
        self._epoch_times: deque[tuple[float, int]] = deque(maxlen=RATE_EPOCHS + 1)
        self._completed = epochs().completed if epochs else 0
        self._last_refresh = -math.inf
        self._has_progress_line = False

    @property
    def stream(self) -> TextIO:
        stream = self._stream or sys.stdout
        # user code may have closed it, or replaced it by another object
        return _null_stream() if getattr(stream, "closed", True) else stream

    def write(self, record: Record) -> None:
        loss = _total_loss(record.scalars)
        if loss is not None:
            self._loss = format_number(loss)
        if record.scores:
            self._score = format_number(record.scores[-1].value)
        for name in self._progress_metrics.keys() & record.scalars.keys():
            self._progress_metrics[name] = format_number(record.scalars[name])
        self._add_time(record.step)
        self.clear_line()
        texts = {key: format_number(value) for key, value in record.scalars.items()}
        metrics = self._select({**texts, **record.texts})
        width = min(shutil.get_terminal_size((88, 24)).columns, 100)
        print(self._progress_line(record.step), file=self.stream)
        for line in in_columns(metrics, width):
            print(line, file=self.stream)
        self.stream.flush()
        record_output()  # a status line is printed only after some time without output

    def progress(self, step: int) -> None:
        """Update the progress line on a terminal, at most every REFRESH_SECONDS."""
        now = time.monotonic()
        if not self.stream.isatty() or now - self._last_refresh < REFRESH_SECONDS:
            return
        self._last_refresh = now
        self._add_time(step)
        line = self._progress_line(step)
        width = shutil.get_terminal_size((88, 24)).columns
        self.stream.write("\r" + line[: width - 1] + "\x1b[K")
        self.stream.flush()
        self._has_progress_line = True
        record_output()

    def truncate_after(self, step: int) -> None:
        """Restart the measurement of rates when a run is resumed.

        Text that was printed after this step cannot be removed.
        """
        self._step_times.clear()
        self._epoch_times.clear()
        self._completed = self.epochs().completed if self.epochs else 0

    def close(self) -> None:
        self.clear_line()
        self.stream.flush()

    def clear_line(self) -> None:
        """Erase the progress line, so that other text can be printed."""
        if self._has_progress_line:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self._has_progress_line = False

    def _select(self, metrics: dict[str, str]) -> dict[str, str]:
        """Return the metrics whose names match the filter."""
        if new := [name for name in metrics if name not in self._is_shown]:
            try:
                shown = set(select_names(self.filter, new, "search"))
            except UserError:
                # `select_names` raises this if evaluating the regular expression takes
                # too long, as with nested repetitions: do not try again.
                self.filter = NOTHING
                raise
            self._is_shown |= {name: name in shown for name in new}
        return {name: text for name, text in metrics.items() if self._is_shown[name]}

    def _add_time(self, step: int) -> None:
        """Store when a step, and possibly an epoch, was reached."""
        now = time.monotonic()
        self._step_times.append((now, step))
        while len(self._step_times) > 2 and self._step_times[1][0] < now - RATE_SECONDS:
            self._step_times.popleft()
        if self.epochs and (completed := self.epochs().completed) != self._completed:
            self._epoch_times.append((now, completed))
            self._completed = completed

    def _progress_line(self, step: int) -> str:
        rate = _rate(self._step_times)
        epochs = self.epochs() if self.epochs else None
        if epochs and epochs.total:
            total, done = epochs.total, epochs.completed
            parts = [f"{epochs.describe()} ({done / total:.0%})", f"step {step:,}"]
            seconds_left = self._seconds_left(total - done)
        else:
            parts = [epochs.describe()] if epochs else []
            parts.append(f"step {step:,}")
            if self.total:
                parts[-1] += f" of {self.total:,} ({min(step / self.total, 1):.0%})"
            seconds_left = 0.0
            if self.total and rate > 0:
                seconds_left = (self.total - step) / rate
        if rate > 0:
            parts.append(f"{format_number(rate)} steps/s")
        if seconds_left > 0:
            parts.append(f"{format_seconds(seconds_left)} left")
        values = {"loss": self._loss, "score": self._score, **self._progress_metrics}
        parts += [f"{k.rsplit('/', 1)[-1]} {v}" for k, v in values.items() if v]
        return " · ".join(parts)

    def _seconds_left(self, count: int) -> float:
        """Return the time until `count` more epochs are complete; 0 if unknown."""
        rate = _rate(self._epoch_times)
        if not rate:
            return 0.0
        since_last = time.monotonic() - self._epoch_times[-1][0]
        return max(0.0, count / rate - since_last)


def _rate(times: Sequence[tuple[float, int]]) -> float:
    """Return the average increase of a counter per second."""
    if not times:
        return 0.0
    (start, first), (end, last) = times[0], times[-1]
    return (last - first) / (end - start) if end > start else 0.0


def _total_loss(scalars: dict[str, float]) -> float | None:
    """Return the total loss (see `LOSSES`); None if there is no loss."""
    for name in LOSSES:
        if name in scalars:
            return scalars[name]
    terms = [v for k, v in scalars.items() if k.startswith("train/loss/")]
    return sum(terms) if terms else None


def format_number(value: float) -> str:
    """Format with about four digits: 1234567 -> 1,234,567, 0.00001 -> 1.0e-05."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 1e9:
        return f"{int(value):,}"
    if size >= 1e9 or size < 1e-3:
        return f"{value:.1e}"
    digits = max(0, 3 - math.floor(math.log10(size)))
    return f"{value:,.{min(digits, 4)}f}"


def format_seconds(seconds: float) -> str:
    """Format with the two largest units: 93784 -> 1d 2h."""
    remaining = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, remaining = divmod(remaining, size)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def in_columns(pairs: dict[str, str], width: int) -> list[str]:
    """Format names and values in columns that fit, sorted by name down each column."""
    pairs = dict(sorted(pairs.items()))
    short = {
        k: v for k, v in pairs.items() if "\n" not in v and len(k) + len(v) < MAX_SHORT
    }
    lines = []
    if short:
        name_width = max(map(len, short))
        value_width = max(map(len, short.values()))
        cell_width = name_width + 2 + value_width
        # lines are indented by 2, and there are 3 spaces between two cells
        columns = max(1, (width - 2 + 3) // (cell_width + 3))
        rows = -(-len(short) // columns)
        cells = [f"{k:<{name_width}}  {v:>{value_width}}" for k, v in short.items()]
        for row in range(rows):
            lines.append("  " + "   ".join(cells[row::rows]))
    for key in pairs.keys() - short.keys():
        lines += [f"  {key}", *("    " + line for line in pairs[key].splitlines())]
    return lines
