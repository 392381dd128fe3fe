"""Agents solve small tasks. Most of these tests take minutes on two cores.

`make test-slow` runs the slow ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from reverie.evaluation.boundaries import eval_boundaries
from reverie.evaluation.episodes import evaluate, play_episodes
from reverie.run.config import resolve
from reverie.run.factory import FIRST_EVAL_ENV, make_envs
from reverie.run.load import open_run
from reverie.run.train import train

QUIET = {"logger.outputs": "jsonl", "run.log_every": 5, "device": "cpu"}


def learn(logdir: Path, *names: str, **flags) -> Path:
    return train(resolve(names, flags={**QUIET, "logdir": str(logdir), **flags}))


def loss_curve(logdir: Path, key: str) -> list[float]:
    import json

    lines = [json.loads(x) for x in (logdir / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def test_the_world_model_of_catch_improves(tmp_path):
    flags = {"run.steps": 800, "run.clock": "steps", "run.log_every": 80}
    path = learn(tmp_path / "run", task="catch", **flags, **{"run.report_every": 0})
    image = loss_curve(path, "train/loss/image")
    # A black image has a loss of about 14; the first losses are far above it.
    assert image[0] > 20
    assert image[-1] < 12
    assert loss_curve(path, "train/loss/rew")[-1] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_catch_is_solved_from_pixels(tmp_path, seed):
    flags = {"task": "catch", "seed": seed, "run.steps": 10000}
    path = learn(tmp_path / "run", **flags)
    assert evaluate(path, 100).summary["score"] >= 0.9


@pytest.mark.slow
def test_catch_is_solved_with_the_vta_world_model(tmp_path):
    flags = {"task": "catch", "run.steps": 10000}
    path = learn(tmp_path / "run", "catch", "vta_tiny", **flags)
    assert evaluate(path, 100).summary["score"] >= 0.9


@pytest.mark.slow
def test_catch_is_solved_with_the_parts_of_dreamerv3_torch(tmp_path):
    path = learn(tmp_path / "run", "dreamerv3_torch", "catch", **{"run.steps": 8000})
    assert evaluate(path, 100).summary["score"] >= 0.9


@pytest.mark.slow
def test_boundaries_of_bouncing_balls_beat_every_baseline(tmp_path):
    torch.set_num_threads(2)  # takes a quarter of an hour
    path = learn(tmp_path / "run", "vta_balls_small")
    summary = eval_boundaries(path, 1000).summary
    baselines = {
        key: value
        for key, value in summary.items()
        if key.startswith("baselines/") and key.endswith("/exact/f1")
    }
    assert len(baselines) >= 4
    best = max(baselines.values())
    assert summary["boundaries/exact/f1"] > best + 0.05, baselines


@pytest.mark.slow
def test_pendulum_is_swung_up(tmp_path):
    flags = {"task": "gym_Pendulum-v1", "run.steps": 12000}
    flags |= {"run.envs": 8, "run.train_ratio": 32, "replay.capacity": 50_000}
    path = learn(tmp_path / "run", "tiny", **flags)
    assert evaluate(path, 20).summary["score"] >= -300


class WithoutMemory:
    """An agent whose recurrent state is reset at every step."""

    def __init__(self, agent):
        self.agent = agent
        self.initial = agent.initial

    def policy(self, carry, obs, mode="train"):
        first = {**obs, "is_first": np.ones_like(obs["is_first"])}
        return self.agent.policy(self.initial(len(first["is_first"])), first, mode)


@pytest.mark.slow
def test_the_memory_task_is_solved_only_with_memory(tmp_path):
    path = learn(tmp_path / "run", task="carry")
    assert evaluate(path, 100).summary["score"] >= 0.8
    run = open_run(path)
    envs = make_envs(run.config, 4, FIRST_EVAL_ENV)
    agent = run.load_policy(envs)
    played = play_episodes(WithoutMemory(agent), envs, 100)
    envs.close()
    # A random guess scores 2 / 3 - 1.
    assert np.mean([episode.score for episode in played]) < 0.1
