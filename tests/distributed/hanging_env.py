"""An environment whose tenth step does not return until it is released."""

from __future__ import annotations

import threading

import gymnasium
import numpy as np

released = threading.Event()


class HangingEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 10:
            released.wait()
        return np.zeros(2, np.float32), 0.0, self.steps == 30, False, {}
