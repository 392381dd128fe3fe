"""Any Gymnasium environment (and the older gym API) as a Reverie environment.

Nested Dict and Tuple spaces become flat keys joined by `/`. An observation that is not
a Dict is called `image` or `vector`, an action that is not a Dict is called `action`.
Discrete spaces keep their `start`. `terminated` becomes `is_terminal`, `truncated` only
`is_last`; an `info["is_terminal"]` overrides both.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from reverie.api import Action, Env, Obs, UserError
from reverie.envs.seeding import SEED_RANGE
from reverie.spaces import RESERVED, Space, Spaces


def make_gym(name: str) -> Env:
    """The environment with a Gymnasium id, such as `CartPole-v1`."""
    import gymnasium

    try:
        env = gymnasium.make(name)
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError(
            f"Task 'gym_{name}' needs a package that is not installed: {error}\n"
            "  Fix: install what it names, with pip."
        ) from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        import difflib

        known = [str(key) for key in gymnasium.registry]
        close = difflib.get_close_matches(name, known, 3)
        hint = f" Did you mean {' or '.join('gym_' + c for c in close)}?" * bool(close)
        raise UserError(
            f"Gymnasium cannot make {name!r}: {error}{hint}\n"
            "  Fix: give an id that `gymnasium.make` takes, such as gym_CartPole-v1."
        ) from error
    return GymnasiumEnv(env)


class GymnasiumEnv:
    """Wears a Gymnasium environment as a Reverie one."""

    def __init__(self, env: Any):
        self.gym = env
        self._obs_tree = _flatten(env.observation_space, "observation")
        self._act_tree = _flatten(env.action_space, "action")
        single = _name_of(next(iter(self._obs_tree.values())))
        self._obs_names = {path: "/".join(path) or single for path in self._obs_tree}
        self._act_names = {path: "/".join(path) or "action" for path in self._act_tree}
        _refuse_taken(self._obs_names.values())
        _refuse_taken(self._act_names.values())
        self._takes_seed = "seed" in inspect.signature(env.reset).parameters

    @property
    def obs_space(self) -> Spaces:
        spaces = {self._obs_names[p]: _space(s) for p, s in self._obs_tree.items()}
        flag = Space(np.dtype(bool))
        return {
            **spaces,
            "reward": Space(np.dtype(np.float32)),
            "is_first": flag,
            "is_last": flag,
            "is_terminal": flag,
        }

    @property
    def act_space(self) -> Spaces:
        return {self._act_names[p]: _space(s) for p, s in self._act_tree.items()}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            seed = seed % SEED_RANGE
        if self._takes_seed:
            result = self.gym.reset(seed=seed)
        else:
            if seed is not None and hasattr(self.gym, "seed"):
                self.gym.seed(seed)
            result = self.gym.reset()
        is_pair = (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], Mapping)
        )
        return self._obs(result[0] if is_pair else result, 0.0, first=True)

    def step(self, action: Action) -> Obs:
        flat = {p: action[name] for p, name in self._act_names.items()}
        result = self.gym.step(_assemble(self.gym.action_space, flat))
        if len(result) == 5:
            obs, reward, terminated, truncated, info = result
        else:  # the API before Gymnasium, where a time limit is told by `info`
            obs, reward, done, info = result
            truncated = bool(info.get("TimeLimit.truncated", False))
            terminated = done and not truncated
        terminal = bool(info.get("is_terminal", terminated))
        last = bool(terminated or truncated or terminal)
        return self._obs(obs, reward, last=last, terminal=terminal)

    def close(self) -> None:
        self.gym.close()

    def _obs(
        self,
        obs: Any,
        reward: Any,
        first: bool = False,
        last: bool = False,
        terminal: bool = False,
    ) -> Obs:
        values = {
            name: _value(_walk(obs, path), self._obs_tree[path])
            for path, name in self._obs_names.items()
        }
        return {
            **values,
            "reward": np.float32(reward),
            "is_first": np.bool_(first),
            "is_last": np.bool_(last),
            "is_terminal": np.bool_(terminal),
        }


def _flatten(space: Any, what: str, path: tuple[str, ...] = ()) -> dict[Any, Any]:
    """The leaves of a space by their path; only kinds we know."""
    kind = type(space).__name__
    if kind == "Dict":
        parts = space.spaces.items()
    elif kind == "Tuple":
        parts = ((str(i), part) for i, part in enumerate(space.spaces))
    elif kind in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        return {path: space}
    else:
        raise UserError(
            f"The {what} space {'/'.join(path) or 'itself'} is a {kind}, which no "
            "agent understands.\n  Fix: offer Box, Discrete, MultiDiscrete, "
            "MultiBinary, or a Dict or Tuple of them."
        )
    leaves: dict[Any, Any] = {}
    for key, part in parts:
        leaves.update(_flatten(part, what, (*path, str(key))))
    if not leaves and not path:
        raise UserError(f"The {what} space is empty.\n  Fix: give it at least one key.")
    return leaves


def _space(space: Any) -> Space:
    kind = type(space).__name__
    int32 = np.dtype(np.int32)
    if kind == "Discrete":
        first = int(getattr(space, "start", 0))
        return Space(int32, (), first, first + int(space.n))
    if kind == "MultiDiscrete":
        start = np.asarray(getattr(space, "start", 0))
        return Space(int32, space.nvec.shape, start, start + space.nvec)
    if kind == "MultiBinary":
        return Space(int32, space.shape, 0, 2)
    dtype, shape = np.dtype(space.dtype), tuple(space.shape)
    if dtype == np.uint8 and len(shape) == 2:
        return Space(dtype, (*shape, 1))
    if dtype == np.uint8 and len(shape) == 3:
        return Space(dtype, shape)
    if dtype.kind in "iu":  # Gymnasium's integer bounds include the highest value
        high = np.minimum(space.high.astype(np.float64), 2.0**62).astype(np.int64) + 1
        return Space(dtype, shape, space.low.astype(np.int64), high)
    if dtype.kind == "b":
        return Space(dtype, shape)
    return Space(dtype, shape, space.low, space.high)


def _value(value: Any, space: Any) -> np.ndarray:
    kind = type(space).__name__
    if kind != "Box":
        return np.asarray(value, np.int32)
    array = np.array(value)  # a copy: many environments reuse theirs
    if array.dtype != space.dtype and array.dtype.kind == np.dtype(space.dtype).kind:
        array = array.astype(space.dtype)
    is_gray = space.dtype == np.uint8 and len(space.shape) == 2
    return array[..., None] if is_gray else array


def _name_of(space: Any) -> str:
    is_image = type(space).__name__ == "Box" and space.dtype == np.uint8
    return "image" if is_image and len(space.shape) in (2, 3) else "vector"


def _walk(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value[int(key)] if isinstance(value, tuple | list) else value[key]
    return value


def _assemble(space: Any, flat: dict[Any, Any], path: tuple[str, ...] = ()) -> Any:
    """Flat actions back in the shape the environment wants."""
    kind = type(space).__name__
    if kind == "Dict":
        return {
            key: _assemble(part, flat, (*path, str(key)))
            for key, part in space.spaces.items()
        }
    if kind == "Tuple":
        parts = enumerate(space.spaces)
        return tuple(_assemble(part, flat, (*path, str(i))) for i, part in parts)
    value = flat[path]
    if kind == "Discrete":
        return int(value)
    return np.asarray(value, space.dtype).reshape(space.shape)


def _refuse_taken(names: Any) -> None:
    taken = sorted(set(names) & set(RESERVED))
    if taken:
        raise UserError(
            f"The space has the keys {taken}, which mean something else here.\n"
            "  Fix: rename them."
        )
