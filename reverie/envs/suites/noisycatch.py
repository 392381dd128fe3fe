"""Catch on moving noise: a ball of two pixels in an image of 64 x 64.

The game of `catch.py`, with a background of random pixels that moves one pixel to the
right in every step. Ball and paddle are two of 4,096 pixels each, so a reconstruction
loss hardly depends on them. The task tests whether a world model represents small
objects that matter for the reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Obs
from reverie.envs.suite import Suite
from reverie.envs.suites.catch import BALL_COLOR, PADDLE_COLOR, Catch, CatchConfig
from reverie.spaces import step_values


@dataclass(frozen=True)
class NoisyCatchConfig(CatchConfig):
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
    noise: int = 128
    """Brightness of the background: pixels are uniform from 0 to below this value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.noise <= 256:
            raise ValueError(f"noise must be from 1 to 256, not {self.noise}")


class NoisyCatch(Catch):
    """The game; `action` is 0 (left), 1 (stay) or 2 (right)."""

    STATE = (*Catch.STATE, "background")
    config: NoisyCatchConfig

    def __init__(self, config: NoisyCatchConfig | None = None, seed: int = 0):
        super().__init__(config or NoisyCatchConfig(), seed)
        self._background = np.zeros((*self.config.size, 3), np.uint8)

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        shape = (*self.config.size, 3)
        noise = self._rng.integers(0, self.config.noise, shape, np.uint8)
        self._background = noise
        return super().reset()

    def _obs(self, reward: float, first: bool = False, last: bool = False) -> Obs:
        image = np.roll(self._background, self._row, 1)
        for row, col, color in (
            (self.config.rows - 1, self._paddle, PADDLE_COLOR),
            (self._row, self._ball, BALL_COLOR),
        ):
            # pixels of the cell; two in its middle are colored
            y = (self._pixel_rows == row).nonzero()[0]
            x = (self._pixel_cols == col).nonzero()[0]
            middle = len(x) // 2
            image[y[len(y) // 2], x[middle - 1 : middle + 1]] = color
        return {"image": image, **step_values(reward, first, last, terminal=last)}


SUITE = Suite(
    name="noisycatch",
    description="catch with a ball of two pixels on moving noise, images of 64x64",
    make=lambda _, config: NoisyCatch(config),
    config=NoisyCatchConfig,
)
