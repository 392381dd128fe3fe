"""Adapter for `dm_env.Environment`.

An observation that is not a dict is named `image` or `vector`. The action is named
`action`. The last observation of an episode sets `is_terminal` if its discount is 0. At
a time limit the discount is 1, so `is_terminal` is not set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.seeding import SEED_RANGE
from reverie.spaces import Space, step_spaces, step_values


class DmEnv:
    """Adapts a dm_env environment to `reverie.api.Env`."""

    def __init__(
        self,
        env: Any,
        set_seed: Callable[[int], Any] | None = None,
        repeat: int = 1,
        squeeze: bool = False,
    ):
        """`set_seed` seeds the simulator before a reset; dm_env has no API for this.

        Each action is repeated `repeat` times. `squeeze` removes the leading axis of
        length one that tasks of `dm_control.composer` add to observations.
        """
        self.dm = env
        self._set_seed = set_seed
        self._repeat = repeat
        spec = env.observation_spec()
        self._is_dict = hasattr(spec, "items")
        specs = dict(spec) if self._is_dict else {_default_key(spec): spec}
        spaces = {key: _obs_space(spec, squeeze) for key, spec in specs.items()}
        # leave out observations without elements
        self._obs_space = {k: s for k, s in spaces.items() if s.nbytes}
        self.obs_space = {**self._obs_space, **step_spaces()}
        self.act_space = {"action": _act_space(env.action_spec())}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None and self._set_seed is not None:
            self._set_seed(seed % SEED_RANGE)
        return self.observe(self.dm.reset(), 0.0)

    def step(self, action: Action) -> Obs:
        space = self.act_space["action"]
        value = np.asarray(action["action"], space.dtype)
        dm_action = int(value) if space.is_discrete and not value.shape else value
        reward = 0.0
        for _ in range(self._repeat):
            timestep = self.dm.step(dm_action)
            reward += float(timestep.reward or 0.0)
            if timestep.last():
                break
        return self.observe(timestep, reward)

    def close(self) -> None:
        self.dm.close()

    def observe(self, timestep: Any, reward: float) -> Obs:
        """Convert a `dm_env.TimeStep`, with the summed reward of repeated actions."""
        values = timestep.observation
        if not self._is_dict:
            values = {next(iter(self._obs_space)): values}
        last = bool(timestep.last())
        terminal = last and timestep.discount == 0
        return {
            # copies: simulators return views of memory that they overwrite
            **{
                key: np.array(values[key], space.dtype).reshape(space.shape)
                for key, space in self._obs_space.items()
            },
            **step_values(reward, timestep.first(), last, terminal),
        }


def _default_key(spec: Any) -> str:
    """Return the key of an observation that is not a dict."""
    return "image" if spec.dtype == np.uint8 and len(spec.shape) == 3 else "vector"


def _obs_space(spec: Any, squeeze: bool) -> Space:
    dtype, shape = np.dtype(spec.dtype), tuple(spec.shape)
    if squeeze and shape and shape[0] == 1:
        shape = shape[1:]
    if hasattr(spec, "num_values"):
        return Space(np.int32, shape, 0, int(spec.num_values))
    # The bounds of the spec are not used: simulators do not enforce them, and values
    # rounded to float32 can exceed them.
    return Space(dtype, shape)


def _act_space(spec: Any) -> Space:
    if hasattr(spec, "num_values"):
        return Space(np.int32, spec.shape, 0, int(spec.num_values))
    low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
    if np.dtype(spec.dtype).kind in "iu" and high is not None:
        high = np.asarray(high, np.int64) + 1  # dm_env includes the upper bound
    return Space(spec.dtype, spec.shape, low, high)
