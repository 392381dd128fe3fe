"""Agents learn: minutes each on two cores, so most of these are slow.

`make test-slow` runs them. The quick one shows that learning goes the right way.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from reverie.evaluation.boundaries import measure_boundaries
from reverie.evaluation.episodes import evaluate, load_agent, play_episodes
from reverie.run.checkpoint import find_checkpoint
from reverie.run.config import resolve
from reverie.run.factory import EVAL_SEEDS, make_envs
from reverie.run.folder import read_config
from reverie.run.train import train

QUIET = {"logger.outputs": "jsonl", "run.log_every": 5, "device": "cpu"}


def learn(logdir: Path, *names: str, **flags) -> Path:
    return train(resolve(names, flags={**QUIET, "logdir": str(logdir), **flags}))


def loss_curve(logdir: Path, key: str) -> list[float]:
    import json

    lines = [json.loads(x) for x in (logdir / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def test_the_world_of_catch_is_soon_foreseen(tmp_path):
    flags = {"run.steps": 800, "run.clock": "steps", "run.log_every": 80}
    path = learn(tmp_path / "run", task="catch", **flags, **{"run.report_every": 0})
    image = loss_curve(path, "train/loss/image")
    # Black everywhere would be about 14; the first losses are far above it.
    assert image[0] > 20
    assert image[-1] < 12
    assert loss_curve(path, "train/loss/rew")[-1] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_catch_is_solved_from_pixels(tmp_path, seed):
    flags = {"task": "catch", "seed": seed, "run.steps": 10000}
    path = learn(tmp_path / "run", **flags)
    assert evaluate(path, 100)["score"] >= 0.9


@pytest.mark.slow
def test_catch_is_solved_in_a_world_of_segments(tmp_path):
    flags = {"task": "catch", "run.steps": 10000}
    path = learn(tmp_path / "run", "catch", "vta_tiny", **flags)
    assert evaluate(path, 100)["score"] >= 0.9


@pytest.mark.slow
def test_boundaries_of_bouncing_balls_beat_every_baseline(tmp_path):
    torch.set_num_threads(2)  # a quarter of an hour on as many cores
    path = learn(tmp_path / "run", "vta_balls_small")
    found = measure_boundaries(path, 1000)
    known = {
        key: value
        for key, value in found.items()
        if key.startswith("baselines/") and key.endswith("/exact/f1")
    }
    assert len(known) >= 4
    assert found["boundaries/exact/f1"] > max(known.values()) + 0.05, known


@pytest.mark.slow
def test_pendulum_is_swung_up(tmp_path):
    flags = {"task": "gym_Pendulum-v1", "run.steps": 12000}
    flags |= {"run.envs": 8, "run.train_ratio": 32, "replay.capacity": 50_000}
    path = learn(tmp_path / "run", "tiny", **flags)
    assert evaluate(path, 20)["score"] >= -300


class Forgetful:
    """An agent whose recurrent state is cut: every row is the first to it."""

    def __init__(self, agent):
        self.agent = agent
        self.initial = agent.initial

    def policy(self, carry, obs, mode="train"):
        cut = {**obs, "is_first": np.ones_like(obs["is_first"])}
        return self.agent.policy(self.initial(len(cut["is_first"])), cut, mode)


@pytest.mark.slow
def test_the_memory_task_is_solved_by_remembering(tmp_path):
    path = learn(tmp_path / "run", task="carry")
    assert evaluate(path, 100)["score"] >= 0.8
    config = read_config(path)
    envs = make_envs(config, 4, EVAL_SEEDS)
    agent = load_agent(config, find_checkpoint(path), envs)
    played = play_episodes(Forgetful(agent), envs, 100)
    envs.close()
    # Chance is 2 / 3 - 1.
    assert np.mean([episode.score for episode in played]) < 0.1
