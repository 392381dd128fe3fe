"""A fake DeepMind Lab with a strict check of all inputs.

It accepts documented levels, observations and settings only, and settings as strings;
actions must be seven C integers within the action spec; there are no observations
before a reset or after the end of an episode. The episode length depends on the seed.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

FOLDER = "contributed/dmlab30/"
SETTINGS = {
    "width",
    "height",
    "fps",
    "logLevel",
    "allowHoldOutLevels",
    "mixerSeed",
    "appendCommand",
}
ACTIONS = [
    ("LOOK_LEFT_RIGHT_PIXELS_PER_FRAME", -512, 512),
    ("LOOK_DOWN_UP_PIXELS_PER_FRAME", -512, 512),
    ("STRAFE_LEFT_RIGHT", -1, 1),
    ("MOVE_BACK_FORWARD", -1, 1),
    ("FIRE", 0, 1),
    ("JUMP", 0, 1),
    ("CROUCH", 0, 1),
]
INSTRUCTION = "Get 2 apples!"


class Lab:
    newest: Lab

    def __init__(
        self,
        level: str,
        observations: list[str],
        config: dict[str, str] | None = None,
        renderer: str = "software",
        level_cache: Any = None,
        temp_folder: str = "",
    ):
        assert level.startswith(FOLDER), level
        assert set(observations) <= {"RGB_INTERLEAVED", "INSTR", "DEBUG.POS.TRANS"}
        assert renderer in ("software", "hardware")
        self.level = level.removeprefix(FOLDER)
        self.observed = observations
        self.config = dict(config or {})
        assert self.config.keys() <= SETTINGS, self.config
        assert all(isinstance(value, str) for value in self.config.values())
        if "INSTR" in observations:
            assert self.level.startswith("language"), "no instruction"
        if self.level.endswith("_test"):
            assert self.config.get("allowHoldOutLevels") == "true"
        self.seeds: list[int] = []
        self.steps: list[tuple[list[int], int]] = []
        self.frames_left = 0
        self.screen: np.ndarray | None = None
        self.closed = False
        Lab.newest = self

    def reset(self, episode: int = -1, seed: int | None = None) -> bool:
        assert type(seed) is int, seed
        assert 0 <= seed < 2**31, seed
        self.seeds.append(seed)
        self._rng = np.random.default_rng(seed)
        self.frames_left = int(self._rng.integers(40, 120))
        return True

    def is_running(self) -> bool:
        return self.frames_left > 0

    def observations(self) -> dict[str, Any]:
        if not self.is_running():
            raise RuntimeError("Environment in wrong status to call observations()")
        height = int(self.config.get("height", 240))
        width = int(self.config.get("width", 320))
        if self.screen is None:
            self.screen = np.zeros((height, width, 3), np.uint8)
        self.screen[:] = self.frames_left % 256  # the same memory in every step
        values = {"RGB_INTERLEAVED": self.screen, "INSTR": INSTRUCTION}
        return {name: values[name] for name in self.observed}

    def step(self, action: np.ndarray, num_steps: int = 1) -> float:
        if not self.is_running():
            raise RuntimeError("Environment in wrong status to advance()")
        if action.dtype != np.intc or action.shape != (len(ACTIONS),):
            raise ValueError("action must have dtype np.intc and shape (7,)")
        for value, (name, low, high) in zip(action, ACTIONS, strict=True):
            if not low <= value <= high:
                raise ValueError(f"{name} must be within [{low}, {high}], got {value}")
        assert num_steps > 0
        self.steps.append(([int(value) for value in action], num_steps))
        self.frames_left = max(0, self.frames_left - num_steps)
        return float(num_steps)

    def close(self) -> None:
        self.closed = True


def install(monkeypatch: pytest.MonkeyPatch) -> type[Lab]:
    """Make `import deepmind_lab` import this module."""
    module: Any = types.ModuleType("deepmind_lab")
    module.__spec__ = types.SimpleNamespace(name="deepmind_lab")
    module.Lab = Lab
    monkeypatch.setitem(sys.modules, "deepmind_lab", module)
    return Lab
