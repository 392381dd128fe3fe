"""Dummy environments with every type of observation and action, for testing code.

Observations are random noise, but flags, dtypes, bounds and seeds are valid.
`dummy_disc` has a discrete action and `dummy_cont` a continuous one; both have a second
action key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Action, Obs, StateDict
from reverie.envs.flags import flag_spaces, flags
from reverie.envs.seeding import load_rng, save_rng
from reverie.envs.suite import Suite
from reverie.spaces import Space, Spaces


@dataclass(frozen=True)
class DummyConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
    length: int = 100
    """Steps per episode; every second episode is truncated, the others terminate."""


class Dummy:
    """Counts its steps and returns noise."""

    def __init__(
        self, kind: str = "disc", config: DummyConfig | None = None, seed: int = 0
    ):
        self.kind = kind
        self.config = config or DummyConfig()
        self._rng = np.random.default_rng(seed)
        self._count = self._episode = 0

    @property
    def obs_space(self) -> Spaces:
        f32, i32 = np.dtype(np.float32), np.dtype(np.int32)
        return {
            "image": Space(np.dtype(np.uint8), (*self.config.size, 3)),
            "vector": Space(f32, (7,)),
            "token": Space(i32, (), 0, 256),
            "count": Space(f32, (), 0, self.config.length),
            "float2d": Space(f32, (4, 5)),
            "int2d": Space(i32, (2, 3), 0, 4),
            **flag_spaces(),
            "log/episode": Space(f32),
        }

    @property
    def act_space(self) -> Spaces:
        i32 = np.dtype(np.int32)
        if self.kind == "cont":
            return {
                "action": Space(np.dtype(np.float32), (6,), -1, 1),
                "switch": Space(i32, (), 0, 2),
            }
        return {"action": Space(i32, (), 0, 5), "switch": Space(i32, (2,), 0, 3)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng, self._episode = np.random.default_rng(seed), 0
        self._count = 0
        self._episode += 1
        return self._obs(0.0)

    def step(self, action: Action) -> Obs:
        self._count += 1
        value = np.asarray(action["action"])
        rewarded = value[0] > 0 if self.kind == "cont" else value == 1
        return self._obs(float(rewarded))

    def close(self) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {
            "rng": save_rng(self._rng),
            "count": self._count,
            "episode": self._episode,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._rng = load_rng(state["rng"])
        self._count, self._episode = int(state["count"]), int(state["episode"])

    def _obs(self, reward: float) -> Obs:
        last = self._count >= self.config.length
        rng, size = self._rng, (*self.config.size, 3)
        return {
            "image": rng.integers(0, 256, size, np.uint8),
            "vector": rng.standard_normal(7, np.float32),
            "token": rng.integers(0, 256, dtype=np.int32),
            "float2d": rng.standard_normal((4, 5), np.float32),
            "int2d": rng.integers(0, 4, (2, 3), np.int32),
            "count": np.float32(self._count),
            **flags(reward, self._count == 0, last, last and self._episode % 2 == 1),
            "log/episode": np.float32(self._episode),
        }


SUITE = Suite(
    name="dummy",
    description="noise in every type of observation and action, for testing code",
    license="MIT",
    make=Dummy,
    config=DummyConfig,
    tasks=("disc", "cont"),
)
