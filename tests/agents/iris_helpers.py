"""A small Δ-IRIS agent, its environment and a feed for its tests."""

from __future__ import annotations

import numpy as np
import torch

from reverie.agents.explore import ExploreConfig
from reverie.agents.iris.agent import Iris
from reverie.agents.iris.config import IrisConfig
from reverie.agents.options import BuildOptions
from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.envs.vector.vec_env import make_vec_env
from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig
from reverie.replay.feed import ReplayFeed
from reverie.rows import Rows
from reverie.run.collectors import zero_last_actions
from reverie.run.config import resolve
from reverie.spaces import Space

FLAG = Space(np.dtype(bool))
FLAGS = {
    "reward": Space(np.dtype(np.float32)),
    "is_first": FLAG,
    "is_last": FLAG,
    "is_terminal": FLAG,
}


def with_burn_in(burn_in: int) -> IrisConfig:
    """Settings with this many burn-in frames."""
    names = ("training.world_model.length", "world_model.transformer.blocks")
    longer = {f"iris.{name}": burn_in + 4 for name in names}
    return settings(**longer, **{"iris.actor_critic.burn_in": burn_in})


def settings(**flags) -> IrisConfig:
    return resolve(["iris_tiny"], flags={"task": "catch", **flags}).iris


def make_env(index=0):
    return Catch(CatchConfig(4, 4, (4, 4)), index)


def make_agent(config=None, seed=0, env=None, explore=None, **spaces) -> Iris:
    env = env or make_env()
    explore = explore or ExploreConfig()
    return Iris(
        spaces.get("obs_space", env.obs_space),
        spaces.get("act_space", env.act_space),
        config or settings(),
        BuildOptions(torch.device("cpu"), seed=seed, explore=explore),
    )


def collected_feed(agent, steps=60, envs=3, seed=0):
    """A feed of a replay buffer with data that the agent collected."""
    vec_env = make_vec_env(make_env, envs)
    replay = Replay(
        {**vec_env.obs_space, **vec_env.act_space},
        {},
        ReplayConfig(storage="ram"),
        capacity=1000,
        num_envs=envs,
        windows=agent.windows,
        directory=None,
        seed=seed,
    )
    obs, carry = vec_env.reset(), agent.initial(envs)
    for _ in range(steps):
        carry, action, _ = agent.policy(carry, obs)
        action = zero_last_actions(action, obs)
        collected = Rows({**obs, **action})
        replay.add(collected.values)
        agent.schedule.add_env_steps(collected.env_steps)
        obs = vec_env.step(action)
    return ReplayFeed(replay, agent.windows)


def weights(agent, name):
    return {k: v.clone() for k, v in agent.components()[name].state_dict().items()}


def changed(before, after):
    return any(not torch.equal(before[key], after[key]) for key in before)


def observations(images, first=False, last=False):
    count = len(images)
    return {
        "image": images,
        "reward": np.zeros(count, np.float32),
        "is_first": np.full(count, first),
        "is_last": np.full(count, last),
        "is_terminal": np.full(count, False),
    }


def frames(seed, count=2):
    return np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), np.uint8)


def in_second_epoch(agent):
    agent.schedule.load_state_dict({**agent.schedule.state_dict(), "epoch": 2})
    return agent
