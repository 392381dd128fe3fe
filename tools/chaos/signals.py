"""Section `signals`: signals at random times, to the run and to its workers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from chaos.processes import Running
from chaos.runs import (
    STEPS,
    leaked_shared_memory,
    resume,
    shared_memory,
    train_arguments,
)
from chaos.sections import Section

SIGNALS = {
    "SIGINT": [signal.SIGINT],
    "SIGTERM": [signal.SIGTERM],
    "SIGTERM twice": [signal.SIGTERM, signal.SIGTERM],
    "SIGINT, then SIGTERM": [signal.SIGINT, signal.SIGTERM],
    "SIGINT three times": [signal.SIGINT] * 3,
    "SIGSTOP, then SIGCONT": [signal.SIGSTOP, signal.SIGCONT],
    "SIGKILL": [signal.SIGKILL],
    "SIGKILL of a worker": [],
}
"""Signals that are sent to the run, by class."""


def trial(name: str, rng: random.Random, folder: Path) -> list[str]:
    """Send signals at a random step; the run must save, and resume afterwards."""
    logdir, arguments = folder / "run", train_arguments(rng.choice(["disk", "ram"]))
    kills_worker = name == "SIGKILL of a worker"
    if kills_worker:
        arguments += ["--env.vector.workers", "2"]
    before = shared_memory()
    running = Running([*arguments, "--logdir", str(logdir)], folder)
    wait_for_step(running, logdir, rng.randrange(STEPS))
    time.sleep(rng.random() * 0.05)
    sent = SIGNALS[name]
    for number in sent:
        running.send(number)
        time.sleep(rng.choice([0, 0, 0.001, 0.02]))
    if kills_worker:
        kill_child(running.pid, rng)
    outcome = running.wait()
    codes = {0, *(128 + number for number in sent), *(-number for number in sent)}
    problems = outcome.problems(codes - {-signal.SIGSTOP, -signal.SIGCONT})
    problems += resume(logdir, folder, arguments, "skip" if kills_worker else "equal")
    if left := leaked_shared_memory(before):
        problems.append(f"shared memory is left: {', '.join(left)}")
    return problems


def wait_for_step(running: Running, logdir: Path, step: int) -> None:
    """Wait until the run has reached a step (episodes have 5 steps) or has ended."""
    path, deadline = logdir / "scores.jsonl", time.monotonic() + 60
    while running.is_running() and time.monotonic() < deadline:
        if not step or (path.exists() and path.read_text().count("\n") >= step // 5):
            return
        time.sleep(0.002)


def kill_child(pid: int, rng: random.Random) -> None:
    """Kill a random worker process, if there is one."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    if children:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(int(rng.choice(children)), signal.SIGKILL)


SECTIONS = [
    Section(
        "signals",
        "SIGINT, SIGTERM, SIGSTOP and SIGKILL at random times",
        lambda: tuple(SIGNALS),
        trial,
    )
]
