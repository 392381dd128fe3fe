"""Reach: move a hand over a table to a target that is visible only in the image.

The smallest robot task. The hand has a position in [-1, 1]², observed as `proprio`, and
moves by at most `speed` per step in each direction. The target position is in no
vector, so a policy that ignores the image can only guess. Reaching the target gives
reward 1 and terminates the episode; otherwise it is truncated after `length` steps.

`expert` returns the optimal action, for recording demonstrations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.seeding import SeededEnv
from reverie.envs.suite import Suite
from reverie.spaces import Space, step_spaces, step_values

TABLE_COLOR = np.array([30, 34, 46], np.float32)
TARGET_COLOR = np.array([250, 90, 70], np.float32)
HAND_COLOR = np.array([90, 200, 250], np.float32)

TARGET_RADIUS, HAND_RADIUS = 0.18, 0.1
"""Radii of the drawn circles in table units."""
MIN_DISTANCE = 0.6
"""Minimum distance of hand and target at the start of an episode."""


@dataclass(frozen=True)
class ReachConfig:
    size: tuple[int, int] = (32, 32)
    """Height and width of the image in pixels."""
    length: int = 30
    """Time limit of an episode in steps."""
    speed: float = 0.15
    """Distance that the hand moves for an action of 1."""
    radius: float = 0.18
    """Distance to the target that counts as reached."""

    def __post_init__(self) -> None:
        if min(self.size) < 8 or self.length < 1 or min(self.speed, self.radius) <= 0:
            raise ValueError(
                "reach needs an image of at least 8x8 pixels, a length of at least 1, "
                f"and speed and radius above 0, got {self}"
            )


class Reach(SeededEnv):
    """The task; `action` is the motion to the right and down, in units of `speed`."""

    STATE = ("hand", "target", "steps")

    def __init__(self, config: ReachConfig | None = None, seed: int = 0):
        super().__init__(seed)
        self.config = config = config or ReachConfig()
        self.obs_space = {
            "image": Space(np.uint8, (*config.size, 3)),
            "proprio": Space(np.float32, (2,), -1, 1),
            **step_spaces(0, 1),
            "log/success": Space(np.float32, (), 0, 1),
        }
        self.act_space = {"action": Space(np.float32, (2,), -1, 1)}
        self._hand, self._target, self._steps = np.zeros(2), np.zeros(2), 0
        height, width = config.size
        # table coordinates of the pixels; the image shows [-1.2, 1.2]²
        self._y = (np.arange(height) + 0.5) / height * 2.4 - 1.2
        self._x = (np.arange(width) + 0.5) / width * 2.4 - 1.2
        # size of a pixel, over which the edges of circles are anti-aliased
        self._edge = 2.4 / min(config.size)

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._steps = 0
        self._hand = self._rng.uniform(-1, 1, 2)
        self._target = self._rng.uniform(-1, 1, 2)
        while np.linalg.norm(self._target - self._hand) < MIN_DISTANCE:
            self._target = self._rng.uniform(-1, 1, 2)
        return self._obs(first=True)

    def step(self, action: Action) -> Obs:
        move = np.clip(np.asarray(action["action"], np.float64), -1, 1)
        self._hand = np.clip(self._hand + self.config.speed * move, -1, 1)
        self._steps += 1
        return self._obs()

    def expert(self) -> Action:
        """Return the action that moves straight to the target at full speed."""
        move = (self._target - self._hand) / self.config.speed
        return {"action": (move / max(1.0, np.abs(move).max())).astype(np.float32)}

    def _obs(self, first: bool = False) -> Obs:
        distance = float(np.linalg.norm(self._target - self._hand))
        reached = not first and distance < self.config.radius
        last = reached or self._steps >= self.config.length
        return {
            "image": self._render(),
            "proprio": self._hand.astype(np.float32),
            **step_values(reached, first, last, terminal=reached),
            "log/success": np.float32(reached),
        }

    def _render(self) -> np.ndarray:
        image = np.broadcast_to(TABLE_COLOR, (*self.config.size, 3)).copy()
        for position, radius, color in (
            (self._target, TARGET_RADIUS, TARGET_COLOR),
            (self._hand, HAND_RADIUS, HAND_COLOR),
        ):
            distance = np.hypot(self._x - position[0], (self._y - position[1])[:, None])
            alpha = np.clip((radius - distance) / self._edge + 0.5, 0, 1)[..., None]
            image = image + alpha * (color - image)
        return image.round().astype(np.uint8)


SUITE = Suite(
    name="reach",
    description="move a hand to a target in the image; has an expert policy",
    make=lambda _, config: Reach(config),
    config=ReachConfig,
)
