"""Dummy environments with every type of observation and action, for testing code.

Observations are random noise, but flags, dtypes, bounds and seeds are valid.
`dummy_disc` has a discrete action and `dummy_cont` a continuous one; both have a second
action key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.seeding import SeededEnv
from reverie.envs.suite import ImageConfig, Suite
from reverie.spaces import Space, step_spaces, step_values


@dataclass(frozen=True)
class DummyConfig(ImageConfig):
    length: int = 100
    """Steps per episode; every second episode is truncated, the others terminate."""


class Dummy(SeededEnv):
    """Returns noise and the number of steps; `kind` is `disc` or `cont`.

    The reward is 1 for the discrete action 1, or a positive first continuous action.
    """

    STATE = ("count", "episode")  # `_count` and `_episode` are saved in checkpoints

    def __init__(
        self, kind: str = "disc", config: DummyConfig | None = None, seed: int = 0
    ):
        super().__init__(seed)
        self.kind = kind
        self.config = config = config or DummyConfig()
        self._count = self._episode = 0
        self.obs_space = {
            "image": Space(np.uint8, (*config.size, 3)),
            "vector": Space(np.float32, (7,)),
            "token": Space(np.int32, (), 0, 256),
            "count": Space(np.float32, (), 0, config.length),
            "float2d": Space(np.float32, (4, 5)),
            "int2d": Space(np.int32, (2, 3), 0, 4),
            **step_spaces(),
            "log/episode": Space(np.float32),
        }
        # `switch` is the second action key
        action, switch = Space(np.int32, (), 0, 5), Space(np.int32, (2,), 0, 3)
        if kind == "cont":
            action, switch = Space(np.float32, (6,), -1, 1), Space(np.int32, (), 0, 2)
        self.act_space = {"action": action, "switch": switch}

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
            **step_values(
                reward, self._count == 0, last, last and self._episode % 2 == 1
            ),
            "log/episode": np.float32(self._episode),
        }


SUITE = Suite(
    name="dummy",
    description="noise in every type of observation and action, for testing code",
    make=Dummy,
    config=DummyConfig,
    tasks=("disc", "cont"),
)
