"""PinPad: press the pads of a room in the right order, and find out which that is.

A player walks in a room of 16 by 14 cells with three to six coloured pads. Stepping on
a pad adds it to a history of the last pads pressed, shown as a bar beneath the room.
When the history is the full sequence the reward is 10; after a countdown of 10 steps
the history is cleared and the player is put on a free cell. The time limit of 10 000
steps is not terminal. Nothing but the rare reward tells the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Action, Obs, StateDict
from reverie.envs.seeding import load_rng, save_rng
from reverie.spaces import Space, Spaces

WIDTH, HEIGHT, CELL = 16, 14, 4
COUNTDOWN = 10
REWARD = 10.0
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
NAMES = ("three", "four", "five", "six")

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

# Row, column, height and width of each pad, in the order that earns the reward.
# Neighbours in the order lie apart, so that a straight walk never solves a room.
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
    """Steps in an episode."""


class PinPad:
    """The room; `action` is 0 stay, 1 up, 2 down, 3 left, 4 right."""

    def __init__(
        self, name: str = "three", config: PinPadConfig | None = None, seed: int = 0
    ):
        self.config = config or PinPadConfig()
        self.pads = np.zeros((HEIGHT, WIDTH), np.int8)  # 0 floor, -1 wall, 1.. pads
        self.pads[[0, -1], :] = -1
        self.pads[:, [0, -1]] = -1
        for number, (row, col, height, width) in enumerate(LAYOUTS[name], 1):
            self.pads[row : row + height, col : col + width] = number
        self.count = len(LAYOUTS[name])
        self._room = self._draw_room()
        self._free = np.argwhere(self.pads == 0)
        self._rng = np.random.default_rng(seed)
        self._player = (0, 0)
        self._history: list[int] = []
        self._time = self._countdown = 0

    @property
    def obs_space(self) -> Spaces:
        return {
            "image": Space(np.dtype(np.uint8), (64, 64, 3)),
            "reward": Space(np.dtype(np.float32), (), 0, REWARD),
            "is_first": Space(np.dtype(bool)),
            "is_last": Space(np.dtype(bool)),
            "is_terminal": Space(np.dtype(bool)),
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.int32), (), 0, len(MOVES))}

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
        down, right = MOVES[int(action["action"])]
        place = (self._player[0] + down, self._player[1] + right)
        if self.pads[place] >= 0:
            self._player = place
        reward = self._press(int(self.pads[self._player]))
        return self._obs(reward)

    def close(self) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {
            "rng": save_rng(self._rng),
            "time": self._time,
            "countdown": self._countdown,
            "player": list(self._player),
            "history": list(self._history),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._rng = load_rng(state["rng"])
        self._time, self._countdown = int(state["time"]), int(state["countdown"])
        row, col = state["player"]
        self._player = (int(row), int(col))
        self._history = [int(pad) for pad in state["history"]]

    def _press(self, pad: int) -> float:
        if pad <= 0 or self._countdown or self._history[-1:] == [pad]:
            return 0.0
        self._history = [*self._history, pad][-self.count :]
        if self._history != list(range(1, self.count + 1)):
            return 0.0
        self._countdown = COUNTDOWN
        return REWARD

    def _respawn(self) -> None:
        row, col = self._free[self._rng.integers(len(self._free))]
        self._player = (int(row), int(col))
        self._history = []
        self._countdown = 0

    def _obs(self, reward: float) -> Obs:
        return {
            "image": self._draw(),
            "reward": np.float32(reward),
            "is_first": np.bool_(self._time == 0),
            "is_last": np.bool_(self._time >= self.config.length),
            "is_terminal": np.bool_(False),
        }

    def _draw_room(self) -> np.ndarray:
        room = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        room[self.pads == 0] = FLOOR
        room[self.pads < 0] = WALL
        pads = self.pads > 0
        room[pads] = COLORS[self.pads[pads] - 1]
        return room

    def _draw(self) -> np.ndarray:
        cells = np.zeros((16, WIDTH, 3), np.uint8)  # two rows of cells for the bar
        cells[:HEIGHT] = self._room
        if self._countdown:  # the room lights up while the reward is celebrated
            cells[:HEIGHT][self.pads == 0] = 255
        cells[self._player] = PLAYER
        image = cells.repeat(CELL, 0).repeat(CELL, 1)
        width = 64 // self.count
        for slot, pad in enumerate(self._history):
            left = slot * width
            image[HEIGHT * CELL + 1 : 63, left + 1 : left + width - 1] = COLORS[pad - 1]
        return image
