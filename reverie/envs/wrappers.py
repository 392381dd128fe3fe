"""Environment wrappers, applied by `reverie.envs.make`.

Each wrapper changes one thing and forwards all other attributes, including `state_dict`
and `load_state_dict`: a wrapped environment has them only if the inner one does.
Observations returned by `set_simulator_state` are changed like those of `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np

from reverie.api import Action, Env, Obs, StateDict, UserError
from reverie.capabilities import HasSimulatorState
from reverie.spaces import STEP_KEYS, Space, Spaces, agent_obs_space

Resample = Literal["nearest", "bilinear"]
RENDERED = "log/image"
"""Observation key of rendered frames, which are used in videos only."""
RENDER_SIZE = 256
"""Maximum height and width of rendered frames; larger ones are resized."""


class Wrapper:
    """Forwards everything to the inner environment; subclasses override parts."""

    obs_space: Spaces
    act_space: Spaces

    def __init__(self, env: Env):
        self.env = env
        if type(self).step is Wrapper.step:
            self._bypass_step()

    def _bypass_step(self) -> None:
        """Call the inner environment's `step` directly, to save a function call."""
        self.step = self.env.step  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet while copying or unpickling: avoid recursion
            raise AttributeError(name)
        inner = getattr(self.env, name)
        if name == "set_simulator_state":
            return lambda *arguments: self._transform(inner(*arguments))
        return inner

    def _transform(self, obs: Obs) -> Obs:
        """Change an observation; the default does nothing."""
        return obs

    def reset(self, seed: int | None = None) -> Obs:
        return self.env.reset(seed)

    def step(self, action: Action) -> Obs:
        return self.env.step(action)

    def close(self) -> None:
        self.env.close()


def without_wrappers(env: Any) -> Any:
    """Return the environment inside all wrappers."""
    while isinstance(env, Wrapper):
        env = env.env
    return env


def has_simulator_state(env: Env) -> TypeGuard[HasSimulatorState]:
    """True if the simulator inside all wrappers can be set to recorded states.

    `isinstance` does not find forwarded methods on Python 3.12 and newer.
    """
    return isinstance(without_wrappers(env), HasSimulatorState)


class ObsWrapper(Wrapper):
    """Applies `_transform` to every observation."""

    def reset(self, seed: int | None = None) -> Obs:
        return self._transform(self.env.reset(seed))

    def step(self, action: Action) -> Obs:
        return self._transform(self.env.step(action))


class SeedFirstReset(Wrapper):
    """Passes a seed to the first `reset` unless the caller passes one."""

    def __init__(self, env: Env, seed: int):
        super().__init__(env)
        self.seed: int | None = seed

    def reset(self, seed: int | None = None) -> Obs:
        seed, self.seed = (self.seed if seed is None else seed), None
        return self.env.reset(seed)

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__(name)
        if name == "load_state_dict":
            return lambda state: self._load(state, inner)
        return inner

    def _load(self, state: StateDict, inner: Any) -> None:
        self.seed = None  # the state contains the random generator
        inner(state)


class ActionRepeat(Wrapper):
    """Repeats each action and sums the rewards; stops when the episode ends."""

    def __init__(self, env: Env, repeat: int):
        super().__init__(env)
        self.repeat = repeat
        if fps := getattr(env, "render_fps", 0):
            self.render_fps = fps / repeat
        if space := env.obs_space.get("reward"):
            low = np.minimum(space.low, space.low * repeat)
            high = np.maximum(space.high, space.high * repeat)
            reward = replace(space, low=low, high=high)
            self.obs_space = {**env.obs_space, "reward": reward}

    def step(self, action: Action) -> Obs:
        reward = 0.0
        for _ in range(self.repeat):
            obs = self.env.step(action)
            reward += float(obs["reward"])
            if obs["is_last"]:
                break
        return {**obs, "reward": np.float32(reward)}


class RenderImage(ObsWrapper):
    """Adds rendered frames as `log/image`, for videos; agents do not see them.

    Environments with image observations are not changed.
    """

    def __init__(self, env: Env, name: str):
        super().__init__(env)
        self._renders = not any(
            space.is_image for space in agent_obs_space(env.obs_space).values()
        )
        if not self._renders:
            self._bypass_step()
            return
        if not hasattr(env, "start_rendering"):
            raise UserError(
                f"Task {name!r} has no image observations and cannot be rendered, so "
                "no videos can be recorded.\n  Fix: remove --videos and --env.render."
            )
        env.start_rendering()
        env.reset()
        frame = self._frame()
        if frame.dtype != np.uint8 or frame.ndim != 3:
            raise UserError(
                f"`render` of task {name!r} returned {frame.dtype} of shape "
                f"{frame.shape}.\n  Fix: return an image, uint8 of shape (h, w, 3)."
            )
        space = Space(np.uint8, frame.shape)
        self.obs_space = {**env.obs_space, RENDERED: space}

    def _transform(self, obs: Obs) -> Obs:
        return {**obs, RENDERED: self._frame()} if self._renders else obs

    def _frame(self) -> np.ndarray:
        """Render a frame, and reduce it to at most `RENDER_SIZE` pixels per side."""
        env: Any = self.env
        frame = np.asarray(env.render())
        if frame.ndim != 3 or max(frame.shape[:2]) <= RENDER_SIZE:
            return frame
        scale = RENDER_SIZE / max(frame.shape[:2])
        height, width = (max(1, round(scale * side)) for side in frame.shape[:2])
        return resize(frame, (height, width))


class TimeLimit(Wrapper):
    """Truncates episodes after `length` steps: sets `is_last`, not `is_terminal`."""

    def __init__(self, env: Env, length: int):
        super().__init__(env)
        self.length = length
        self.count = 0

    def reset(self, seed: int | None = None) -> Obs:
        self.count = 0
        return self.env.reset(seed)

    def step(self, action: Action) -> Obs:
        self.count += 1
        obs = self.env.step(action)
        if self.count >= self.length:
            obs = {**obs, "is_last": np.bool_(True)}
        return obs

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__(name)
        if name == "state_dict":
            return lambda: {"count": self.count, "env": inner()}
        if name == "load_state_dict":
            return lambda state: self._load(state, inner)
        return inner

    def _load(self, state: StateDict, inner: Any) -> None:
        self.count = int(state["count"])
        inner(state["env"])


class NormalizeAction(Wrapper):
    """Rescales actions from [-1, 1] to the bounds of `env`, where these are finite."""

    def __init__(self, env: Env):
        super().__init__(env)
        self.act_space = {k: s.normalized() for k, s in env.act_space.items()}
        self._scaled = {k: s for k, s in self.act_space.items() if s.native is not None}
        if not self._scaled:
            self._bypass_step()

    def step(self, action: Action) -> Obs:
        native = {k: s.to_native(action[k]) for k, s in self._scaled.items()}
        return self.env.step({**action, **native})


class ClipAction(Wrapper):
    """Clips continuous actions to their bounds; the replay stores them unclipped."""

    def __init__(self, env: Env):
        super().__init__(env)
        self._bounds = {
            key: (space.low, space.high)
            for key, space in env.act_space.items()
            if space.dtype.kind == "f"
        }
        if not self._bounds:
            self._bypass_step()

    def step(self, action: Action) -> Obs:
        clipped = {k: np.clip(action[k], *b) for k, b in self._bounds.items()}
        return self.env.step({**action, **clipped})


class ResizeImage(ObsWrapper):
    """Resizes all images to one size."""

    def __init__(self, env: Env, size: tuple[int, int], resample: Resample = "nearest"):
        super().__init__(env)
        self.size = size
        self.resample = resample
        self._resized = {
            key: replace(space, shape=(*size, space.shape[2]), low=None, high=None)
            for key, space in env.obs_space.items()
            if space.is_image and space.shape[:2] != tuple(size)
        }
        self.obs_space = {**env.obs_space, **self._resized}

    def _transform(self, obs: Obs) -> Obs:
        resized = {k: resize(obs[k], self.size, self.resample) for k in self._resized}
        return {**obs, **resized}


def resize(
    image: np.ndarray, size: tuple[int, int], resample: Resample = "bilinear"
) -> np.ndarray:
    """Resize a uint8 image of shape (height, width, channels)."""
    if image.shape[:2] == tuple(size):
        return image
    if resample == "nearest":
        rows = (np.arange(size[0]) + 0.5) * image.shape[0] / size[0]
        cols = (np.arange(size[1]) + 0.5) * image.shape[1] / size[1]
        return np.ascontiguousarray(image[rows.astype(int)[:, None], cols.astype(int)])
    from PIL import Image

    if image.shape[2] in (1, 3):
        pixels = image[..., 0] if image.shape[2] == 1 else image
        resized = Image.fromarray(np.ascontiguousarray(pixels)).resize(
            (size[1], size[0]), Image.Resampling.BILINEAR
        )
        return np.asarray(resized).reshape(*size, image.shape[2])
    channels = [resize(c[..., None], size, resample) for c in np.moveaxis(image, 2, 0)]
    return np.concatenate(channels, 2)


class ClipReward(Wrapper):
    """Clips rewards to [-limit, limit]."""

    def __init__(self, env: Env, limit: float):
        super().__init__(env)
        self.limit = limit

    def step(self, action: Action) -> Obs:
        obs = self.env.step(action)
        reward = np.float32(np.clip(obs["reward"], -self.limit, self.limit))
        return {**obs, "reward": reward}


class UnifyDtypes(ObsWrapper):
    """Converts floats to float32 and integers to int32, except uint8 and bool."""

    def __init__(self, env: Env):
        super().__init__(env)
        self.obs_space = {k: _unified(s) for k, s in env.obs_space.items()}
        self.act_space = {k: _unified(s) for k, s in env.act_space.items()}
        self._dtypes = {k: s.dtype for k, s in self.obs_space.items()}
        self._act_dtypes = {k: s.dtype for k, s in env.act_space.items()}

    def step(self, action: Action) -> Obs:
        if not _have_dtypes(action, self._act_dtypes):
            dtypes = self._act_dtypes
            action = {k: np.asarray(v, dtypes.get(k)) for k, v in action.items()}
        return super().step(action)

    def _transform(self, obs: Obs) -> Obs:
        dtypes = self._dtypes
        if _have_dtypes(obs, dtypes):
            return obs
        return {
            key: cast(value, dtypes[key]) if key in dtypes else value
            for key, value in obs.items()
        }


def _have_dtypes(values: Mapping[str, Any], dtypes: Mapping[str, np.dtype]) -> bool:
    """True if all values have these dtypes, so that no cast is needed."""
    for key, value in values.items():
        if getattr(value, "dtype", None) is not dtypes.get(key):
            return False
    return True


def _unified(space: Space) -> Space:
    """Return a space with the dtype that `UnifyDtypes` converts to."""
    kinds = {"f": np.float32, "i": np.int32}
    dtype = np.dtype(kinds.get(space.dtype.kind, space.dtype))
    if dtype.kind == "u" and dtype != np.uint8:
        dtype = np.dtype(np.int32)
    if dtype == space.dtype:
        return space
    low, high = space.low, space.high
    if dtype == np.int32:
        low, high = np.maximum(low, -(2**31)), np.minimum(high, 2**31)
    return replace(space, dtype=dtype, low=low, high=high)


def cast(value: Any, dtype: np.dtype) -> Any:
    """Cast to the dtype, unless that would hide an error (such as float to int)."""
    if getattr(value, "dtype", None) == dtype:
        return value
    array = np.asarray(value)
    kind = array.dtype.kind
    is_int = kind in "iu"
    is_safe = kind == dtype.kind or (
        is_int and (dtype == np.int32 or dtype.kind == "f")
    )
    return array.astype(dtype) if is_safe else array


class CheckSpaces(Wrapper):
    """Raises `UserError` if observations or actions do not match their spaces."""

    def __init__(self, env: Env, name: str):
        super().__init__(env)
        self.name = name
        self._missing_flags = [key for key in STEP_KEYS if key not in self.obs_space]
        self._obs_checks = {k: _fast_check(s) for k, s in self.obs_space.items()}
        self._act_checks = {k: _fast_check(s) for k, s in self.act_space.items()}

    def reset(self, seed: int | None = None) -> Obs:
        return self._check_obs(self.env.reset(seed))

    def step(self, action: Action) -> Obs:
        if not _passes(action, self._act_checks):
            action = self._check_action(action)
        return self._check_obs(self.env.step(action))

    def _check_action(self, action: Action) -> Action:
        checked = {}
        for key, space in self.act_space.items():
            if key not in action:
                raise UserError(
                    f"Task {self.name!r} needs the action {key!r}, got "
                    f"{sorted(action)}.\n  Fix: pass every key of its act_space."
                )
            value = np.asarray(action[key])
            if value.dtype.kind == space.dtype.kind:
                value = value.astype(space.dtype, copy=False)
            if problem := space.problem(value):
                raise UserError(
                    f"Task {self.name!r}: action {key!r} {problem}.\n"
                    "  Fix: pass an element of its act_space."
                )
            checked[key] = value
        return checked

    def _check_obs(self, obs: Obs) -> Obs:
        if _passes(obs, self._obs_checks) and not self._missing_flags:
            return obs
        if self._missing_flags:
            missing = ", ".join(self._missing_flags)
            raise self._error(f" lacks {missing} in its obs_space")
        if obs.keys() != self.obs_space.keys():
            missing_keys = sorted(self.obs_space.keys() - obs.keys())
            extra_keys = sorted(obs.keys() - self.obs_space.keys())
            raise self._error(
                " returned an observation whose keys differ from its obs_space "
                f"(missing {missing_keys}, extra {extra_keys})"
            )
        for key, space in self.obs_space.items():
            if problem := space.problem(obs[key]):
                raise self._error(f": observation {key!r} {problem}")
        return obs

    def _error(self, problem: str) -> UserError:
        """Return an error whose fix is to run the environment checker."""
        return UserError(
            f"Task {self.name!r}{problem}.\n  Fix: `reverie check-env {self.name}`, "
            "which reports what to change."
        )


class FastCheck(NamedTuple):
    """Cheap check of one value, done every step. `Space.problem` is slower and is used
    for the error message if this check fails."""

    dtype: np.dtype
    shape: tuple[int, ...]
    bounds: tuple[Any, Any] | None
    """Inclusive bounds of a scalar."""
    has_problem: Callable[[Any], object] | None
    """Returns a true value if an entry of an array is invalid."""


def _fast_check(space: Space) -> FastCheck:
    """Return the cheapest check that finds all values outside of a space."""
    dtype, shape, is_float = space.dtype, space.shape, space.dtype.kind == "f"
    if shape == () and dtype.kind != "b":
        low, high = space.low.item(), space.high.item()
        if not is_float:
            high -= 1  # the upper bound of integer spaces is exclusive
        else:  # infinite values are not valid
            largest = float(np.finfo(dtype).max)
            low, high = max(low, -largest), min(high, largest)
        return FastCheck(dtype, shape, (low, high), None)
    if not _is_unbounded(space):
        return FastCheck(dtype, shape, None, space.problem)
    return FastCheck(dtype, shape, None, _has_nonfinite if is_float else None)


def _has_nonfinite(value: np.ndarray) -> bool:
    return not np.isfinite(value).all()


def _passes(values: Mapping[str, Any], checks: Mapping[str, FastCheck]) -> bool:
    """True if there is a value for every check, and no other, and all are valid."""
    if len(values) != len(checks):
        return False
    for key, (dtype, shape, bounds, has_problem) in checks.items():
        value: Any = values.get(key)
        if getattr(value, "dtype", None) is not dtype or value.shape != shape:
            return False
        if bounds is not None and not bounds[0] <= value <= bounds[1]:  # true for NaN
            return False
        if has_problem is not None and has_problem(value):
            return False
    return True


def _is_unbounded(space: Space) -> bool:
    """True if every value of the dtype is allowed."""
    if space.dtype.kind == "f":
        return bool(np.isneginf(space.low).all() and np.isposinf(space.high).all())
    if space.dtype.kind == "b":
        return True
    info = np.iinfo(space.dtype)
    return bool((space.low <= info.min).all() and (space.high > info.max).all())
