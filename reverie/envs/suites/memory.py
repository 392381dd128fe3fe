"""Memory: a cue is shown once, and the matching action is asked for later.

The first row shows which of `cues` actions is right; the rows after it show nothing;
then a go signal asks for the answer. The reward is 1 for the right answer and -1 for a
wrong one, so an agent without memory scores about `2 / cues - 1` and one with memory 1.
The row after the answer shows the cue again: too late to act on, but it tells a world
model that remembering is worth something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reverie.api import Action, Obs, StateDict
from reverie.envs.seeding import load_rng, save_rng
from reverie.spaces import Space, Spaces


@dataclass(frozen=True)
class MemoryConfig:
    cues: int = 3
    """How many cues there are, and actions to match them."""
    delay: int = 5
    """Steps between seeing the cue and being asked for it."""

    def __post_init__(self) -> None:
        if self.cues < 2 or self.delay < 1:
            raise ValueError(
                f"memory needs at least 2 cues and a delay of at least 1, got "
                f"cues={self.cues} and delay={self.delay}"
            )


class Memory:
    """The task; `vector` is the cue one-hot, then the go signal."""

    def __init__(self, config: MemoryConfig | None = None, seed: int = 0):
        self.config = config or MemoryConfig()
        self._rng = np.random.default_rng(seed)
        self._time = self._cue = 0

    @property
    def obs_space(self) -> Spaces:
        return {
            "vector": Space(np.dtype(np.float32), (self.config.cues + 1,), 0, 1),
            "reward": Space(np.dtype(np.float32), (), -1, 1),
            "is_first": Space(np.dtype(bool)),
            "is_last": Space(np.dtype(bool)),
            "is_terminal": Space(np.dtype(bool)),
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.int32), (), 0, self.config.cues)}

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

    def close(self) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {"rng": save_rng(self._rng), "time": self._time, "cue": self._cue}

    def load_state_dict(self, state: StateDict) -> None:
        self._rng = load_rng(state["rng"])
        self._time, self._cue = int(state["time"]), int(state["cue"])

    def _obs(self, reward: float) -> Obs:
        vector = np.zeros(self.config.cues + 1, np.float32)
        first, last = self._time == 0, self._time > self.config.delay
        if first or last:
            vector[self._cue] = 1
        if self._time == self.config.delay:
            vector[-1] = 1
        return {
            "vector": vector,
            "reward": np.float32(reward),
            "is_first": np.bool_(first),
            "is_last": np.bool_(last),
            "is_terminal": np.bool_(last),
        }
