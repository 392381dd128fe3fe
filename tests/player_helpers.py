"""An environment with any spaces, and players for it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from reverie import envs
from reverie.run.config import resolve
from reverie.run.factory import make_agent
from reverie.run.load import PolicySource
from reverie.run.player import Player
from reverie.storage.run_spaces import RunSpaces, read_spaces, write_spaces

BOX = spaces.Box(-1, 1, (3,), np.float32)
DISCRETE = spaces.Discrete(3)


class Toy(gymnasium.Env):
    """Returns samples of its observation space; refuses actions outside its space."""

    def __init__(self, obs: Any = BOX, act: Any = DISCRETE):
        self.observation_space, self.action_space = obs, act

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.count += 1
        return self.observation_space.sample(), 0.0, False, self.count == 5, {}


def make_player(
    tmp_path: Any, toy: gymnasium.Env, configs: str = "debug", **flags: Any
) -> Player:
    """Return an untrained agent for an environment, with spaces read from a file."""
    config = resolve([configs], flags={"task": "python:env", **flags})
    env = envs.make(toy, config.env)
    write_spaces(tmp_path, env.obs_space, env.act_space)
    read = read_spaces(tmp_path)
    source = PolicySource(config, RunSpaces(*read), RunSpaces(*read), None)
    agent = make_agent(config, read, torch.device("cpu"), "float32")
    return Player(source, agent)
