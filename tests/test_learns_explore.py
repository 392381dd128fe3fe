"""Plan2Explore finds a reward that the default policy does not find in as many steps.

The task is a chain of positions. In each, one of three actions leads to the next
position, and the others lead back to the start. The reward is at the end of the chain,
which takes 10 right actions in a row: random actions find it in one of 12,000 episodes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reverie.api import Action, Obs
from reverie.run.config import resolve
from reverie.run.train import train
from reverie.spaces import Space, flag_spaces, flags

ACTIONS, POSITIONS, LENGTH = 3, 10, 16
STEPS = 5000
"""Agent steps of a run, about 290 episodes."""
LEARNING = {
    "run.steps": STEPS,
    "run.envs": 4,
    "run.train_ratio": 64,
    "replay.capacity": 20_000,
    # chosen together for short runs, see benchmarks/log.md; not tuned one by one
    "dreamer.horizon": 15,
    "explore.log": False,
    "explore.retnorm.limit": 0.01,
    "explore.ensemble.models": 5,
    "explore.ensemble.layers": 2,
    "explore.ensemble.units": 64,
}


class Chain:
    """Move along a chain; `position` is one-hot."""

    def __init__(self) -> None:
        position = Space(np.float32, (POSITIONS + 1,), 0, 1)
        self.obs_space = {"position": position, **flag_spaces(0, 1)}
        self.act_space = {"action": Space(np.int32, (), 0, ACTIONS)}
        self.position = self.time = 0

    def reset(self, seed: int | None = None) -> Obs:
        self.position = self.time = 0
        return self._obs()

    def step(self, action: Action) -> Obs:
        is_right = int(action["action"]) == self.position % ACTIONS
        self.position = min(self.position + 1, POSITIONS) if is_right else 0
        self.time += 1
        return self._obs()

    def close(self) -> None:
        pass

    def _obs(self) -> Obs:
        position = np.zeros(POSITIONS + 1, np.float32)
        position[self.position] = 1
        reward = float(self.position == POSITIONS)
        return {
            "position": position,
            **flags(reward, self.time == 0, self.time >= LENGTH),
        }


def rewarded_episodes(logdir: Path, policy: str, seed: int, *presets, **flags) -> int:
    """Train, and return the number of training episodes with a reward."""
    settings = {
        "logdir": str(logdir),
        "seed": seed,
        "device": "cpu",
        "logger.outputs": "jsonl",
        "run.report_every": 0,
        "explore.policy": policy,
        **flags,
    }
    train(resolve(presets, flags=settings), lambda index: Chain())
    lines = (logdir / "scores.jsonl").read_text().splitlines()
    return sum(json.loads(line)["episode/score"] > 0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plan2explore_finds_a_reward_that_the_default_does_not(tmp_path, seed):
    default = rewarded_episodes(tmp_path / "default", "none", seed, "tiny", **LEARNING)
    explore = rewarded_episodes(
        tmp_path / "explore", "plan2explore", seed, "tiny", **LEARNING
    )
    assert default == 0
    assert explore >= 10


@pytest.mark.extended
def test_the_default_and_plan2explore_have_as_many_episodes(tmp_path):
    flags = {"run.steps": 160, "run.clock": "steps", "run.log_every": 40}
    counts, metrics = [], []
    for policy in ("none", "plan2explore"):
        path = tmp_path / policy
        rewarded_episodes(path, policy, 0, "debug", **flags)
        counts.append(len((path / "scores.jsonl").read_text().splitlines()))
        metrics.append((path / "metrics.jsonl").read_text())
    assert counts == [8, 8]
    assert ["explore/disagreement" in text for text in metrics] == [False, True]


def test_the_reward_of_the_chain_needs_all_right_actions():
    env = Chain()
    env.reset()
    rewards = [env.step({"action": i % 3})["reward"] for i in range(POSITIONS)]
    assert rewards == [0] * (POSITIONS - 1) + [1]
    assert env.step({"action": (POSITIONS + 1) % 3})["position"][0]
    # probability that an episode of random actions has a reward
    probability, arrives = np.eye(POSITIONS + 1)[0], 0.0
    for _ in range(LENGTH):
        moved = np.roll(probability, 1) / ACTIONS
        moved[0] += (1 - 1 / ACTIONS) * probability.sum()
        arrives += moved[POSITIONS]
        moved[POSITIONS], probability = 0, moved
    assert arrives == pytest.approx(1 / 12_000, rel=0.05)
