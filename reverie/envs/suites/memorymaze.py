"""Memory Maze: find colored balls repeatedly in a maze that has to be memorized.

Four sizes with episodes of fixed length (1000, 2000, 3000 and 4000 steps). The border
of the image has the color of the ball to find next; reaching it gives reward 1. These
are the image-only tasks `MemoryMaze-SIZE-v0` of the original, through its dm_env
interface. The simulator takes a seed only when it is built, so a reset with a seed
builds a new simulator.
"""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs import opengl
from reverie.envs.adapters.dm_env import DmEnv
from reverie.envs.seeding import SEED_RANGE
from reverie.envs.suite import Package, Suite
from reverie.spaces import Space, step_spaces

ACTIONS = 6
"""Number of actions: no-op, forward, left, right, forward-left and forward-right."""


class MemoryMaze:
    """One maze size; the only observation is a 64x64 image."""

    def __init__(self, name: str, seed: int = 0):
        opengl.select_backend()
        with contextlib.redirect_stderr(io.StringIO()):  # hide a warning of gym
            from memory_maze import tasks
        logging.getLogger("absl").setLevel(
            logging.ERROR
        )  # hide a warning at every reset
        self._make: Any = getattr(tasks, f"memory_maze_{name}")
        self._seed = seed
        self._env: DmEnv | None = None
        self.obs_space = {"image": Space(np.uint8, (64, 64, 3)), **step_spaces()}
        self.act_space = {"action": Space(np.int32, (), 0, ACTIONS)}

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


SUITE = Suite(
    name="memorymaze",
    description="Memory Maze: find colored balls in a memorized maze",
    make=lambda name, _: MemoryMaze(name),
    tasks=("9x9", "11x11", "13x13", "15x15"),
    package=Package(
        "memory_maze", ("memory-maze", "dm_control", "mujoco"), (3, 12), group="dmc"
    ),
)
