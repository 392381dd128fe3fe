"""Source of a module with an environment that fails in one of its steps."""

SOURCE = """
import os
import sys
import gymnasium
import numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    fails_in = 9

    def reset(self, seed=None, options=None):
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fails_in:
            self.fail()
        obs = np.full(3, getattr(self, "value", 0), np.float32)
        reward = getattr(self, "reward", 0.0)
        return obs, reward, self.steps >= 10, False, {}

    def fail(self):
        pass
"""
