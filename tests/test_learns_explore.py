"""Plan2Explore finds a reward that the default policy does not find in as many steps.

One task is a chain of positions. In each, one of three actions leads to the next
position, and the others lead back to the start. The reward is at the end of the chain,
which takes 10 right actions in a row: random actions find it in one of 12,000 episodes.

The other task is an empty room of MiniGrid. The reward is in the opposite corner, which
takes at least 7 of 10 steps: random actions find it in one of 19,000 episodes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reverie import envs
from reverie.api import Action, Obs
from reverie.run.config import resolve
from reverie.run.train import train
from reverie.spaces import Space, step_spaces, step_values

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

GRID = {
    **LEARNING,
    "task": "minigrid_Empty-6x6",
    "env.minigrid.view": "symbols",
    "env.length": 10,
    "run.steps": 6000,  # 544 episodes
    "dreamer.imag_loss.actent": 0.03,
    "device": "auto",
    "precision": "float32",
}
LEFT, RIGHT, FORWARD = range(3)
"""Actions of MiniGrid; the other four do nothing in an empty room."""


class Chain:
    """Move along a chain; `position` is one-hot."""

    def __init__(self) -> None:
        position = Space(np.float32, (POSITIONS + 1,), 0, 1)
        self.obs_space = {"position": position, **step_spaces(0, 1)}
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
            **step_values(reward, self.time == 0, self.time >= LENGTH),
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
    make_env = None if "task" in flags else lambda index: Chain()
    train(resolve(presets, flags=settings), make_env)
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


@pytest.mark.slow
def test_plan2explore_finds_the_goal_of_a_sparse_minigrid_task(tmp_path):
    """Rewards of seeds 0, 1 and 2 are added, because single runs may have none.

    Random actions would have 0.09 episodes with reward in the three runs, so that two
    or more have a probability of 0.4 %.
    """
    pytest.importorskip("minigrid")
    default, explore = (
        sum(
            rewarded_episodes(
                tmp_path / f"{policy}{seed}", policy, seed, "tiny", **GRID
            )
            for seed in (0, 1, 2)
        )
        for policy in ("none", "plan2explore")
    )
    assert default == 0
    assert explore >= 2


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


def test_random_actions_hardly_ever_reach_the_corner_of_the_room():
    pytest.importorskip("minigrid")
    config = resolve(flags={k: v for k, v in GRID.items() if k[:4] in ("task", "env.")})
    env = envs.make(config.task, config.env, seed=0)
    env.reset()
    path = [FORWARD] * 3 + [RIGHT] + [FORWARD] * 3
    rewards = [float(env.step({"action": action})["reward"]) for action in path]
    env.close()
    assert rewards[:-1] == [0] * 6
    assert rewards[-1] > 0.9
    # probability that an episode of random actions has a reward, in a room of 4 x 4
    probability, arrives = np.zeros((4, 4, 4)), 0.0  # direction, row, column
    probability[0, 0, 0] = 1
    for _ in range(int(GRID["env.length"])):
        moved = (
            4 * probability + np.roll(probability, 1, 0) + np.roll(probability, -1, 0)
        )
        for facing, step in enumerate(((0, 1), (1, 0), (0, -1), (-1, 0))):
            for cell in np.ndindex(4, 4):
                row, column = np.add(cell, step)
                ahead = (row, column) if {row, column} <= {0, 1, 2, 3} else cell
                moved[facing, *ahead] += probability[facing, *cell]
        probability = moved / 7
        arrives += probability[:, 3, 3].sum()
        probability[:, 3, 3] = 0
    assert arrives == pytest.approx(1 / 19_000, rel=0.05)
