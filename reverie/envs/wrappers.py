"""Small wrappers around an environment; `reverie.envs.make` stacks them.

Each one changes one thing and hands everything else through, `state_dict` and
`load_state_dict` included: a wrapped environment has them exactly when the inner one
does, so that "can this be resumed exactly" stays one question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from reverie.api import Action, Env, Obs, StateDict, UserError
from reverie.spaces import FLAGS, Space, Spaces

Resample = Literal["nearest", "bilinear"]


class Wrapper:
    """Hands everything through; subclasses override what they change."""

    def __init__(self, env: Env):
        self.env = env
        if type(self).step is Wrapper.step:
            self._leave_steps_alone()

    def _leave_steps_alone(self) -> None:
        """Steps go straight to the inner environment: a call less, a million times."""
        self.step = self.env.step  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet: while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def obs_space(self) -> Spaces:
        return self.env.obs_space

    @property
    def act_space(self) -> Spaces:
        return self.env.act_space

    def reset(self, seed: int | None = None) -> Obs:
        return self.env.reset(seed)

    def step(self, action: Action) -> Obs:
        return self.env.step(action)

    def close(self) -> None:
        self.env.close()


class SeedFirst(Wrapper):
    """Seeds the first reset that nobody else seeds."""

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
        self.seed = None  # the state brings its own random numbers
        inner(state)


class ActionRepeat(Wrapper):
    """Takes each action several times and sums the rewards; stops at the last step."""

    def __init__(self, env: Env, repeat: int):
        super().__init__(env)
        self.repeat = repeat

    @property
    def obs_space(self) -> Spaces:
        spaces = dict(self.env.obs_space)
        if one := spaces.get("reward"):
            low, high = one.low * self.repeat, one.high * self.repeat
            low, high = np.minimum(one.low, low), np.maximum(one.high, high)
            spaces["reward"] = replace(one, low=low, high=high)
        return spaces

    def step(self, action: Action) -> Obs:
        reward = 0.0
        for _ in range(self.repeat):
            obs = self.env.step(action)
            reward += float(obs["reward"])
            if obs["is_last"]:
                break
        return {**obs, "reward": np.float32(reward)}


class TimeLimit(Wrapper):
    """Ends an episode after `length` steps, without calling that terminal."""

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
    """Shows every bounded continuous action as [-1, 1]; unbounded entries stay."""

    def __init__(self, env: Env):
        super().__init__(env)
        self._spaces = {k: _normalized(s) for k, s in env.act_space.items()}
        self._scaled = [k for k, s in self._spaces.items() if s.native is not None]
        if not self._scaled:
            self._leave_steps_alone()

    @property
    def act_space(self) -> Spaces:
        return self._spaces

    def step(self, action: Action) -> Obs:
        native = {k: self._spaces[k].to_native(action[k]) for k in self._scaled}
        return self.env.step({**action, **native})


def _normalized(space: Space) -> Space:
    if space.dtype.kind != "f":
        return space
    finite = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(finite, -1, space.low), np.where(finite, 1, space.high)
    if np.array_equal(low, space.low) and np.array_equal(high, space.high):
        return space
    native = (space.low, space.high)
    return Space(space.dtype, space.shape, low, high, native)


class ClipAction(Wrapper):
    """Clips continuous actions to their bounds; the caller keeps the raw ones."""

    def __init__(self, env: Env):
        super().__init__(env)
        self._bounds = {
            key: (space.low, space.high)
            for key, space in env.act_space.items()
            if space.dtype.kind == "f"
        }
        if not self._bounds:
            self._leave_steps_alone()

    def step(self, action: Action) -> Obs:
        clipped = {k: np.clip(action[k], *b) for k, b in self._bounds.items()}
        return self.env.step({**action, **clipped})


class ResizeImage(Wrapper):
    """Brings every image to one size."""

    def __init__(self, env: Env, size: tuple[int, int], resample: Resample = "nearest"):
        super().__init__(env)
        self.size = size
        self.resample = resample
        self._keys = [
            key
            for key, space in env.obs_space.items()
            if space.is_image and space.shape[:2] != tuple(size)
        ]

    @property
    def obs_space(self) -> Spaces:
        spaces = dict(self.env.obs_space)
        for key in self._keys:
            shape = (*self.size, spaces[key].shape[2])
            spaces[key] = Space(np.dtype(np.uint8), shape)
        return spaces

    def reset(self, seed: int | None = None) -> Obs:
        return self._resize(self.env.reset(seed))

    def step(self, action: Action) -> Obs:
        return self._resize(self.env.step(action))

    def _resize(self, obs: Obs) -> Obs:
        resized = {k: resize(obs[k], self.size, self.resample) for k in self._keys}
        return {**obs, **resized}


def resize(
    image: np.ndarray, size: tuple[int, int], resample: Resample = "bilinear"
) -> np.ndarray:
    """A uint8 image (h w c) in another size, by Pillow (nearest: by indexing)."""
    if image.shape[:2] == tuple(size):
        return image
    if resample == "nearest":
        rows = (np.arange(size[0]) + 0.5) * image.shape[0] / size[0]
        cols = (np.arange(size[1]) + 0.5) * image.shape[1] / size[1]
        return np.ascontiguousarray(image[rows.astype(int)[:, None], cols.astype(int)])
    from PIL import Image

    if image.shape[2] in (1, 3):
        flat = image[..., 0] if image.shape[2] == 1 else image
        small = Image.fromarray(np.ascontiguousarray(flat)).resize(
            (size[1], size[0]), Image.Resampling.BILINEAR
        )
        return np.asarray(small).reshape(*size, image.shape[2])
    channels = [resize(c[..., None], size, resample) for c in np.moveaxis(image, 2, 0)]
    return np.concatenate(channels, 2)


class ClipReward(Wrapper):
    """Keeps rewards within [-limit, limit]."""

    def __init__(self, env: Env, limit: float):
        super().__init__(env)
        self.limit = limit

    def step(self, action: Action) -> Obs:
        obs = self.env.step(action)
        reward = np.float32(np.clip(obs["reward"], -self.limit, self.limit))
        return {**obs, "reward": reward}


class UnifyDtypes(Wrapper):
    """Shows floats as float32 and signed integers as int32; uint8 and bool stay."""

    def __init__(self, env: Env):
        super().__init__(env)
        self._obs_space = {k: _unified(s) for k, s in env.obs_space.items()}
        self._act_space = {k: _unified(s) for k, s in env.act_space.items()}
        self._dtypes = {k: s.dtype for k, s in self._obs_space.items()}
        self._act_dtypes = {k: s.dtype for k, s in env.act_space.items()}

    @property
    def obs_space(self) -> Spaces:
        return self._obs_space

    @property
    def act_space(self) -> Spaces:
        return self._act_space

    def reset(self, seed: int | None = None) -> Obs:
        return self._unify(self.env.reset(seed))

    def step(self, action: Action) -> Obs:
        if not _have_dtypes(action, self._act_dtypes):
            dtypes = self._act_dtypes
            action = {k: np.asarray(v, dtypes.get(k)) for k, v in action.items()}
        return self._unify(self.env.step(action))

    def _unify(self, obs: Obs) -> Obs:
        dtypes = self._dtypes
        if _have_dtypes(obs, dtypes):
            return obs
        return {
            key: _cast(value, dtypes[key]) if key in dtypes else value
            for key, value in obs.items()
        }


def _have_dtypes(values: Mapping[str, Any], dtypes: Mapping[str, np.dtype]) -> bool:
    """A quick yes where nothing needs a cast."""
    for key, value in values.items():
        if getattr(value, "dtype", None) is not dtypes.get(key):
            return False
    return True


def _unified(space: Space) -> Space:
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


def _cast(value: Any, dtype: np.dtype) -> Any:
    """An array of the dtype, except where a cast would hide a mistake."""
    if getattr(value, "dtype", None) == dtype:
        return value
    array = np.asarray(value)
    kind = array.dtype.kind
    same = kind == dtype.kind or (kind in "iu" and dtype == np.int32)
    return (
        array.astype(dtype) if same or (kind in "iu" and dtype.kind == "f") else array
    )


class CheckSpaces(Wrapper):
    """Refuses observations and actions that break the promises of the spaces."""

    def __init__(self, env: Env, name: str):
        super().__init__(env)
        self.name = name
        self._obs_space = dict(env.obs_space)
        self._act_space = dict(env.act_space)
        self._lacking = [key for key in FLAGS if key not in self._obs_space]
        self._looks = {k: _look_at(s) for k, s in self._obs_space.items()}
        self._act_looks = {k: _look_at(s) for k, s in self._act_space.items()}

    def reset(self, seed: int | None = None) -> Obs:
        return self._check_obs(self.env.reset(seed))

    def step(self, action: Action) -> Obs:
        if not _look_good(action, self._act_looks):
            action = self._check_action(action)
        return self._check_obs(self.env.step(action))

    def _check_action(self, action: Action) -> Action:
        checked = {}
        for key, space in self._act_space.items():
            if key not in action:
                raise UserError(
                    f"Task {self.name!r} needs the action {key!r}, got "
                    f"{sorted(action)}.\n  Fix: give every action of its act_space."
                )
            value = np.asarray(action[key])
            if value.dtype.kind == space.dtype.kind:
                value = value.astype(space.dtype, copy=False)
            if problem := space.problem(value):
                raise UserError(
                    f"Task {self.name!r}: action {key!r} {problem}.\n"
                    "  Fix: keep to its act_space."
                )
            checked[key] = value
        return checked

    def _check_obs(self, obs: Obs) -> Obs:
        if _look_good(obs, self._looks) and not self._lacking:
            return obs
        if self._lacking:
            lacking = ", ".join(self._lacking)
            raise UserError(
                f"Task {self.name!r} lacks {lacking} in its obs_space.\n"
                f"  Fix: run `reverie check-env {self.name}`, it says what to change."
            )
        if obs.keys() != self._obs_space.keys():
            missing = sorted(self._obs_space.keys() - obs.keys())
            extra = sorted(obs.keys() - self._obs_space.keys())
            raise UserError(
                f"Task {self.name!r} returned an observation whose keys differ from its"
                f" obs_space (missing {missing}, extra {extra}).\n  Fix: run `reverie "
                f"check-env {self.name}`, it says what to change."
            )
        for key, space in self._obs_space.items():
            if problem := space.problem(obs[key]):
                raise UserError(
                    f"Task {self.name!r}: observation {key!r} {problem}.\n  Fix: run "
                    f"`reverie check-env {self.name}`, it says what to change."
                )
        return obs


class Look(NamedTuple):
    """A first look at a value; one that fails it is looked at closely."""

    dtype: np.dtype
    shape: tuple[int, ...]
    bounds: tuple[Any, Any] | None
    """Of a single number, inclusive."""
    fails: Callable[[Any], object] | None
    """What else may be wrong with an array."""


def _look_at(space: Space) -> Look:
    dtype, shape, is_float = space.dtype, space.shape, space.dtype.kind == "f"
    if shape == () and dtype.kind != "b":
        bounds = (space.low.item(), space.high.item() - (not is_float))
        return Look(dtype, shape, bounds, None)
    if not _is_unbounded(space):
        return Look(dtype, shape, None, space.problem)
    return Look(dtype, shape, None, _has_nan if is_float else None)


def _has_nan(value: np.ndarray) -> bool:
    return bool(np.isnan(value).any())


def _look_good(values: Mapping[str, Any], looks: Mapping[str, Look]) -> bool:
    """A quick yes for the usual cases."""
    if len(values) != len(looks):
        return False
    for key, (dtype, shape, bounds, fails) in looks.items():
        value: Any = values.get(key)
        if getattr(value, "dtype", None) is not dtype or value.shape != shape:
            return False
        if bounds is not None and not bounds[0] <= value <= bounds[1]:  # or NaN
            return False
        if fails is not None and fails(value):
            return False
    return True


def _is_unbounded(space: Space) -> bool:
    """Whether every value of the dtype is allowed, so that bounds need no look."""
    if space.dtype.kind == "f":
        return bool(np.isneginf(space.low).all() and np.isposinf(space.high).all())
    if space.dtype.kind == "b":
        return True
    info = np.iinfo(space.dtype)
    return bool((space.low <= info.min).all() and (space.high > info.max).all())
