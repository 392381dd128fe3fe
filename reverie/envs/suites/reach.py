"""Reach: move a hand over a table until it covers a mark that only the image shows.

The smallest robot task. The hand has a position in [-1, 1]², known as `proprio`, and
takes one step of at most `speed` in each direction. The mark is drawn, and stands in no
vector, so whoever ignores the image can only guess. Arriving gives 1 and ends the
episode; without, it is cut after `length` steps.

`expert` says what a perfect player would do now, which is how demonstrations are made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Action, Obs, StateDict
from reverie.envs.seeding import load_rng, save_rng
from reverie.spaces import Space, Spaces

TABLE = np.array([30, 34, 46], np.float32)
MARK = np.array([250, 90, 70], np.float32)
HAND = np.array([90, 200, 250], np.float32)

MARK_SIZE, HAND_SIZE = 0.18, 0.1
"""How large both are drawn, as radii on the table."""


@dataclass(frozen=True)
class ReachConfig:
    size: tuple[int, int] = (32, 32)
    """Height and width of the image in pixels."""
    length: int = 30
    """Steps after which an episode is cut."""
    speed: float = 0.15
    """How far an action of 1 moves the hand."""
    radius: float = 0.18
    """How near the hand must come to the mark."""

    def __post_init__(self) -> None:
        if min(self.size) < 8 or self.length < 1 or min(self.speed, self.radius) <= 0:
            raise ValueError(
                "reach needs an image of at least 8x8 pixels, a length of at least 1, "
                f"and speed and radius above 0, got {self}"
            )


class Reach:
    """The table; `action` is how far to move right and down, in units of `speed`."""

    def __init__(self, config: ReachConfig | None = None, seed: int = 0):
        self.config = config = config or ReachConfig()
        self._rng = np.random.default_rng(seed)
        self._hand, self._mark, self._steps = np.zeros(2), np.zeros(2), 0
        height, width = config.size
        self._y = (np.arange(height) + 0.5) / height * 2.4 - 1.2
        self._x = (np.arange(width) + 0.5) / width * 2.4 - 1.2
        self._soft = 2.4 / min(config.size)  # edges fade over a pixel

    @property
    def obs_space(self) -> Spaces:
        return {
            "image": Space(np.dtype(np.uint8), (*self.config.size, 3)),
            "proprio": Space(np.dtype(np.float32), (2,), -1, 1),
            "reward": Space(np.dtype(np.float32), (), 0, 1),
            "is_first": Space(np.dtype(bool)),
            "is_last": Space(np.dtype(bool)),
            "is_terminal": Space(np.dtype(bool)),
            "log/success": Space(np.dtype(np.float32), (), 0, 1),
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.float32), (2,), -1, 1)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._steps = 0
        self._hand = self._rng.uniform(-1, 1, 2)
        self._mark = self._rng.uniform(-1, 1, 2)
        while np.linalg.norm(self._mark - self._hand) < 0.6:
            self._mark = self._rng.uniform(-1, 1, 2)
        return self._obs(first=True)

    def step(self, action: Action) -> Obs:
        move = np.clip(np.asarray(action["action"], np.float64), -1, 1)
        self._hand = np.clip(self._hand + self.config.speed * move, -1, 1)
        self._steps += 1
        return self._obs()

    def close(self) -> None:
        pass

    def expert(self) -> Action:
        """Straight to the mark, at full speed until the last step."""
        way = (self._mark - self._hand) / self.config.speed
        return {"action": (way / max(1.0, np.abs(way).max())).astype(np.float32)}

    def state_dict(self) -> StateDict:
        return {
            "rng": save_rng(self._rng),
            "hand": self._hand.copy(),
            "mark": self._mark.copy(),
            "steps": self._steps,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._rng = load_rng(state["rng"])
        self._hand = np.array(state["hand"], np.float64)
        self._mark = np.array(state["mark"], np.float64)
        self._steps = int(state["steps"])

    def _obs(self, first: bool = False) -> Obs:
        distance = float(np.linalg.norm(self._mark - self._hand))
        there = not first and distance < self.config.radius
        return {
            "image": self._draw(),
            "proprio": self._hand.astype(np.float32),
            "reward": np.float32(there),
            "is_first": np.bool_(first),
            "is_last": np.bool_(there or self._steps >= self.config.length),
            "is_terminal": np.bool_(there),
            "log/success": np.float32(there),
        }

    def _draw(self) -> np.ndarray:
        image = np.broadcast_to(TABLE, (*self.config.size, 3)).copy()
        for place, radius, colour in (
            (self._mark, MARK_SIZE, MARK),
            (self._hand, HAND_SIZE, HAND),
        ):
            away = np.hypot(self._x - place[0], (self._y - place[1])[:, None])
            cover = np.clip((radius - away) / self._soft + 0.5, 0, 1)[..., None]
            image = image + cover * (colour - image)
        return image.round().astype(np.uint8)
