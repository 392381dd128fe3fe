"""Sections of trials, and the table of their results."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Trial = Callable[[str, random.Random, Path], list[str]]
"""Runs one trial of a class in an empty folder; returns the problems it found."""


@dataclass(frozen=True)
class Section:
    """Trials of one kind of faults."""

    name: str
    summary: str
    classes: Callable[[], Sequence[str]]
    """Names of the classes; trial `i` has the class `i % len(classes)`."""
    trial: Trial
    skip_reason: Callable[[], str] = lambda: ""
    """Why the section cannot run on this machine; empty if it can."""


@dataclass
class Result:
    """Number of trials and failures of each class of a section."""

    section: Section
    skipped: str = ""
    trials: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


def run_section(
    section: Section,
    scratch: Path,
    seed: int,
    indices: Sequence[int],
    deadline: float,
    report: Callable[[str], None],
) -> Result:
    """Run trials, each with its own random seed, until the deadline."""
    result = Result(section, section.skip_reason())
    if result.skipped:
        return result
    started = time.monotonic()
    classes = section.classes()
    for index in indices:
        name = classes[index % len(classes)]
        if time.monotonic() > deadline and result.trials:
            break
        folder = scratch / f"{section.name}-{index}"
        folder.mkdir()
        rng = random.Random(f"{seed} {section.name} {index}")
        try:
            problems = section.trial(name, rng, folder)
        except Exception:  # an error of the tool, or a file that it cannot read
            problems = [f"the trial failed:\n{traceback.format_exc()}"]
        result.trials[name] = result.trials.get(name, 0) + 1
        if problems:
            result.failures[name] = result.failures.get(name, 0) + 1
            command = f"python tools/chaos.py {section.name} --seed {seed}"
            report(f"FAILED {section.name}, {name}: " + "\n".join(problems))
            report(f"    {command} --only {index}\n")
        delete(folder)
        folder.with_name(folder.name + ".out").unlink(missing_ok=True)
    result.seconds = time.monotonic() - started
    return result


def delete(folder: Path) -> None:
    """Delete a folder; `shutil.rmtree` fails for folders nested a thousand deep."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def format_table(results: Sequence[Result]) -> str:
    """Trials and failures of each class as text, with skipped sections and totals."""
    rows = [("section", "class", "trials", "failures")]
    for result in results:
        if result.skipped:
            rows.append((result.section.name, f"skipped: {result.skipped}", "", ""))
        for name, trials in result.trials.items():
            failures = result.failures.get(name, 0)
            rows.append((result.section.name, name, str(trials), str(failures)))
    count = sum(sum(result.trials.values()) for result in results)
    failed = sum(result.failed for result in results)
    rows.append(("all", "", str(count), str(failed)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    widths[1] = max(len(row[1]) for row in rows if row[2] or not row[1])
    lines = []
    for section, name, trials, failures in rows:
        left = f"{section:<{widths[0]}}  {name:<{widths[1]}}"
        lines.append(f"{left}  {trials:>{widths[2]}}  {failures:>{widths[3]}}".rstrip())
    return "\n".join(lines)
