"""Sink that writes metrics as JSON lines, for other programs to read.

`metrics.jsonl` has one line per write, with the step and all scalars. `scores.jsonl`
has one line per episode, with the step at which it ended, its score, its length, and
other values such as its success. Lines of both have `seconds`, the wall-clock duration
of the run so far, without the time between a stop and a resume. When a run resumes from
a checkpoint, lines after its step are removed, so that the files are the same as those
of an uninterrupted run. NaN and infinity are written as null.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

from reverie.api import StateDict
from reverie.log.append_file import AppendFile
from reverie.log.record import Record, Sink
from reverie.storage.atomic import write_file
from reverie.storage.limits import open_descriptor, open_regular
from reverie.storage.os_errors import WriteFailed, fix_for

METRICS = "metrics.jsonl"
SCORES = "scores.jsonl"

TIMING_METRICS = re.compile(r"(^|/)(fps|timer|usage)/|^replay/(ram|disk)_gb$")
"""Metrics that depend on the machine and differ between equal runs."""

INVALID_STEP = 2**63
"""Step of a line that is not valid; larger than all others."""

MAX_UNWRITTEN = 10_000
"""Maximum number of lines kept in memory while the disk is full."""


class JsonlSink(Sink):
    """Writes `metrics.jsonl` and `scores.jsonl`.

    Without `timing_metrics`, values that depend on the machine are left out. Runs with
    the same settings and seed then write the same files, if records have no `seconds`.
    """

    name = "jsonl"

    def __init__(self, logdir: Path, timing_metrics: bool = True):
        self.timing_metrics = timing_metrics
        self._files = {name: AppendFile(logdir / name) for name in (METRICS, SCORES)}
        self._unwritten: dict[str, list[str]] = {METRICS: [], SCORES: []}
        self.has_final_line = False  # see `ResumableSink`

    def write(self, record: Record) -> None:
        scalars = {
            key: _to_number(value)
            for key, value in sorted(record.scalars.items())
            if self.timing_metrics or not TIMING_METRICS.search(key)
        }
        if scalars:
            line = {"step": record.step, **_seconds(record.seconds), **scalars}
            self._unwritten[METRICS].append(_to_line(line))
        for score in record.scores:
            line = {"step": score.step, **_seconds(score.seconds)}
            line[score.name] = _to_number(score.value)
            if score.length is not None:
                line[length_of(score.name)] = _to_number(score.length)
            line |= {key: _to_number(value) for key, value in score.others.items()}
            self._unwritten[SCORES].append(_to_line(line))
        self._flush()

    def truncate_after(self, step: int) -> None:
        for file in self._files.values():
            file.close()
            remove_lines_after(file.path, step)

    def state_dict(self) -> StateDict:
        """Return the sizes of the files and the lines that are not written yet."""
        sizes = {
            name: file.path.stat().st_size if file.path.exists() else 0
            for name, file in self._files.items()
        }
        unwritten = {name: list(lines) for name, lines in self._unwritten.items()}
        return {"sizes": sizes, "unwritten": unwritten}

    def load_state_dict(self, state: StateDict, final_step: int | None = None) -> None:
        """Truncate each file to its saved size.

        A file that is shorter (moved, or damaged by a power failure) loses only an
        incomplete last line. The lines that a finished run wrote at its last step,
        `final_step`, are kept; `has_final_line` is True if they exist.
        """
        self.has_final_line = False
        for name, file in self._files.items():
            file.close()
            size = int(state["sizes"].get(name, 0))
            unwritten = list(state["unwritten"].get(name, []))
            if file.path.exists() and file.path.stat().st_size >= size:
                if final_step is not None:
                    lines = _final_lines(file.path, size, final_step)
                    pending = [line.encode() for line in unwritten]
                    # lines that could not be written before the save were written
                    # after it, when the disk worked again: keep them in the file
                    if lines[: len(pending)] == pending:
                        size += sum(map(len, pending))
                        unwritten, lines = [], lines[len(pending) :]
                    # the final write is one line of metrics; others that follow were
                    # written by a resumed run
                    lines = lines[:1] if name == METRICS else lines
                    self.has_final_line |= name == METRICS and bool(lines)
                    size += sum(map(len, lines))
                truncate(file.path, size)
            remove_incomplete_line(file.path)
            self._unwritten[name] = unwritten

    def close(self) -> None:
        try:
            self._flush()
        finally:
            for file in self._files.values():
                file.close()

    def _flush(self) -> None:
        for name, lines in self._unwritten.items():
            try:  # also without lines, so that both files exist from the start
                self._files[name].write("".join(lines).encode())
            except (OSError, WriteFailed) as error:
                del lines[:-MAX_UNWRITTEN]
                path, code = self._files[name].path, error.errno or 0
                raise OSError(
                    code,
                    f"{path} cannot be written ({os.strerror(code)}); {len(lines)} "
                    "lines are kept in memory until it can be written. "
                    f"Fix: {fix_for(code, path)}",
                ) from error
            lines.clear()


def remove_lines_after(path: Path, last_step: int) -> None:
    """Remove incomplete lines and those with a step after `last_step`."""
    if path.exists():
        lines = [line for line in _complete_lines(path) if _step_of(line) <= last_step]
        write_file(path, b"".join(lines))


def remove_incomplete_line(path: Path) -> None:
    """Remove the last line of a file if it is incomplete."""
    if path.exists():
        truncate(path, _read(path).rfind(b"\n") + 1)


def truncate(path: Path, size: int) -> None:
    """Cut a file to this size; raise if it is a symbolic link."""
    descriptor = open_descriptor(path, os.O_RDWR)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def length_of(score: str) -> str:
    """Return the key of the length that belongs to the key of a score.

    For example, `episode/length` belongs to `episode/score`.
    """
    return score.removesuffix("score") + "length"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file, if it exists; incomplete lines are skipped."""
    lines = _complete_lines(path) if path.is_file() else []
    return [json.loads(line) for line in lines]


def parse_lines(lines: Iterable[str | bytes]) -> list[dict[str, Any]]:
    """Return the entries of lines; lines that are not JSON objects are skipped."""
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _complete_lines(path: Path) -> list[bytes]:
    """Return the lines that end with a newline and have a step."""
    lines = _read(path).splitlines(keepends=True)
    return [
        line for line in lines if line.endswith(b"\n") and _step_of(line) < INVALID_STEP
    ]


def _final_lines(path: Path, offset: int, step: int) -> list[bytes]:
    """Return the complete lines from a byte offset on, up to those of `step`."""
    lines = _read(path)[offset:].splitlines(keepends=True)
    return list(takewhile(lambda x: x.endswith(b"\n") and _step_of(x) <= step, lines))


def _step_of(line: bytes) -> int:
    """Return the step of a line, or `INVALID_STEP`."""
    try:
        return int(json.loads(line)["step"])
    except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
        return INVALID_STEP


def _seconds(seconds: float | None) -> dict[str, Any]:
    """Return the field `seconds` of a line; nothing if the time is not measured."""
    return {} if seconds is None else {"seconds": round(seconds, 3)}


def _to_number(value: float) -> float | int | None:
    """Convert a float for JSON: whole numbers to int, NaN and infinity to None."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _to_line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"
