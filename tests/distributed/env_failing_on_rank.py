"""An environment that fails once in one rank of a test."""

from __future__ import annotations

import os

import gymnasium
import numpy as np

FAILING_RANK = "1"

failed: list[bool] = []  # not empty after the failure


class FailingEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if os.environ.get("RANK") == FAILING_RANK and not failed:
            failed.append(True)
            raise ValueError("fails on purpose")
        return np.zeros(2, np.float32), 0.0, self.steps == 5, False, {}
