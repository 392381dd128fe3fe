"""Section `soak`: memory, files, threads and processes of a run do not grow."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from chaos.processes import Running
from chaos.runs import leaked_shared_memory, shared_memory
from chaos.sections import Section

SECONDS = 20.0
"""Duration of a trial after its start; the first half is not compared."""
MAX_GROWTH = 1.05
"""Largest allowed ratio of the memory in the last quarter to that in the third."""
MARGIN = 24 << 20
"""Bytes by which memory may grow in addition."""

RUNS = {
    "dreamer": "train --agent dreamer --run.train_ratio 8 --replay.capacity 500",
    "replay on disk": "train --agent random --replay.storage disk "
    "--replay.capacity 2000",
    "evaluations": "train_eval --agent random --run.eval_every 50 --run.eval_eps 2 "
    "--replay.capacity 500",
    "failing workers": "train --agent random --env.vector.workers 1 "
    "--replay.capacity 500 --task chaos.bad_env:make_env",
}
FLAGS = (
    "--configs debug --run.clock steps --run.steps 1e9 --run.save_every 200 "
    "--run.log_every 200 --run.report_every 0 --run.envs 2 --logger.outputs jsonl"
)


class Usage(NamedTuple):
    """Resources that a process uses at one time."""

    memory: int
    files: int
    threads: int


def trial(name: str, rng: random.Random, folder: Path) -> list[str]:
    """Train for some time, compare usage over time, and stop with SIGTERM."""
    command, *more = RUNS[name].split()
    logdir = folder / "run"
    arguments = [command, *FLAGS.split(), *more, "--logdir", str(logdir)]
    arguments += ["--seed", str(rng.randrange(1000))]
    before = shared_memory()
    variables = {"CHAOS_FAULT": "runtime_error", "CHAOS_STEP": "500"}
    running = Running(arguments, folder, variables=variables)
    wait_for_checkpoint(running, logdir)
    usages, end = [], time.monotonic() + SECONDS
    while running.is_running() and time.monotonic() < end:
        usages.append(usage(running.pid))
        time.sleep(0.1)
    running.send(signal.SIGTERM)
    problems = running.wait().problems([128 + signal.SIGTERM])
    if left := leaked_shared_memory(before):
        problems.append(f"shared memory is left: {', '.join(left)}")
    return problems + compare(usages)


def compare(usages: list[Usage]) -> list[str]:
    """Return the resources that grow from the third to the last quarter."""
    quarter = len(usages) // 4
    if quarter < 3:
        return [f"only {len(usages)} measurements"]
    third, fourth = usages[2 * quarter : 3 * quarter], usages[3 * quarter :]
    problems = []
    for name in Usage._fields:
        old = statistics.median(getattr(u, name) for u in third)
        new = statistics.median(getattr(u, name) for u in fourth)
        limit = old * MAX_GROWTH + MARGIN if name == "memory" else old + 4
        if new > limit:
            problems.append(f"{name} grew from {old:,.0f} to {new:,.0f}")
    return problems


def wait_for_checkpoint(running: Running, logdir: Path) -> None:
    deadline = time.monotonic() + 60
    while running.is_running() and time.monotonic() < deadline:
        if any(logdir.glob("ckpt/[0-9]*")):
            return
        time.sleep(0.02)


def usage(pid: int) -> Usage:
    """Return memory, open files and threads of a process; zeros if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        files, threads = os.listdir(folder / "fd"), os.listdir(folder / "task")
    except OSError:
        return Usage(0, 0, 0)
    return Usage(pages * os.sysconf("SC_PAGE_SIZE"), len(files), len(threads))


def skip_reason() -> str:
    return "" if os.path.isdir("/proc/self/fd") else "there is no /proc"


SECTIONS = [
    Section(
        "soak",
        "memory, files and threads of longer runs",
        lambda: tuple(RUNS),
        trial,
        skip_reason,
    )
]
