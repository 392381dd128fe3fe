"""Metrics for the person at the keyboard: a block per write and a line of progress."""

from __future__ import annotations

import math
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from reverie.api import UserError
from reverie.log.record import Record

REFRESH = 0.5
"""Seconds between two progress lines on a terminal."""

WINDOW = 60.0
"""Seconds over which the rate in the progress line is taken."""

LOSSES = ("train/opt/loss", "train/loss")
"""The total loss, under the names agents give it; else the named losses are added."""


class Terminal:
    """Prints the metrics whose name the filter finds, and how far the run is.

    On a terminal the progress line is rewritten in place; into a file or a pipe it is
    written once with every block.
    """

    name = "terminal"

    def __init__(
        self,
        filter: str,
        total: int | None = None,
        stream: TextIO | None = None,
        line: Sequence[str] = (),
    ):
        try:
            self.filter = re.compile(filter)
        except re.error as error:
            raise UserError(
                f"logger.filter is not a regular expression: {filter!r} ({error}).\n"
                "  Fix: write alternatives like --logger.filter 'score|train/loss/'"
            ) from error
        self.total = total
        self._stream = stream
        self._last = "", ""  # loss and score, as shown
        self._line = dict.fromkeys(line, "")  # what else the progress line shows
        self._marks: deque[tuple[float, int]] = deque()
        self._shown = -math.inf
        self._open_line = False

    @property
    def stream(self) -> TextIO:
        return self._stream or sys.stdout

    def write(self, record: Record) -> None:
        loss, score = self._last
        found = _loss_of(record.scalars)
        loss = loss if found is None else format_number(found)
        score = format_number(record.scores[-1].value) if record.scores else score
        self._last = loss, score
        for name in self._line.keys() & record.scalars.keys():
            self._line[name] = format_number(record.scalars[name])
        self._mark(record.step)
        self._clear_line()
        shown = {
            key: format_number(value)
            for key, value in record.scalars.items()
            if self.filter.search(key)
        }
        shown |= {k: v for k, v in record.texts.items() if self.filter.search(k)}
        width = min(shutil.get_terminal_size((88, 24)).columns, 100)
        print(self._progress(record.step), file=self.stream)
        for line in in_columns(shown, width):
            print(line, file=self.stream)
        self.stream.flush()

    def progress(self, step: int) -> None:
        """Rewrite the progress line, if this is a terminal and it is time."""
        now = time.monotonic()
        if not self.stream.isatty() or now - self._shown < REFRESH:
            return
        self._shown = now
        self._mark(step)
        line = self._progress(step)
        width = shutil.get_terminal_size((88, 24)).columns
        self.stream.write("\r" + line[: width - 1] + "\x1b[K")
        self.stream.flush()
        self._open_line = True

    def truncate_after(self, step: int) -> None:
        self._marks.clear()

    def close(self) -> None:
        self._clear_line()
        self.stream.flush()

    def _clear_line(self) -> None:
        if self._open_line:
            self.stream.write("\r\x1b[K")
            self._open_line = False

    def _mark(self, step: int) -> None:
        now = time.monotonic()
        self._marks.append((now, step))
        while len(self._marks) > 2 and self._marks[1][0] < now - WINDOW:
            self._marks.popleft()

    def _progress(self, step: int) -> str:
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        rate = (last - first) / (end - start) if end > start else 0.0
        parts = [f"step {step:,}"]
        if self.total:
            parts[0] += f" of {self.total:,} ({step / self.total:.0%})"
        if rate > 0:
            parts.append(f"{format_number(rate)} steps/s")
        if rate > 0 and self.total and step < self.total:
            parts.append(f"{format_seconds((self.total - step) / rate)} left")
        loss, score = self._last
        parts += [f"loss {loss}"] if loss else []
        parts += [f"score {score}"] if score else []
        named = [(k.rsplit("/", 1)[-1], v) for k, v in self._line.items() if v]
        parts += [f"{name} {value}" for name, value in named]
        return " · ".join(parts)


def _loss_of(scalars: dict[str, float]) -> float | None:
    for name in LOSSES:
        if name in scalars:
            return scalars[name]
    named = [v for k, v in scalars.items() if k.startswith("train/loss/")]
    return sum(named) if named else None


def format_number(value: float) -> str:
    """Four digits that matter: 1234567 -> 1,234,567, 0.00001 -> 1.0e-05."""
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
    """The two largest units: 93784 -> 1d 2h."""
    rest = round(seconds)
    units = [("d", 86400), ("h", 3600), ("m", 60), ("s", 1)]
    parts = []
    for unit, size in units:
        count, rest = divmod(rest, size)
        parts.append((count, unit))
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{count}{unit}" for count, unit in parts[:2])


def in_columns(pairs: dict[str, str], width: int) -> list[str]:
    """Names and values in as many columns as fit, read downwards."""
    pairs = dict(sorted(pairs.items()))
    short = {k: v for k, v in pairs.items() if "\n" not in v and len(k) + len(v) < 60}
    lines = []
    if short:
        names = max(map(len, short))
        values = max(map(len, short.values()))
        cell = names + 2 + values
        columns = max(1, (width - 2 + 3) // (cell + 3))
        rows = -(-len(short) // columns)
        cells = [f"{k:<{names}}  {v:>{values}}" for k, v in short.items()]
        for row in range(rows):
            lines.append("  " + "   ".join(cells[row::rows]))
    for key in pairs.keys() - short.keys():
        lines += [f"  {key}", *("    " + line for line in pairs[key].splitlines())]
    return lines
