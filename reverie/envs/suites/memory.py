"""Memory: a cue is shown once and has to be recalled several steps later.

The first observation shows which of `cues` actions is correct; the following ones show
nothing; then a go signal asks for the action. The reward is 1 for the correct action
and -1 otherwise, so a policy without memory scores about `2 / cues - 1` and the optimal
policy 1. The last observation shows the cue again, so that a world model needs memory
to predict it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.seeding import SeededEnv
from reverie.envs.suite import Suite
from reverie.spaces import Space, step_spaces, step_values


@dataclass(frozen=True)
class MemoryConfig:
    cues: int = 3
    """Number of different cues and actions."""
    delay: int = 5
    """Steps between the cue and the go signal."""

    def __post_init__(self) -> None:
        if self.cues < 2 or self.delay < 1:
            raise ValueError(f"needs cues >= 2 and delay >= 1, got {self}")


class Memory(SeededEnv):
    """The task; `vector` is the one-hot cue followed by the go signal."""

    STATE = ("time", "cue")

    def __init__(self, config: MemoryConfig | None = None, seed: int = 0):
        super().__init__(seed)
        self.config = config = config or MemoryConfig()
        vector = Space(np.float32, (config.cues + 1,), 0, 1)
        self.obs_space = {"vector": vector, **step_spaces(-1, 1)}
        self.act_space = {"action": Space(np.int32, (), 0, config.cues)}
        self._time = self._cue = 0

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._time = 0
        self._cue = int(self._rng.integers(self.config.cues))
        return self._obs(0.0)

    def step(self, action: Action) -> Obs:
        self._time += 1
        if self._time <= self.config.delay:
            return self._obs(0.0)
        return self._obs(1.0 if int(action["action"]) == self._cue else -1.0)

    def _obs(self, reward: float) -> Obs:
        vector = np.zeros(self.config.cues + 1, np.float32)
        first, last = self._time == 0, self._time > self.config.delay
        if first or last:
            vector[self._cue] = 1
        if self._time == self.config.delay:
            vector[-1] = 1
        return {"vector": vector, **step_values(reward, first, last, terminal=last)}


SUITE = Suite(
    name="memory",
    description="recall a cue that was shown once",
    make=lambda _, config: Memory(config),
    config=MemoryConfig,
)
