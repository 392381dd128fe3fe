"""Atari on a vector environment written in C++, behind the interface of a pool.

`--env.vector.native ale` takes the one of `ale-py`, `envpool` the package of
that name. Both step all games at once in threads of their own, several times faster
than one emulator after the other. They resize and gray images by their own rules, so
that pixels differ a little from the published ones, and a resumed run begins new
episodes.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from reverie.api import Action, Metrics, Obs, StateDict, UserError
from reverie.envs.flags import flag_spaces
from reverie.envs.seeding import derive_seed
from reverie.envs.suites.atari import AtariConfig, find_game
from reverie.envs.vector.batch import restart_metrics, saved_rows, vec_env_state
from reverie.envs.vector.vec_env import VecEnvConfig
from reverie.spaces import Space, Spaces

ACTIONS = {"all": True, "minimal": False}


class Outcome(NamedTuple):
    """What a step brought, one entry per game, in the order of the games."""

    image: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Backend(Protocol):
    """Games that step together; a step after the end of one begins it anew."""

    actions: int

    def reset(self, seeds: Sequence[int]) -> np.ndarray: ...

    def send(self, action: np.ndarray) -> None: ...

    def recv(self) -> Outcome: ...

    def close(self) -> None: ...


def make_native(
    task: str, config: Any, count: int, pool: VecEnvConfig, seed: int
) -> NativeVecEnv:
    """The games of a task; `config` has the settings of environments."""
    suite, _, name = task.partition("_")
    if not suite.startswith("atari"):
        raise UserError(
            f"Task {task!r} has no native vector environment; Atari has.\n"
            "  Fix: leave out --env.vector.native."
        )
    if config.repeat > 1 or config.length or any(config.resize) or config.clip_reward:
        raise UserError(
            "A native vector environment cannot be wrapped.\n"
            "  Fix: use the settings of --env.atari instead of --env.repeat, length, "
            "resize and clip_reward, or leave out --env.vector.native."
        )
    if config.atari.lives == "discount":
        raise UserError(
            "A native vector environment does not say when a life is lost.\n"
            "  Fix: --env.atari.lives unused, or leave out --env.vector.native."
        )
    if config.atari.min_noops or config.atari.resize_first:
        raise UserError(
            "A native vector environment knows no min_noops and no resize_first.\n"
            "  Fix: --env.atari.min_noops 0 --env.atari.resize_first False, or leave "
            "out --env.vector.native."
        )
    kinds: dict[str, Any] = {"ale": Ale, "envpool": EnvPool}
    if pool.native == "envpool" and importlib.util.find_spec("envpool") is None:
        raise UserError(
            "The package 'envpool' is not installed.\n  Fix: pip install envpool, or "
            "--env.vector.native ale."
        )
    backend = kinds[pool.native](name, config.atari, count)
    return NativeVecEnv(backend, config.atari, count, seed)


class NativeVecEnv:
    """Wears a vector environment as a pool."""

    def __init__(self, backend: Backend, config: AtariConfig, count: int, seed: int):
        self._games = backend
        self._config = config
        self._count = count
        self._seed = seed
        self._attempt = 0
        self._last = np.zeros(count, bool)
        self._obs: Obs | None = None
        shape = (*config.size, 1 if config.gray else 3)
        self.obs_space: Spaces = {
            "image": Space(np.dtype(np.uint8), shape),
            **flag_spaces(),
        }
        self.act_space: Spaces = {
            "action": Space(np.dtype(np.int32), (), 0, backend.actions)
        }

    def __len__(self) -> int:
        return self._count

    def reset(self) -> Obs:
        seeds = [derive_seed(self._seed, self._attempt, i) for i in range(len(self))]
        image = self._games.reset(seeds)
        none = np.zeros(self._count, bool)
        return self._keep(Outcome(image, none, none, none), ~none)

    def step(self, action: Action) -> Obs:
        self.send(action)
        return self.recv()

    def send(self, action: Action) -> None:
        assert self._obs is not None, "call reset first"
        self._games.send(np.asarray(action["action"], np.int32))

    def recv(self) -> Obs:
        return self._keep(self._games.recv(), self._last)

    def close(self) -> None:
        self._games.close()

    def metrics(self) -> Metrics:
        return restart_metrics(Counter())

    def state_dict(self) -> StateDict:
        assert self._obs is not None, "call reset first"
        slot = {"attempt": self._attempt, "failures": 0, "env": None}
        slots: list[StateDict] = [dict(slot) for _ in range(len(self))]
        return vec_env_state(slots, self._obs, self.obs_space)

    def load_state_dict(self, state: StateDict) -> Obs:
        """Begin new episodes, other ones than those before."""
        saved_rows(state, self.obs_space, len(self))
        self._attempt = int(state["envs"][0]["attempt"]) + 1
        return self.reset()

    def _keep(self, came: Outcome, first: np.ndarray) -> Obs:
        last = (came.terminated | came.truncated) & ~first
        ends = came.terminated
        if self._config.truncation_is_terminal:
            ends = last
        reward = came.reward.astype(np.float32) * ~first
        self._last = last
        self._obs = {
            "image": came.image,
            "reward": reward,
            "is_first": first.copy(),
            "is_last": last.copy(),
            "is_terminal": ends & last,
        }
        return dict(self._obs)


class Ale:
    """The vector environment of `ale-py`."""

    def __init__(self, name: str, config: AtariConfig, count: int):
        from ale_py import ALEInterface, AtariVectorEnv, LoggerMode

        ALEInterface.setLoggerMode(LoggerMode.Error)
        height, width = config.size
        self._games = AtariVectorEnv(
            find_game(name),
            count,
            max_num_frames_per_episode=config.length or 10**9,
            repeat_action_probability=config.sticky,
            full_action_space=ACTIONS[config.actions],
            img_height=height,
            img_width=width,
            grayscale=config.gray,
            stack_num=1,
            frameskip=config.repeat,
            maxpool=config.pooling > 1,
            noop_max=config.noops,
            episodic_life=config.lives == "reset",
            reward_clipping=config.clip_reward,
            use_fire_reset=config.autostart,
        )
        space: Any = self._games.single_action_space
        self.actions = int(space.n)
        self._shape = (count, height, width, 1 if config.gray else 3)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        image, _ = self._games.reset(seed=np.array(seeds))
        return np.array(image).reshape(self._shape)

    def send(self, action: np.ndarray) -> None:
        self._games.send(action)

    def recv(self) -> Outcome:
        image, reward, terminated, truncated, info = self._games.recv()
        order = np.argsort(info["env_id"])
        return Outcome(
            np.asarray(image)[order].reshape(self._shape),
            np.asarray(reward)[order],
            np.asarray(terminated, bool)[order],
            np.asarray(truncated, bool)[order],
        )

    def close(self) -> None:
        self._games.close()


class EnvPool:
    """The vector environment of `envpool`; its seeds are given when it is made."""

    def __init__(self, name: str, config: AtariConfig, count: int):
        self._task = "".join(map(str.title, find_game(name).split("_"))) + "-v5"
        height, width = config.size
        self._options = {
            "num_envs": count,
            "max_episode_steps": (config.length or 10**9) // config.repeat,
            "repeat_action_probability": config.sticky,
            "full_action_space": ACTIONS[config.actions],
            "img_height": height,
            "img_width": width,
            "gray_scale": config.gray,
            "stack_num": 1,
            "frame_skip": config.repeat,
            "noop_max": max(1, config.noops),
            "episodic_life": config.lives == "reset",
            "reward_clip": config.clip_reward,
            "use_fire_reset": config.autostart,
        }
        self._games: Any = self._make([0] * count)
        space: Any = self._games.action_space
        self.actions = int(space.n)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        self._games.close()
        self._games = self._make(seeds)
        image, _ = self._games.reset()
        return _channels_last(image)

    def send(self, action: np.ndarray) -> None:
        self._games.send(action)

    def recv(self) -> Outcome:
        image, reward, terminated, truncated, info = self._games.recv()
        order = np.argsort(info["env_id"])
        return Outcome(
            _channels_last(image[order]),
            np.asarray(reward)[order],
            np.asarray(terminated, bool)[order],
            np.asarray(truncated, bool)[order],
        )

    def close(self) -> None:
        self._games.close()

    def _make(self, seeds: Sequence[int]) -> Any:
        import envpool

        return envpool.make(
            self._task, env_type="gymnasium", env_seed=list(seeds), **self._options
        )


def _channels_last(image: Any) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(np.asarray(image), 1, -1))
