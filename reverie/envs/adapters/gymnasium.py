"""Adapter for Gymnasium environments, including the older gym API.

Nested Dict and Tuple spaces become flat keys joined by `/`. An observation that is not
a Dict is named `image` or `vector`, an action that is not a Dict is named `action`. An
action with the key of an observation gets the prefix `action/`. `Space.source` records
the position of a value in the nested Gymnasium space. Discrete spaces keep their
`start`.
`terminated` sets `is_terminal` and `is_last`, `truncated` only `is_last`;
`info["is_terminal"]` overrides `terminated`. `info["success"]` or `info["is_success"]`
is logged as `log/success`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.envs.mujoco_state import read_state, split_state
from reverie.envs.seeding import SEED_RANGE
from reverie.spaces import (
    RESERVED,
    SUCCESS,
    Source,
    Space,
    Spaces,
    get_leaf,
    step_spaces,
    step_values,
    to_nested,
)

LeafPath = tuple[str | int, ...]
"""Keys of Dict spaces and indices of Tuple spaces that lead to a leaf."""
MAX_CHANNELS, MIN_SIDE = 16, 32
"""A uint8 array is taken for an image with the channels first if its first axis has at
most this length, and both other axes have at least this length."""
NOT_REPORTED = np.float32(-1)
"""Value of `log/success` if `info` does not report success."""


class GymnasiumEnv:
    """Adapts a Gymnasium environment to `reverie.api.Env`."""

    def __init__(self, env: Any, make_rendered: Callable[[], Any] | None = None):
        """`make_rendered` makes the same environment with `render_mode="rgb_array"`."""
        self.gym, self._make_rendered = env, make_rendered
        leaves = _flatten(env.observation_space, "observation")
        default_key = _default_key(next(iter(leaves.values())))
        obs_keys = _flat_keys(leaves, default_key)
        self._obs_leaves = {key: (path, leaves[path]) for path, key in obs_keys.items()}
        act_leaves = _flatten(env.action_space, "action")
        act_keys = {
            path: f"action/{key}" if key in self._obs_leaves else key
            for path, key in _flat_keys(act_leaves, "action").items()
        }
        if reserved := sorted({*self._obs_leaves, *act_keys.values()} & {*RESERVED}):
            raise UserError(
                f"The space has the keys {reserved}, which are reserved.\n"
                "  Fix: rename them."
            )
        for key, (_, space) in self._obs_leaves.items():
            _check_image_axes(key, space)
        self._takes_seed = "seed" in inspect.signature(env.reset).parameters
        obs = {key: _to_space(*leaf) for key, leaf in self._obs_leaves.items()}
        success: Spaces = {SUCCESS: Space(np.float32, (), -1, 1)}
        self.obs_space: Spaces = {**obs, **success, **step_spaces()}
        self.act_space: Spaces = {
            key: _to_space(path, act_leaves[path]) for path, key in act_keys.items()
        }

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
        obs, info = result if has_info else (result, {})
        return {**self._flat_obs(obs, info), **step_values(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        leaves = {k: _to_leaf(action[k], s.source) for k, s in self.act_space.items()}
        result = self.gym.step(to_nested(self.act_space, leaves))
        if len(result) == 5:
            obs, reward, terminated, truncated, info = result
        else:  # the API of gym before 0.26, where `info` marks time limits
            obs, reward, done, info = result
            truncated = bool(info.get("TimeLimit.truncated", False))
            terminated = done and not truncated
        terminal = bool(info.get("is_terminal", terminated))
        last = bool(terminated or truncated or terminal)
        values = self._flat_obs(obs, info)
        return {**values, **step_values(reward, last=last, terminal=terminal)}

    def close(self) -> None:
        self.gym.close()

    @property
    def render_fps(self) -> float:
        """Steps per second in real time; 0 if the environment does not declare it."""
        metadata = getattr(self.gym, "metadata", None) or {}
        fps = metadata.get("render_fps") or metadata.get("video.frames_per_second")
        return float(fps or 0)

    def start_rendering(self) -> None:
        """Rebuild the environment for `render` if needed; call `reset` afterwards."""
        if getattr(self.gym, "render_mode", None) == "rgb_array":
            return
        if self._make_rendered is None:
            raise UserError(
                "The environment has no image observations and was made without "
                'render_mode="rgb_array", so no videos can be recorded.\n'
                '  Fix: make it with render_mode="rgb_array".'
            )
        self.gym.close()
        self.gym = self._make_rendered()

    def render(self) -> np.ndarray:
        """Return the current frame."""
        return np.array(self.gym.render())

    def simulator_state(self) -> np.ndarray:
        """Return time, positions and velocities of a MuJoCo environment."""
        env = self._mujoco_env()
        return read_state(env.model, env.data)

    def simulator_model(self) -> str:
        """Return an empty string: the model is the same in all episodes."""
        return ""

    def set_simulator_state(self, state: np.ndarray, model: str = "") -> Obs:
        """Set the state of a MuJoCo environment; `model` is not used."""
        env = self._mujoco_env()
        time, qpos, qvel, _ = split_state(env.model, state)
        env.set_state(qpos, qvel)
        env.data.time = time
        return {**self._flat_obs(env._get_obs(), {}), **step_values(0.0, first=True)}

    def _mujoco_env(self) -> Any:
        env = self.gym.unwrapped
        if not (hasattr(env, "set_state") and hasattr(env, "_get_obs")):
            raise UserError(
                f"The state of {type(env).__name__} cannot be set.\n"
                "  Fix: use a MuJoCo environment of Gymnasium, dmc or robosuite."
            )
        return env

    def _flat_obs(self, obs: Any, info: Mapping[str, Any]) -> Obs:
        """Return the leaves of a nested observation by key, and `log/success`."""
        values: Obs = {
            key: _to_array(get_leaf(obs, path), space)
            for key, (path, space) in self._obs_leaves.items()
        }
        values[SUCCESS] = _success(info)
        return values


def _success(info: Mapping[str, Any]) -> np.float32:
    """Return 1 or 0 if `info` reports success or failure, else `NOT_REPORTED`."""
    value = info.get("success", info.get("is_success"))
    if value is None or np.asarray(value).dtype.kind not in "biuf":
        return NOT_REPORTED
    return np.float32(np.any(np.asarray(value) > 0))


def _flatten(space: Any, kind: str, path: LeafPath = ()) -> dict[LeafPath, Any]:
    """Return the leaves of a nested space; raise `UserError` for unsupported types."""
    type_name = type(space).__name__
    where = f" {'/'.join(map(str, path))}" if path else ""
    if type_name == "Dict":
        parts = space.spaces.items()
    elif type_name == "Tuple":
        parts = enumerate(space.spaces)
    elif type_name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        return {path: space}
    else:
        raise UserError(
            f"The {kind} space{where} is a {type_name}, which is not supported.\n"
            "  Fix: use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple "
            "of them."
        )
    leaves: dict[LeafPath, Any] = {}
    for key, part in parts:
        if type_name == "Dict" and not isinstance(key, str):
            raise UserError(
                f"The {kind} space{where} has the key {key!r}, which is not a string.\n"
                "  Fix: use strings as keys of a Dict."
            )
        leaves.update(_flatten(part, kind, (*path, key)))
    if not leaves:
        raise UserError(
            f"The {kind} space{where} is empty.\n"
            "  Fix: give it at least one entry, or remove it."
        )
    return leaves


def _flat_keys(leaves: dict[LeafPath, Any], default_key: str) -> dict[LeafPath, str]:
    """Return the flat key of every leaf; `default_key` if the space is not nested."""
    keys = {path: "/".join(map(str, path)) or default_key for path in leaves}
    for key, count in Counter(keys.values()).items():
        if count > 1:
            raise UserError(
                f"Two entries of a nested space have the key {key!r}.\n"
                "  Fix: rename one of them; nested keys are joined by `/`."
            )
    return keys


def _to_space(path: LeafPath, space: Any) -> Space:
    """Convert a leaf of a Gymnasium space; `source` keeps its path, dtype and shape."""
    converted, shape = _leaf_space(space), tuple(space.shape or ())
    original = Space(space.dtype, shape)
    if converted.shape == shape:  # false for grayscale images, which get an axis
        original = replace(converted, dtype=space.dtype)
    source = Source(path, original, type(space).__name__ == "Discrete")
    return replace(converted, source=source)


def _leaf_space(space: Any) -> Space:
    """Return dtype, shape and bounds; grayscale images get an axis of channels."""
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
        # limited to 2**62, so that adding 1 does not overflow
        high = np.minimum(space.high.astype(np.float64), 2.0**62).astype(np.int64) + 1
        return Space(dtype, shape, space.low.astype(np.int64), high)
    if dtype.kind == "b":
        return Space(dtype, shape)
    return Space(dtype, shape, space.low, space.high)


def _to_array(value: Any, space: Any) -> np.ndarray:
    """Convert an observation of a Gymnasium leaf space to an array of its `Space`."""
    if type(space).__name__ != "Box":
        return np.asarray(value, np.int32)
    array = np.array(value)  # a copy: many environments reuse their arrays
    if array.dtype != space.dtype and array.dtype.kind == np.dtype(space.dtype).kind:
        array = array.astype(space.dtype)
    is_gray_image = space.dtype == np.uint8 and len(space.shape) == 2
    return array[..., None] if is_gray_image else array


def _check_image_axes(key: str, space: Any) -> None:
    """Raise if an observation is an image with the channels as its first axis."""
    if _default_key(space) != "image" or len(space.shape) != 3:
        return
    channels, *sides = space.shape
    if channels <= MAX_CHANNELS and min(sides) >= MIN_SIDE:
        raise UserError(
            f"The observation {key!r} has shape {tuple(space.shape)}, which looks like "
            "an image with the channels first; images have the channels last.\n"
            "  Fix: wrap the environment in gymnasium.wrappers.TransformObservation, "
            "with `lambda obs: np.moveaxis(obs, 0, -1)` and the space of the result."
        )


def _default_key(space: Any) -> str:
    """Return the key of an observation that is not a Dict."""
    is_uint8 = type(space).__name__ == "Box" and space.dtype == np.uint8
    return "image" if is_uint8 and len(space.shape) in (2, 3) else "vector"


def _to_leaf(value: Any, source: Source | None) -> Any:
    """Convert an action to the type, dtype and shape of its Gymnasium leaf space."""
    assert source is not None
    if source.is_int:
        return int(value)
    return np.asarray(value, source.space.dtype).reshape(source.space.shape)
