"""Catch: a ball falls, a paddle below moves left, stays or moves right.

The smallest task that needs pixels, a model of motion and a delayed reward. One episode
is `rows - 1` steps; the reward is 1 for a catch and -1 for a miss, at the end. A random
policy scores about -0.7, a perfect one 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Action, Obs, StateDict
from reverie.envs.seeding import load_rng, save_rng
from reverie.spaces import Space, Spaces

BALL = np.array([255, 220, 60], np.uint8)
PADDLE = np.array([80, 160, 255], np.uint8)


@dataclass(frozen=True)
class CatchConfig:
    rows: int = 6
    """Height of the grid; the ball takes one row per step."""
    cols: int = 6
    """Width of the grid."""
    size: tuple[int, int] = (12, 12)
    """Height and width of the image in pixels."""

    def __post_init__(self) -> None:
        if self.rows < 2 or self.cols < 2 or min(self.size) < max(self.rows, self.cols):
            raise ValueError(
                "catch needs a grid of at least 2x2 and an image of at least a pixel "
                f"per cell, got {self.rows}x{self.cols} cells and size {self.size}"
            )


class Catch:
    """The game; `action` is 0 left, 1 stay, 2 right."""

    def __init__(self, config: CatchConfig | None = None, seed: int = 0):
        self.config = config = config or CatchConfig()
        self._rng = np.random.default_rng(seed)
        self._row = self._ball = self._paddle = 0
        self._rows_of = np.arange(config.size[0]) * config.rows // config.size[0]
        self._cols_of = np.arange(config.size[1]) * config.cols // config.size[1]

    @property
    def obs_space(self) -> Spaces:
        return {
            "image": Space(np.dtype(np.uint8), (*self.config.size, 3)),
            "reward": Space(np.dtype(np.float32), (), -1, 1),
            "is_first": Space(np.dtype(bool)),
            "is_last": Space(np.dtype(bool)),
            "is_terminal": Space(np.dtype(bool)),
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.int32), (), 0, 3)}

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

    def close(self) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {
            "rng": save_rng(self._rng),
            "row": self._row,
            "ball": self._ball,
            "paddle": self._paddle,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._rng = load_rng(state["rng"])
        self._row, self._ball = int(state["row"]), int(state["ball"])
        self._paddle = int(state["paddle"])

    def _obs(self, reward: float, first: bool = False, last: bool = False) -> Obs:
        grid = np.zeros((self.config.rows, self.config.cols, 3), np.uint8)
        grid[-1, self._paddle] = PADDLE
        grid[self._row, self._ball] = BALL
        return {
            "image": grid[self._rows_of[:, None], self._cols_of],
            "reward": np.float32(reward),
            "is_first": np.bool_(first),
            "is_last": np.bool_(last),
            "is_terminal": np.bool_(last),
        }
