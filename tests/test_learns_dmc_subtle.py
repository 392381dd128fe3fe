"""The Barlow Twins loss represents a point mass of about one pixel (`dmc_subtle`).

The world model is trained on recorded episodes with random actions. A linear regression
then predicts the position of the point mass from the features at the last step of an
episode. The metric is the fraction of the variance that it explains on held-out
episodes (R²): about 0 if the features do not depend on the point mass. It cannot be 1,
because the point mass is visible at about 70 % of all positions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.envs.suites.dmc import DMCConfig
from reverie.envs.suites.dmc_subtle import make_subtle
from reverie.nets.rng import Rng
from reverie.replay.buffer import Replay
from reverie.replay.feed import ReplayFeed
from reverie.run.config import resolve

EPISODES, HELD_OUT, LENGTH, UPDATES = 700, 150, 8, 400
RIDGE = 10.0
"""Regularization of the linear regression."""
MARGIN = 0.15
"""By how much the metric has to be larger than with a decoder."""
Arrays = dict[str, np.ndarray]


@cache
def record() -> Arrays:
    """Return the arrays of episodes with random actions: (episodes, steps, ...)."""
    pytest.importorskip("dm_control")
    try:
        env = make_subtle("point_mass", DMCConfig(repeat=2), seed=0)
        env.reset(0)
    except Exception as error:
        pytest.skip(f"dm_control cannot render here: {error}")
    rng, episodes = np.random.default_rng(0), []
    for seed in range(EPISODES):
        obs, rows = env.reset(seed), []
        for step in range(LENGTH):
            if step == 0 or rng.random() < 0.3:
                action = rng.uniform(-1, 1, 2).astype(np.float32)
            is_last = step == LENGTH - 1
            rows.append({**obs, "action": action * (not is_last), "is_last": is_last})
            if not is_last:
                obs = env.step({"action": action})
        episodes.append({key: np.stack([row[key] for row in rows]) for key in rows[0]})
    env.close()
    return {key: np.stack([x[key] for x in episodes]) for key in episodes[0]}


def prepare(seed: int, representation: str) -> tuple[Dreamer, ReplayFeed]:
    """Return an agent and its batches."""
    torch.set_num_threads(1)
    flags: dict[str, Any] = {"task": "dmc_subtle_point_mass"}
    flags |= {"dreamer.batch_length": LENGTH, "dreamer.behaviour": False}
    config = resolve(
        ["tiny"], flags={**flags, "dreamer.representation": representation}
    )
    env = make_subtle("point_mass", DMCConfig(repeat=2, proprio=False), seed)
    options = BuildOptions(torch.device("cpu"), seed=seed)
    agent = Dreamer(env.obs_space, env.act_space, config.dreamer, options)
    env.close()
    spaces = {**env.obs_space, **env.act_space}
    replay = Replay(
        spaces,
        agent.extras,
        replace(config.replay, storage="ram", save=False, online=False),
        capacity=20_000,
        num_envs=1,
        windows=agent.windows,
        directory=None,
        seed=seed,
    )
    arrays = {key: value[HELD_OUT:] for key, value in record().items() if key in spaces}
    for i in range(EPISODES - HELD_OUT):
        replay.add_episode({k: x[i].astype(spaces[k].dtype) for k, x in arrays.items()})
    return agent, ReplayFeed(replay, agent.windows)


def last_features(agent: Dreamer) -> np.ndarray:
    """Return the features at the last step of each episode, and a constant."""
    keys = [*agent.obs_space, "reward", "is_first", "is_last", "is_terminal"]
    batch: dict[str, Any] = {key: torch.tensor(record()[key]) for key in keys}
    action = torch.tensor(record()["action"], dtype=torch.float32)
    batch["action"] = action
    batch["prevact"] = {"action": torch.cat([action[:, :1] * 0, action[:, :-1]], 1)}
    with torch.no_grad():
        start, rng = agent.world.initial(EPISODES), Rng(0, "test", agent.device)
        states = agent.world.observe(start, batch, rng)
        features = agent.world.features(states)[:, -1].double().numpy()
    return np.concatenate([features, np.ones((EPISODES, 1))], 1)


@cache
def explained_variance(seed: int, representation: str) -> float:
    """Train a world model; return R² of the position on held-out episodes."""
    agent, feed = prepare(seed, representation)
    for _ in range(UPDATES):
        agent.train(feed)
    x, y = last_features(agent), record()["position"][:, -1].astype(float)
    train, held = slice(HELD_OUT, None), slice(HELD_OUT)
    gram = x[train].T @ x[train] + RIDGE * np.eye(x.shape[1])
    error = y[held] - x[held] @ np.linalg.solve(gram, x[train].T @ y[train])
    return float(1 - error.var(0).mean() / y[held].var(0).mean())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_point_mass_of_one_pixel_is_represented(seed: int) -> None:
    barlow, decoder = (explained_variance(seed, x) for x in ("barlow", "decoder"))
    assert barlow > decoder + MARGIN, (barlow, decoder)
