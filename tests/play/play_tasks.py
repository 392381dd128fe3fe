"""Environments with other actions than one discrete one."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, MultiDiscrete


class Echo(gymnasium.Env):
    """Episodes of six steps; the observation is the action, as floats."""

    def __init__(self, action_space: gymnasium.Space):
        self.action_space = action_space
        count = int(np.prod(action_space.shape))
        self.observation_space = Box(-9, 9, (count,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.time = 0
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.time += 1
        obs = np.asarray(action, np.float32).reshape(-1)
        return obs, float(obs.sum()), False, self.time == 6, {}


def make_groups() -> Echo:
    """Return an environment whose action has two discrete entries."""
    return Echo(MultiDiscrete([3, 4]))


def make_continuous() -> Echo:
    return Echo(Box(-2, 2, (2,), np.float32))
