"""Any `dm_env.Environment` as a Reverie environment.

An observation that is not a dict is called `image` or `vector`, the action `action`. An
episode is terminal where its discount ends at 0; a time limit leaves it at 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.seeding import SEED_RANGE
from reverie.spaces import Space, Spaces

Reseed = Callable[[int], Any]


class DmEnv:
    """Wears a dm_env environment; holds each action for `repeat` of its steps.

    dm_env has no word for seeds: `reseed` puts one into the simulator before a reset.
    With `squeeze` the axis of length one that composer tasks put first is taken off.
    """

    def __init__(
        self,
        env: Any,
        reseed: Reseed | None = None,
        repeat: int = 1,
        squeeze: bool = False,
    ):
        self.dm = env
        self._reseed = reseed
        self._repeat = repeat
        spec = env.observation_spec()
        self._is_dict = hasattr(spec, "items")
        specs = dict(spec) if self._is_dict else {_name_of(spec): spec}
        spaces = {key: _seen_space(part, squeeze) for key, part in specs.items()}
        self._seen = {key: space for key, space in spaces.items() if space.nbytes}
        self._action = _act_space(env.action_spec())

    @property
    def obs_space(self) -> Spaces:
        flag = Space(np.dtype(bool))
        return {
            **self._seen,
            "reward": Space(np.dtype(np.float32)),
            "is_first": flag,
            "is_last": flag,
            "is_terminal": flag,
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": self._action}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None and self._reseed is not None:
            self._reseed(seed % SEED_RANGE)
        return self._obs(self.dm.reset(), 0.0)

    def step(self, action: Action) -> Obs:
        value = np.asarray(action["action"], self._action.dtype)
        native = int(value) if self._action.is_discrete and not value.shape else value
        reward = 0.0
        for _ in range(self._repeat):
            step = self.dm.step(native)
            reward += float(step.reward or 0.0)
            if step.last():
                break
        return self._obs(step, reward)

    def close(self) -> None:
        self.dm.close()

    def _obs(self, step: Any, reward: float) -> Obs:
        seen = step.observation
        parts = seen if self._is_dict else {next(iter(self._seen)): seen}
        over = bool(step.last())
        return {
            # copies: simulators hand out views of memory they write to again
            **{
                k: np.array(parts[k], s.dtype).reshape(s.shape)
                for k, s in self._seen.items()
            },
            "reward": np.float32(reward),
            "is_first": np.bool_(step.first()),
            "is_last": np.bool_(over),
            "is_terminal": np.bool_(over and step.discount == 0),
        }


def _name_of(spec: Any) -> str:
    return "image" if spec.dtype == np.uint8 and len(spec.shape) == 3 else "vector"


def _seen_space(spec: Any, squeeze: bool) -> Space:
    dtype, shape = np.dtype(spec.dtype), tuple(spec.shape)
    if squeeze and shape and shape[0] == 1:
        shape = shape[1:]
    if hasattr(spec, "num_values"):
        return Space(np.dtype(np.int32), shape, 0, int(spec.num_values))
    # The bounds of numbers are not taken over: nobody holds simulators to them, and
    # rounded to float32 an observation may lie beyond.
    return Space(dtype, shape)


def _act_space(spec: Any) -> Space:
    if hasattr(spec, "num_values"):
        return Space(np.dtype(np.int32), spec.shape, 0, int(spec.num_values))
    low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
    if np.dtype(spec.dtype).kind in "iu" and high is not None:
        high = np.asarray(high, np.int64) + 1  # theirs includes the highest value
    return Space(np.dtype(spec.dtype), spec.shape, low, high)
