"""The training run of the trials, and the checks of its run folder."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chaos import shim
from chaos.processes import run

STEPS = 160
"""Number of agent steps of the run."""
FLAGS = (
    "--configs debug --agent random --task catch --deterministic True --run.envs 2 "
    f"--run.clock steps --run.steps {STEPS} --run.save_every 30 --run.log_every 40 "
    "--run.report_every 0 --logger.outputs jsonl"
)


def train_arguments(storage: str = "disk", extra: Sequence[str] = ()) -> list[str]:
    """Return the command of a short run with several checkpoints and segments."""
    return ["train", *FLAGS.split(), "--replay.storage", storage, *extra]


@functools.cache
def reference(storage: str) -> tuple[list[dict], dict[str, int]]:
    """Return the episodes of the run without faults, and its numbers of file calls."""
    scratch = Path(tempfile.mkdtemp())
    logdir, result = scratch / "run", scratch / "counts"

    def count() -> None:
        result.write_text(json.dumps(shim.counts()))

    arguments = [*train_arguments(storage), "--logdir", str(logdir)]
    options = {}
    if not shim.skip_reason():
        options = {"before": functools.partial(shim.arm, logdir), "after": count}
    outcome = run(arguments, scratch, **options)
    assert not outcome.problems([0]), outcome.problems([0])
    counts = json.loads(result.read_text()) if result.exists() else {}
    found = episodes(logdir)
    shutil.rmtree(scratch)
    return found, counts


def resume(
    logdir: Path, folder: Path, arguments: Sequence[str], log_check: str = "equal"
) -> list[str]:
    """Resume a run without faults; return the problems.

    It must continue from the newest complete checkpoint without damaged files, and end
    without temporary files. Its log is compared with that of a run without faults:
    `equal` requires the same episodes, `subset` allows missing ones (the log could not
    be written), and `skip` compares nothing (the environments differ).
    """
    step = newest_step(logdir)
    outcome = run([*arguments, "--logdir", str(logdir)], folder)
    problems = outcome.problems([0])
    if problems:
        return problems
    if step and step < STEPS and f"at agent step {step}" not in outcome.output:
        problems.append(f"the run was not resumed at step {step}\n{outcome.tail()}")
    for text in ("damaged", "moved aside", "continues without"):
        if text in outcome.output:
            problems.append(f"the resumed run reports {text!r}\n{outcome.tail()}")
    storage = arguments[arguments.index("--replay.storage") + 1]
    expected, found = iter(reference(storage)[0]), episodes(logdir)
    same = found == reference(storage)[0]
    if log_check == "subset":  # in the same order
        same = all(any(line == other for other in expected) for line in found)
    if not same and log_check != "skip":
        problems.append("the episodes differ from those of a run without faults")
    if left := leftovers(logdir):
        problems.append(f"temporary files are left: {', '.join(left)}")
    return problems


def newest_step(logdir: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    steps = [
        int(json.loads(path.read_text())["step"])
        for path in logdir.glob("ckpt/[0-9]*/manifest.json")
    ]
    return max(steps, default=0)


def episodes(logdir: Path) -> list[dict]:
    """Return the lines of `scores.jsonl` without times."""
    path = logdir / "scores.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in x.items() if k != "seconds"} for x in records]


def leftovers(logdir: Path) -> list[str]:
    """Return temporary files and incomplete checkpoints."""
    paths = [p for p in logdir.rglob("*") if p.name.endswith(".tmp")]
    paths += logdir.glob("ckpt/.partial-*")
    return [str(path.relative_to(logdir)) for path in paths]


def leaked_shared_memory(before: set[str]) -> set[str]:
    """Return the shared memory that is new since `before` and stays for two seconds.

    Other programs may create some for a short time.
    """
    left = shared_memory() - before
    for _ in range(10):
        if left:
            time.sleep(0.2)
            left &= shared_memory()
    return left


def shared_memory() -> set[str]:
    """Return the names of shared memory that no running process has mapped."""
    found = {path.name for path in Path("/dev/shm").glob("*") if path.is_file()}
    if not found:
        return found
    used = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = path.read_text().splitlines()
            used |= {line.rpartition("/")[2] for line in lines if "/dev/shm/" in line}
    return found - used
