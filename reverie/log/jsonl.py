"""Metrics as lines of JSON, the one record every other tool can be built on.

`metrics.jsonl` has one line per write: the step and every scalar. `scores.jsonl` has
one line per episode: the step at which it ended and its score. Both only grow, except
when a run goes back to a checkpoint: then the lines it is about to live through again
are dropped, so that a killed and resumed run leaves the file an uninterrupted one would
have left. Numbers that are not finite are written as null.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from reverie.api import StateDict
from reverie.log.appender import Appender
from reverie.log.record import Record
from reverie.storage.atomic import write_file

METRICS = "metrics.jsonl"
SCORES = "scores.jsonl"

BY_THE_CLOCK = re.compile(r"(^|/)(fps|timer|usage)/|^replay/(ram|disk)_gb$")
"""Metrics that differ between two equal runs, because they measure the machine."""

BACKLOG = 10_000
"""Lines kept for later while the disk is full."""


class Jsonl:
    """Writes `metrics.jsonl` and `scores.jsonl`; `clocked=False` leaves out all that
    depends on the speed of the machine, so that equal runs leave equal files."""

    name = "jsonl"

    def __init__(self, logdir: Path, clocked: bool = True):
        self.clocked = clocked
        self._files = {name: Appender(logdir / name) for name in (METRICS, SCORES)}
        self._waiting: dict[str, list[str]] = {METRICS: [], SCORES: []}

    def write(self, record: Record) -> None:
        scalars = {
            key: _number(value)
            for key, value in sorted(record.scalars.items())
            if self.clocked or not BY_THE_CLOCK.search(key)
        }
        if scalars:
            self._waiting[METRICS].append(_line({"step": record.step, **scalars}))
        for score in record.scores:
            entry = {"step": score.step, score.name: _number(score.value)}
            self._waiting[SCORES].append(_line(entry))
        self._flush()

    def _flush(self) -> None:
        for name, lines in self._waiting.items():
            try:  # even without lines, so that both files are there from the start
                self._files[name].write("".join(lines).encode())
            except OSError as error:
                del lines[:-BACKLOG]
                raise OSError(
                    error.errno,
                    f"{self._files[name].path} cannot be written "
                    f"({os.strerror(error.errno or 0)}); {len(lines)} lines wait. "
                    "Fix: free some space, they are written as soon as it works",
                ) from error
            lines.clear()

    def truncate_after(self, step: int) -> None:
        for file in self._files.values():
            file.close()
            keep_lines(file.path, step)

    def state_dict(self) -> StateDict:
        """How long each file is, so that a resumed run continues exactly there."""
        sizes = {
            name: file.path.stat().st_size if file.path.exists() else 0
            for name, file in self._files.items()
        }
        waiting = {name: list(lines) for name, lines in self._waiting.items()}
        return {"sizes": sizes, "waiting": waiting}

    def load_state_dict(self, state: StateDict) -> None:
        """Cut each file where it ended when the state was taken.

        A file that is shorter (it was moved, or the machine lost power) only loses a
        torn last line.
        """
        for name, file in self._files.items():
            file.close()
            size = int(state["sizes"].get(name, 0))
            if file.path.exists() and file.path.stat().st_size >= size:
                os.truncate(file.path, size)
            drop_torn_line(file.path)
            self._waiting[name] = list(state["waiting"].get(name, []))

    def close(self) -> None:
        try:
            self._flush()
        finally:
            for file in self._files.values():
                file.close()


def keep_lines(path: Path, last_step: int) -> None:
    """Drop torn lines, and those whose step is beyond `last_step`."""
    if not path.exists():
        return
    good = [line for line in _whole_lines(path) if _step_of(line) <= last_step]
    write_file(path, b"".join(good))


def drop_torn_line(path: Path) -> None:
    """Cut what stands after the last end of line."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 4096)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                file.truncate(start + found + 1)
                return
            end = start
        file.truncate(0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of such a file; lines that are not whole are passed over."""
    return [json.loads(line) for line in _whole_lines(path)]


def _whole_lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n") and _step_of(line) < 2**63]


def _step_of(line: bytes) -> int:
    """The step of a line; of one that cannot be read, a step beyond all others."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**63


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"
