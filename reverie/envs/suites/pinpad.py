"""PinPad: press colored pads in the correct order, which has to be discovered.

The player moves in a grid of 16 by 14 cells with three to six pads. Stepping on a pad
adds it to the history of recently pressed pads, drawn as a bar below the grid. When the
history equals the full sequence, the reward is 10; after a countdown of 10 steps the
history is cleared and the player is moved to a random free cell. The order can only be
learned from this sparse reward. Episodes are truncated after 10,000 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.seeding import SeededEnv
from reverie.envs.suite import Suite
from reverie.spaces import Space, step_spaces, step_values

WIDTH, HEIGHT = 16, 14  # of the grid in cells
CELL = 4  # height and width of a cell in pixels
COUNTDOWN = 10  # steps after a reward until the player is moved
REWARD = 10.0
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))  # rows and columns, by action

COLORS = np.array(
    [
        [220, 60, 60],
        [70, 180, 90],
        [70, 110, 230],
        [230, 200, 60],
        [180, 80, 200],
        [70, 200, 210],
    ],
    np.uint8,
)
FLOOR, WALL, PLAYER = (236, 232, 224), (110, 104, 96), (20, 20, 20)

# Row, column, height and width of each pad, in the rewarded order. Consecutive pads are
# not adjacent, so that no straight path solves the task.
LAYOUTS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "three": ((1, 1, 4, 4), (9, 6, 4, 4), (1, 11, 4, 4)),
    "four": ((1, 1, 4, 4), (9, 11, 4, 4), (1, 11, 4, 4), (9, 1, 4, 4)),
    "five": (
        (1, 1, 3, 4),
        (10, 11, 3, 4),
        (1, 11, 3, 4),
        (10, 1, 3, 4),
        (5, 6, 4, 4),
    ),
    "six": (
        (1, 1, 3, 3),
        (10, 7, 3, 3),
        (1, 12, 3, 3),
        (10, 1, 3, 3),
        (1, 7, 3, 3),
        (10, 12, 3, 3),
    ),
}


@dataclass(frozen=True)
class PinPadConfig:
    length: int = 10000
    """Time limit of an episode in steps."""


class PinPad(SeededEnv):
    """The task; `action` is 0 (stay), 1 (up), 2 (down), 3 (left) or 4 (right)."""

    STATE = ("time", "countdown", "player", "history")
    action_names = ("stay", "up", "down", "left", "right")

    def __init__(
        self, name: str = "three", config: PinPadConfig | None = None, seed: int = 0
    ):
        super().__init__(seed)
        self.config = config or PinPadConfig()
        image = Space(np.uint8, (64, 64, 3))
        self.obs_space = {"image": image, **step_spaces(0, REWARD)}
        self.act_space = {"action": Space(np.int32, (), 0, len(MOVES))}
        self.pads = np.zeros((HEIGHT, WIDTH), np.int8)  # 0: floor, -1: wall, 1...: pads
        self.pads[[0, -1], :] = -1
        self.pads[:, [0, -1]] = -1
        for number, (row, col, height, width) in enumerate(LAYOUTS[name], 1):
            self.pads[row : row + height, col : col + width] = number
        self.num_pads = len(LAYOUTS[name])
        self._background = self._draw_background()
        self._free_cells = np.argwhere(self.pads == 0)
        self._player = np.zeros(2, int)  # row and column
        self._history: list[int] = []
        self._time = self._countdown = 0

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._time = 0
        self._respawn()
        return self._obs(0.0)

    def step(self, action: Action) -> Obs:
        self._time += 1
        if self._countdown:
            self._countdown -= 1
            if not self._countdown:
                self._respawn()
        cell = self._player + MOVES[int(action["action"])]
        if self.pads[tuple(cell)] >= 0:
            self._player = cell
        reward = self._press(int(self.pads[tuple(self._player)]))
        return self._obs(reward)

    def _press(self, pad: int) -> float:
        """Add a pad to the history, and return the reward; no effect if it is floor."""
        if pad <= 0 or self._countdown or self._history[-1:] == [pad]:
            return 0.0
        self._history = [*self._history, pad][-self.num_pads :]
        if self._history != list(range(1, self.num_pads + 1)):
            return 0.0
        self._countdown = COUNTDOWN
        return REWARD

    def _respawn(self) -> None:
        """Move the player to a random free cell and clear the history."""
        self._player = self._free_cells[self._rng.integers(len(self._free_cells))]
        self._history = []
        self._countdown = 0

    def _obs(self, reward: float) -> Obs:
        last = self._time >= self.config.length
        return {"image": self._render(), **step_values(reward, self._time == 0, last)}

    def _draw_background(self) -> np.ndarray:
        cells = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        cells[self.pads == 0] = FLOOR
        cells[self.pads < 0] = WALL
        is_pad = self.pads > 0
        cells[is_pad] = COLORS[self.pads[is_pad] - 1]
        return cells

    def _render(self) -> np.ndarray:
        cells = np.zeros((16, WIDTH, 3), np.uint8)  # two rows of cells for the bar
        cells[:HEIGHT] = self._background
        if self._countdown:  # the floor is white during the countdown
            cells[:HEIGHT][self.pads == 0] = 255
        cells[tuple(self._player)] = PLAYER
        image = cells.repeat(CELL, 0).repeat(CELL, 1)
        width = 64 // self.num_pads
        for slot, pad in enumerate(self._history):
            left = slot * width
            image[HEIGHT * CELL + 1 : 63, left + 1 : left + width - 1] = COLORS[pad - 1]
        return image


SUITE = Suite(
    name="pinpad",
    description="press three to six pads in an order that has to be discovered",
    make=PinPad,
    config=PinPadConfig,
    tasks=("three", "four", "five", "six"),
)
