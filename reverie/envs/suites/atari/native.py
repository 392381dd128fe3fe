"""Atari with vectorized C++ implementations, as `reverie.api.VecEnv`.

`--env.vector.native ale` uses the vectorized environment of `ale-py`, `envpool` that of
the package `envpool`. Both step all games in parallel threads, several times faster
than one emulator after the other. Their image resizing and grayscale conversion differ
slightly from `Atari`, and a resumed run starts new episodes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from reverie.api import Action, Obs, StateDict, UserError
from reverie.envs.flags import flag_spaces
from reverie.envs.seeding import derive_seed
from reverie.envs.suites.atari import AtariConfig, find_game
from reverie.envs.vector.base import BaseVecEnv
from reverie.envs.vector.vec_env import VecEnvConfig
from reverie.spaces import Space

ACTIONS = {"all": True, "minimal": False}


class StepResult(NamedTuple):
    """Result of a step, one entry per game, in the order of the games."""

    image: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Backend(Protocol):
    """Games that step together; a step after the end of an episode resets the game."""

    actions: int

    def reset(self, seeds: Sequence[int]) -> np.ndarray: ...

    def send(self, action: np.ndarray) -> None: ...

    def recv(self) -> StepResult: ...

    def close(self) -> None: ...


def make_native(
    name: str, config: Any, count: int, vector: VecEnvConfig, seed: int
) -> NativeVecEnv:
    """Build `count` copies of the game `name`; `config` is an `EnvConfig`."""
    if config.repeat > 1 or config.length or any(config.resize) or config.clip_reward:
        raise UserError(
            "Wrappers cannot be applied to a native vectorized environment.\n"
            "  Fix: use the settings --env.atari.* instead of --env.repeat, length, "
            "resize and clip_reward, or remove --env.vector.native."
        )
    if config.atari.lives == "discount":
        raise UserError(
            "A native vectorized environment does not report lost lives.\n"
            "  Fix: --env.atari.lives unused, or remove --env.vector.native."
        )
    if config.atari.min_noops or config.atari.resize_first:
        raise UserError(
            "A native vectorized environment does not support min_noops and "
            "resize_first.\n  Fix: --env.atari.min_noops 0 --env.atari.resize_first "
            "False, or remove --env.vector.native."
        )
    backends: dict[str, Any] = {"ale": AleBackend, "envpool": EnvPoolBackend}
    if vector.native == "envpool" and importlib.util.find_spec("envpool") is None:
        raise UserError(
            "The package 'envpool' is not installed.\n  Fix: pip install envpool, or "
            "--env.vector.native ale."
        )
    backend = backends[vector.native](name, config.atari, count)
    return NativeVecEnv(backend, config.atari, count, seed)


class NativeVecEnv(BaseVecEnv):
    """Presents a backend as a vectorized environment."""

    def __init__(self, backend: Backend, config: AtariConfig, count: int, seed: int):
        super().__init__(count)
        self._backend = backend
        self._config = config
        self._seed = seed
        self._attempt = 0
        self._last = np.zeros(count, bool)
        self._obs: Obs | None = None
        shape = (*config.size, 1 if config.gray else 3)
        self.obs_space = {"image": Space(np.uint8, shape), **flag_spaces()}
        self.act_space = {"action": Space(np.int32, (), 0, backend.actions)}

    def reset(self) -> Obs:
        seeds = [derive_seed(self._seed, self._attempt, i) for i in range(len(self))]
        image = self._backend.reset(seeds)
        zeros = np.zeros(len(self), bool)
        return self._finish(StepResult(image, zeros, zeros, zeros), ~zeros)

    def send(self, action: Action) -> None:
        assert self._obs is not None, "call reset first"
        self._backend.send(np.asarray(action["action"], np.int32))

    def recv(self) -> Obs:
        return self._finish(self._backend.recv(), self._last)

    def close(self) -> None:
        self._backend.close()

    def state_dict(self) -> StateDict:
        assert self._obs is not None, "call reset first"
        slot = {"attempt": self._attempt, "failures": 0, "env": None}
        return self._make_state([dict(slot) for _ in range(len(self))], self._obs)

    def load_state_dict(self, state: StateDict) -> Obs:
        """Start new episodes, with seeds that were not used before."""
        self._saved_obs(state)  # checks the number of environments
        self._attempt = int(state["envs"][0]["attempt"]) + 1
        return self.reset()

    def _finish(self, result: StepResult, first: np.ndarray) -> Obs:
        last = (result.terminated | result.truncated) & ~first
        is_terminal = result.terminated
        if self._config.truncation_is_terminal:
            is_terminal = last
        reward = result.reward.astype(np.float32) * ~first
        self._last = last
        self._obs = {
            "image": result.image,
            "reward": reward,
            "is_first": first.copy(),
            "is_last": last.copy(),
            "is_terminal": is_terminal & last,
        }
        return dict(self._obs)


class AleBackend:
    """Vectorized environment of `ale-py`."""

    def __init__(self, name: str, config: AtariConfig, count: int):
        from ale_py import ALEInterface, AtariVectorEnv, LoggerMode

        ALEInterface.setLoggerMode(LoggerMode.Error)
        height, width = config.size
        self._envs = AtariVectorEnv(
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
        space: Any = self._envs.single_action_space
        self.actions = int(space.n)
        self._shape = (count, height, width, 1 if config.gray else 3)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        image, _ = self._envs.reset(seed=np.array(seeds))
        return np.array(image).reshape(self._shape)

    def send(self, action: np.ndarray) -> None:
        self._envs.send(action)

    def recv(self) -> StepResult:
        image, reward, terminated, truncated, info = self._envs.recv()
        images = np.asarray(image).reshape(self._shape)
        return _in_order(info, images, reward, terminated, truncated)

    def close(self) -> None:
        self._envs.close()


class EnvPoolBackend:
    """Vectorized environment of `envpool`; a reset with seeds builds it again."""

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
        self._envs: Any = self._make([0] * count)
        space: Any = self._envs.action_space
        self.actions = int(space.n)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        self._envs.close()
        self._envs = self._make(seeds)
        image, _ = self._envs.reset()
        return np.ascontiguousarray(np.moveaxis(np.asarray(image), 1, -1))

    def send(self, action: np.ndarray) -> None:
        self._envs.send(action)

    def recv(self) -> StepResult:
        image, reward, terminated, truncated, info = self._envs.recv()
        images = np.moveaxis(np.asarray(image), 1, -1)
        return _in_order(info, images, reward, terminated, truncated)

    def close(self) -> None:
        self._envs.close()

    def _make(self, seeds: Sequence[int]) -> Any:
        import envpool

        return envpool.make(
            self._task, env_type="gymnasium", env_seed=list(seeds), **self._options
        )


def _in_order(
    info: Any, image: np.ndarray, reward: Any, terminated: Any, truncated: Any
) -> StepResult:
    """Sort results, which arrive in the order in which games finish, by game."""
    order = np.argsort(info["env_id"])
    return StepResult(
        np.ascontiguousarray(image[order]),
        np.asarray(reward)[order],
        np.asarray(terminated, bool)[order],
        np.asarray(truncated, bool)[order],
    )
