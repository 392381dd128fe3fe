"""Adapter for Gymnasium environments, including the older gym API.

Nested Dict and Tuple spaces become flat keys joined by `/`. An observation that is not
a Dict is named `image` or `vector`, an action that is not a Dict is named `action`.
Discrete spaces keep their `start`. `terminated` sets `is_terminal` and `is_last`,
`truncated` only `is_last`; `info["is_terminal"]` overrides `terminated`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.envs.flags import flag_spaces, flags
from reverie.envs.seeding import SEED_RANGE
from reverie.spaces import RESERVED, Space


class GymnasiumEnv:
    """Presents a Gymnasium environment as a Reverie environment."""

    def __init__(self, env: Any):
        self.gym = env
        self._obs_leaves = _flatten(env.observation_space, "observation")
        self._act_leaves = _flatten(env.action_space, "action")
        default = _default_key(next(iter(self._obs_leaves.values())))
        self._obs_keys = {path: "/".join(path) or default for path in self._obs_leaves}
        self._act_keys = {path: "/".join(path) or "action" for path in self._act_leaves}
        if reserved := sorted(
            {*self._obs_keys.values(), *self._act_keys.values()} & {*RESERVED}
        ):
            raise UserError(
                f"The space has the keys {reserved}, which are reserved.\n"
                "  Fix: rename them."
            )
        self._takes_seed = "seed" in inspect.signature(env.reset).parameters
        obs = {self._obs_keys[p]: _to_space(s) for p, s in self._obs_leaves.items()}
        act = {self._act_keys[p]: _to_space(s) for p, s in self._act_leaves.items()}
        self.obs_space, self.act_space = {**obs, **flag_spaces()}, act

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            seed = seed % SEED_RANGE
        if self._takes_seed:
            result = self.gym.reset(seed=seed)
        else:
            if seed is not None and hasattr(self.gym, "seed"):
                self.gym.seed(seed)
            result = self.gym.reset()
        has_info = (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], Mapping)
        )
        values = self._flat_obs(result[0] if has_info else result)
        return {**values, **flags(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        flat = {path: action[key] for path, key in self._act_keys.items()}
        result = self.gym.step(_unflatten(self.gym.action_space, flat))
        if len(result) == 5:
            obs, reward, terminated, truncated, info = result
        else:  # the API before Gymnasium, where `info` marks time limits
            obs, reward, done, info = result
            truncated = bool(info.get("TimeLimit.truncated", False))
            terminated = done and not truncated
        terminal = bool(info.get("is_terminal", terminated))
        last = bool(terminated or truncated or terminal)
        return {**self._flat_obs(obs), **flags(reward, last=last, terminal=terminal)}

    def close(self) -> None:
        self.gym.close()

    def _flat_obs(self, obs: Any) -> Obs:
        return {
            key: _to_array(_get_leaf(obs, path), self._obs_leaves[path])
            for path, key in self._obs_keys.items()
        }


def _flatten(space: Any, kind: str, path: tuple[str, ...] = ()) -> dict[Any, Any]:
    """Return the leaves of a nested space by path; refuse unsupported types."""
    type_name = type(space).__name__
    if type_name == "Dict":
        parts = space.spaces.items()
    elif type_name == "Tuple":
        parts = ((str(i), part) for i, part in enumerate(space.spaces))
    elif type_name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        return {path: space}
    else:
        where = f" {'/'.join(path)}" if path else ""
        raise UserError(
            f"The {kind} space{where} is a {type_name}, which is not supported.\n"
            "  Fix: use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple "
            "of them."
        )
    leaves: dict[Any, Any] = {}
    for key, part in parts:
        leaves.update(_flatten(part, kind, (*path, str(key))))
    if not leaves and not path:
        raise UserError(f"The {kind} space is empty.\n  Fix: give it at least one key.")
    return leaves


def _to_space(space: Any) -> Space:
    type_name = type(space).__name__
    int32 = np.dtype(np.int32)
    if type_name == "Discrete":
        start = int(getattr(space, "start", 0))
        return Space(int32, (), start, start + int(space.n))
    if type_name == "MultiDiscrete":
        starts = np.asarray(getattr(space, "start", 0))
        return Space(int32, space.nvec.shape, starts, starts + space.nvec)
    if type_name == "MultiBinary":
        return Space(int32, space.shape, 0, 2)
    dtype, shape = np.dtype(space.dtype), tuple(space.shape)
    if dtype == np.uint8 and len(shape) == 2:
        return Space(dtype, (*shape, 1))
    if dtype == np.uint8 and len(shape) == 3:
        return Space(dtype, shape)
    if dtype.kind in "iu":  # Gymnasium includes the upper bound of integers
        high = np.minimum(space.high.astype(np.float64), 2.0**62).astype(np.int64) + 1
        return Space(dtype, shape, space.low.astype(np.int64), high)
    if dtype.kind == "b":
        return Space(dtype, shape)
    return Space(dtype, shape, space.low, space.high)


def _to_array(value: Any, space: Any) -> np.ndarray:
    if type(space).__name__ != "Box":
        return np.asarray(value, np.int32)
    array = np.array(value)  # a copy: many environments reuse their arrays
    if array.dtype != space.dtype and array.dtype.kind == np.dtype(space.dtype).kind:
        array = array.astype(space.dtype)
    is_gray_image = space.dtype == np.uint8 and len(space.shape) == 2
    return array[..., None] if is_gray_image else array


def _default_key(space: Any) -> str:
    is_bytes = type(space).__name__ == "Box" and space.dtype == np.uint8
    return "image" if is_bytes and len(space.shape) in (2, 3) else "vector"


def _get_leaf(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value[int(key)] if isinstance(value, tuple | list) else value[key]
    return value


def _unflatten(space: Any, flat: dict[Any, Any], path: tuple[str, ...] = ()) -> Any:
    """Convert flat actions to the nested form of the environment's action space."""
    type_name = type(space).__name__
    if type_name == "Dict":
        return {
            key: _unflatten(part, flat, (*path, str(key)))
            for key, part in space.spaces.items()
        }
    if type_name == "Tuple":
        parts = enumerate(space.spaces)
        return tuple(_unflatten(part, flat, (*path, str(i))) for i, part in parts)
    value = flat[path]
    if type_name == "Discrete":
        return int(value)
    return np.asarray(value, space.dtype).reshape(space.shape)
