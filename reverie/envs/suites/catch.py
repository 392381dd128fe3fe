"""Catch: a ball falls, and a paddle at the bottom moves left, right or not at all.

The smallest task with images, motion and a delayed reward. An episode has `rows - 1`
steps; the reward at its end is 1 for a catch and -1 for a miss. A random policy scores
about -0.7, the optimal policy 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.seeding import SeededEnv
from reverie.envs.suite import Suite
from reverie.spaces import Space, step_spaces, step_values

BALL_COLOR = np.array([255, 220, 60], np.uint8)
PADDLE_COLOR = np.array([80, 160, 255], np.uint8)


@dataclass(frozen=True)
class CatchConfig:
    rows: int = 6
    """Height of the grid in cells; the ball falls one cell per step."""
    cols: int = 6
    """Width of the grid in cells."""
    size: tuple[int, int] = (12, 12)
    """Height and width of the image in pixels."""

    def __post_init__(self) -> None:
        if self.rows < 2 or self.cols < 2 or min(self.size) < max(self.rows, self.cols):
            raise ValueError(
                "needs a grid of at least 2x2 cells and an image of at least one pixel "
                f"per cell, got {self}"
            )


class Catch(SeededEnv):
    """The game; `action` is 0 (left), 1 (stay) or 2 (right)."""

    STATE: ClassVar[tuple[str, ...]] = ("row", "ball", "paddle")
    action_names = ("left", "stay", "right")

    def __init__(self, config: CatchConfig | None = None, seed: int = 0):
        super().__init__(seed)
        self.config = config = config or CatchConfig()
        image = Space(np.uint8, (*config.size, 3))
        self.obs_space = {"image": image, **step_spaces(-1, 1)}
        self.act_space = {"action": Space(np.int32, (), 0, 3)}
        self._row = self._ball = self._paddle = 0
        # grid row and column of each pixel
        self._pixel_rows = np.arange(config.size[0]) * config.rows // config.size[0]
        self._pixel_cols = np.arange(config.size[1]) * config.cols // config.size[1]

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._row = 0
        self._ball = int(self._rng.integers(self.config.cols))
        self._paddle = self.config.cols // 2
        return self._obs(0.0, first=True)

    def step(self, action: Action) -> Obs:
        move = int(action["action"]) - 1
        self._paddle = min(max(self._paddle + move, 0), self.config.cols - 1)
        self._row += 1
        last = self._row == self.config.rows - 1
        reward = (1.0 if self._ball == self._paddle else -1.0) if last else 0.0
        return self._obs(reward, last=last)

    def _obs(self, reward: float, first: bool = False, last: bool = False) -> Obs:
        grid = np.zeros((self.config.rows, self.config.cols, 3), np.uint8)
        grid[-1, self._paddle] = PADDLE_COLOR
        grid[self._row, self._ball] = BALL_COLOR
        image = grid[self._pixel_rows[:, None], self._pixel_cols]
        return {"image": image, **step_values(reward, first, last, terminal=last)}


SUITE = Suite(
    name="catch",
    description="catch a falling ball, from images; solved in minutes on a CPU",
    make=lambda _, config: Catch(config),
    config=CatchConfig,
)
