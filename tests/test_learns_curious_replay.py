"""Curious Replay learns new transitions with fewer updates than the default replay.

A world model is trained on a replay with 6,000 rows of one kind of episodes. Then 160
rows of another kind arrive, and training continues for 40 updates. The losses of new
episodes are then lower with Curious Replay than with the default replay.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.replay.buffer import Replay
from reverie.replay.feed import ReplayFeed
from reverie.run.config import resolve
from reverie.spaces import Space, step_spaces

POSITIONS, LENGTH = 16, 32
OBS = {"position": Space(np.float32, (POSITIONS,), 0, 10), **step_spaces(0, 1)}
ACT = {"action": Space(np.int32, (), 0, 2)}
OLD_ROWS, NEW_ROWS = 6000, 160
BEFORE, AFTER = 150, 40
"""Updates before and after the new rows arrive."""


def make_episode(rng: np.random.Generator, first: int) -> dict[str, np.ndarray]:
    """Move on a ring of 8 positions that starts at `first`; actions choose the way."""
    action = rng.integers(0, 2, LENGTH).astype(np.int32)
    steps = np.append(rng.integers(8), 2 * action[:-1] - 1).cumsum()
    index = np.arange(LENGTH)
    return {
        "position": 10 * np.eye(POSITIONS, dtype=np.float32)[first + steps % 8],
        "action": action,
        "reward": np.zeros(LENGTH, np.float32),
        "is_first": index == 0,
        "is_last": index == LENGTH - 1,
        "is_terminal": np.zeros(LENGTH, bool),
    }


def losses_after_a_change(seed: int, *presets: str) -> tuple[float, float]:
    """Return the prediction losses of old and of new episodes."""
    torch.set_num_threads(1)
    flags = {"dreamer.opt.lr": 3e-3, "dreamer.opt.warmup": 50}
    config = resolve(["tiny", *presets], flags=flags)
    settings = replace(config.dreamer, behaviour=False)
    options = BuildOptions(torch.device("cpu"), seed=seed)
    agent = Dreamer(OBS, ACT, settings, options)
    replay = Replay(
        {**OBS, **ACT},
        agent.extras,
        replace(config.replay, storage="ram", save=False),
        capacity=10_000,
        num_envs=1,
        windows=agent.windows,
        directory=None,
        seed=seed,
    )
    feed = ReplayFeed(replay, agent.windows)
    rng = np.random.default_rng(seed)
    for first, rows, updates in ((0, OLD_ROWS, BEFORE), (8, NEW_ROWS, AFTER)):
        for _ in range(rows // LENGTH):
            replay.add_episode(make_episode(rng, first))
        for _ in range(updates):
            agent.train(feed)
    losses = []
    for first in (0, 8):
        episodes = [make_episode(rng, first) for _ in range(32)]
        batch = {k: torch.tensor(np.stack([e[k] for e in episodes])) for k in OBS | ACT}
        batch["mask"] = torch.ones(32, LENGTH, dtype=torch.bool)
        found, _ = agent.episode_losses(batch)
        losses.append(float(found["position"].mean() + found["dyn"].mean()))
    return losses[0], losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_curious_replay_learns_new_transitions_sooner(seed):
    old, new = losses_after_a_change(seed)
    curious_old, curious_new = losses_after_a_change(seed, "curious_replay")
    assert curious_new < 0.9 * new
    assert curious_old < 1.3 * old
