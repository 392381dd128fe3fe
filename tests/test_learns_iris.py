"""Δ-IRIS learns a small pixel world on a CPU, and only because of its world model.

The world is catch on a grid of 4 x 4 pixels: three steps, 1 for a catch and -1 for a
miss. A random policy scores about -0.5, the best 1.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from reverie.evaluation.episodes import evaluate
from reverie.run.config import resolve
from reverie.run.train import train

COMPONENTS = ("tokenizer", "world_model", "actor_critic")


def learn(logdir: Path, **flags) -> float:
    given = {
        "logdir": str(logdir),
        "task": "catch",
        "device": "cpu",
        "logger.outputs": ["jsonl"],
        "run.report_every": 0,
        **flags,
    }
    train(resolve(["iris_tiny"], flags=given))
    return evaluate(logdir, 200).summary["score"]


@pytest.mark.slow
def test_catch_is_solved_in_dreams(tmp_path):
    assert learn(tmp_path / "run") >= 0.8


@pytest.mark.slow
def test_nothing_is_learned_in_an_untrained_world(tmp_path):
    untrained = {
        f"iris.training.{component}.{steps}": 0
        for component in ("tokenizer", "world_model")
        for steps in ("steps", "first_steps")
    }
    assert learn(tmp_path / "run", **untrained) < 0.5
