"""Section `envs`: environments with faults, in the process and in workers."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from chaos.bad_env import FAULTS, HAPPENED
from chaos.processes import describe_code, run
from chaos.runs import leaked_shared_memory, shared_memory
from chaos.sections import Section

IN_PROCESS = ("exceptions", "values", "side effects")
"""Classes of faults for environments in the process of the run. Crashes and hangs are
not among them, because they would affect the whole run."""
CLASSES = tuple(
    [f"{kind}, in the process" for kind in IN_PROCESS]
    + [f"{kind}, in workers" for kind in FAULTS]
)
FLAGS = (
    "--configs debug --agent random --task chaos.bad_env:make_env --run.clock steps "
    "--run.steps 80 --run.save_every 20 --run.log_every 20 --run.report_every 0 "
    "--run.envs 2 --logger.outputs jsonl"
)
TIMEOUTS = "--env.vector.timeout 3 --env.vector.start_timeout 20"
"""Flags of runs with worker processes."""


def trial(name: str, rng: random.Random, folder: Path) -> list[str]:
    """Train with a fault, then without: the first run must succeed or print a fix."""
    kind, _, place = name.partition(", ")
    fault, step = rng.choice(FAULTS[kind]), rng.choice([1, 2, 9, 10, 11, 25, 33])
    workers = rng.choice([1, 2]) if place == "in workers" else 0
    logdir = folder / "run"
    arguments = ["train", *FLAGS.split(), "--env.vector.workers", str(workers)]
    arguments += [*(TIMEOUTS.split() if workers else []), "--logdir", str(logdir)]
    before = shared_memory()
    variables = {"CHAOS_FAULT": fault, "CHAOS_STEP": str(step)}
    outcome = run(arguments, folder, variables=variables)
    problems = outcome.problems()
    if fault in ("closes_streams", "no_streams") and outcome.code == 2:
        problems = []  # the message cannot be printed
    if not problems and outcome.code == 0 and not (logdir / "ckpt").exists():
        problems.append("the run ended with exit code 0 and without a checkpoint")
    (folder / HAPPENED).touch()
    again = run(arguments, folder, variables={"CHAOS_FAULT": "", "CHAOS_STEP": "1"})
    problems += again.problems([0])
    if left := leaked_shared_memory(before):
        problems.append(f"shared memory is left: {', '.join(left)}")
    end = describe_code(outcome.code)
    return [f"({fault} at step {step}, {end}) {text}" for text in problems]


def skip_reason() -> str:
    try:
        subprocess.run(["sleep", "0"], check=True)
    except OSError as error:
        return f"there is no `sleep` program: {error}"
    return ""


SECTIONS = [
    Section(
        "envs",
        "environments that fail, crash, hang or return wrong values",
        lambda: CLASSES,
        trial,
        skip_reason,
    )
]
