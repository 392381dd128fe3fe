"""Training runs on any number of ranks, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reverie.distributed.launch import find_launch
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.ranks import run_follower, run_on_ranks
from reverie.run.train import train
from reverie.run.used_settings import resolve_for_command

FLAGS = {
    "task": "gym_CartPole-v1",
    "run.envs": 2,
    "run.log_every": 10,
    "run.save_every": 0,
    "run.report_every": 0,
    "dreamer.batch_size": 5,
    "dreamer.batch_length": 6,
    "dreamer.imag_length": 3,
    "dreamer.(rewhead|value).output": "symlog_mse",
    "logger.outputs": ["jsonl"],
}


def run(
    logdir: str, steps: int, settings: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Train, or resume, a deterministic run; return `outcome`, or None on rank > 0."""
    if find_launch().rank:
        run_follower()
        return None
    flags = {**FLAGS, "logdir": logdir, "run.steps": steps, **(settings or {})}
    config = resolve_for_command("train", ["debug", "deterministic"], flags=flags)
    path = run_on_ranks(lambda: train(config))
    return outcome(path)


def outcome(path: Path) -> dict[str, Any]:
    """Return the log of a run, its newest checkpoint and the agent's state in it."""
    newest = Checkpoints(path / "ckpt").newest()
    assert newest is not None
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return {
        "log": [json.loads(line) for line in lines],
        "agent": checkpoint.read_part(newest, "agent"),
        "checkpoint": newest,
    }
