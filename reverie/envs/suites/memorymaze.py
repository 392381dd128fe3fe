"""Memory Maze: find coloured balls again in a maze that has to be remembered.

Four sizes, each with episodes of a fixed length (1000, 2000, 3000 and 4000 steps); the
border of the image has the colour of the ball to find next, which pays 1. This is
`MemoryMaze-SIZE-v0` of the original, from its dm_env side. The balls, the walls and the
start are drawn when the simulator is made, so a seeded reset makes it anew.
"""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.adapters.dm_env import DmEnv
from reverie.envs.opengl import prepare
from reverie.envs.seeding import SEED_RANGE
from reverie.spaces import Space, Spaces

SIZES = ("9x9", "11x11", "13x13", "15x15")
ACTIONS = 6
"""Wait, forward, turn left, turn right, and both turns while going forward."""


class MemoryMaze:
    """One maze size; the agent sees 64x64 pixels and nothing else."""

    def __init__(self, name: str, seed: int = 0):
        prepare()
        with contextlib.redirect_stderr(io.StringIO()):  # it imports gym, which pleads
            from memory_maze import tasks
        logging.getLogger("absl").setLevel(logging.ERROR)  # a warning every reset
        self._make: Any = getattr(tasks, f"memory_maze_{name}")
        self._seed = seed
        self._env: DmEnv | None = None

    @property
    def obs_space(self) -> Spaces:
        flag = Space(np.dtype(bool))
        return {
            "image": Space(np.dtype(np.uint8), (64, 64, 3)),
            "reward": Space(np.dtype(np.float32)),
            "is_first": flag,
            "is_last": flag,
            "is_terminal": flag,
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.int32), (), 0, ACTIONS)}

    def reset(self, seed: int | None = None) -> Obs:
        if self._env is None or seed is not None:
            self.close()
            seed = self._seed if seed is None else seed % SEED_RANGE
            self._env = DmEnv(self._make(image_only_obs=True, seed=seed))
        return self._env.reset()

    def step(self, action: Action) -> Obs:
        assert self._env is not None, "call reset first"
        return self._env.step(action)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()
