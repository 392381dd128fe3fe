"""Atari with vectorized C++ implementations, as `reverie.api.VecEnv`.

`--env.vector.native ale` uses the vectorized environment of `ale-py`, `envpool` that of
the package `envpool`. Both step all games in parallel threads, several times faster
than one emulator after the other. Their image resizing and grayscale conversion differ
slightly from `Atari`, and a resumed run starts new episodes.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from reverie.api import Action, Obs, StateDict, UserError
from reverie.envs.seeding import derive_seed
from reverie.envs.suites.atari import AtariConfig, find_game
from reverie.envs.vector.base import BaseVecEnv
from reverie.envs.vector.vec_env import VecEnvConfig
from reverie.spaces import Space, step_spaces


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
            "  Fix: set --env.atari.lives to `unused`, or remove --env.vector.native."
        )
    if config.atari.min_noops or config.atari.resize_first:
        raise UserError(
            "A native vectorized environment does not support min_noops and "
            "resize_first.\n  Fix: --env.atari.min_noops 0 --env.atari.resize_first "
            "False, or remove --env.vector.native."
        )
    if vector.native == "envpool" and importlib.util.find_spec("envpool") is None:
        raise UserError(
            "The package 'envpool' is not installed.\n  Fix: pip install envpool, or "
            "--env.vector.native ale."
        )
    implementations = {"ale": AleVecEnv, "envpool": EnvPoolVecEnv}
    return implementations[vector.native](name, config.atari, count, seed)


class NativeVecEnv(BaseVecEnv):
    """Games stepped together; the step after the end of an episode resets the game."""

    def __init__(self, name: str, config: AtariConfig, count: int, seed: int):
        super().__init__(count)
        self._config = config
        self._seed = seed
        # Number of resumes. It is part of the seeds, so that a resumed run does not
        # repeat the games of the run before.
        self._attempt = 0
        self._last = np.zeros(count, bool)  # `is_last` of the latest step
        self._obs: Obs | None = None
        image = Space(np.uint8, (*config.size, 1 if config.gray else 3))
        self.obs_space = {"image": image, **step_spaces()}
        self._options: dict[str, Any] = {
            "repeat_action_probability": config.sticky,
            "full_action_space": config.actions == "all",
            "img_height": config.size[0],
            "img_width": config.size[1],
            "stack_num": 1,
            "episodic_life": config.lives == "reset",
            "use_fire_reset": config.autostart,
        }
        self._envs, actions = self._open(find_game(name))
        self.act_space = {"action": Space(np.int32, (), 0, int(actions.n))}

    def _open(self, game: str) -> tuple[Any, Any]:
        """Return the vectorized environment of the package and its action space."""
        raise NotImplementedError

    def _start_games(self, seeds: list[int]) -> np.ndarray:
        """Start new games with these seeds and return their first images."""
        raise NotImplementedError

    def _channels_last(self, image: np.ndarray) -> np.ndarray:
        """Return images of the package with shape (count, height, width, channels)."""
        raise NotImplementedError

    def reset(self) -> Obs:
        seeds = [derive_seed(self._seed, self._attempt, i) for i in range(len(self))]
        zeros = np.zeros(len(self), bool)
        return self._make_obs(self._start_games(seeds), zeros, zeros, zeros, ~zeros)

    def send(self, action: Action) -> None:
        assert self._obs is not None, "call reset first"
        self._envs.send(np.asarray(action["action"], np.int32))

    def recv(self) -> Obs:
        *results, info = self._envs.recv()
        order = np.argsort(info["env_id"])  # results are in the order of completion
        image, reward, terminated, truncated = (np.asarray(x)[order] for x in results)
        flags = terminated.astype(bool), truncated.astype(bool)
        return self._make_obs(image, reward, *flags, self._last)

    def close(self) -> None:
        self._envs.close()

    def state_dict(self) -> StateDict:
        assert self._obs is not None, "call reset first"
        # one entry per game, with the keys of `EnvSlot.state_dict`
        slot = {"attempt": self._attempt, "failures": 0, "env": None}
        return self._make_state([dict(slot) for _ in range(len(self))], self._obs)

    def load_state_dict(self, state: StateDict) -> Obs:
        """Start new episodes, with seeds that were not used before."""
        self._saved_obs(state)  # checks the number of environments
        self._attempt = int(state["envs"][0]["attempt"]) + 1
        return self.reset()

    def _make_obs(
        self,
        image: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        first: np.ndarray,
    ) -> Obs:
        """Return the batch of observations; `first` marks the games that were reset."""
        self._last = last = (terminated | truncated) & ~first
        self._obs = {
            "image": np.ascontiguousarray(self._channels_last(image)),
            "reward": reward.astype(np.float32) * ~first,
            "is_first": first.copy(),
            "is_last": last.copy(),
            "is_terminal": last & (terminated | self._config.truncation_is_terminal),
        }
        return dict(self._obs)


class AleVecEnv(NativeVecEnv):
    """Vectorized environment of `ale-py`."""

    def _open(self, game: str) -> tuple[Any, Any]:
        from ale_py import ALEInterface, AtariVectorEnv, LoggerMode

        ALEInterface.setLoggerMode(LoggerMode.Error)
        config = self._config
        env = AtariVectorEnv(
            game,
            len(self),
            max_num_frames_per_episode=config.length or 10**9,
            grayscale=config.gray,
            frameskip=config.repeat,
            maxpool=config.pooling > 1,
            noop_max=config.noops,
            reward_clipping=config.clip_reward,
            **self._options,
        )
        return env, env.single_action_space

    def _start_games(self, seeds: list[int]) -> np.ndarray:
        return np.array(self._envs.reset(seed=np.array(seeds))[0])

    def _channels_last(self, image: np.ndarray) -> np.ndarray:
        return image.reshape(len(self), *self.obs_space["image"].shape)


class EnvPoolVecEnv(NativeVecEnv):
    """Vectorized environment of `envpool`; a reset with seeds builds it again."""

    def _open(self, game: str) -> tuple[Any, Any]:
        config = self._config
        self._task = "".join(map(str.title, game.split("_"))) + "-v5"
        self._options |= {
            "num_envs": len(self),
            "max_episode_steps": (config.length or 10**9) // config.repeat,
            "gray_scale": config.gray,
            "frame_skip": config.repeat,
            "noop_max": max(1, config.noops),
            "reward_clip": config.clip_reward,
        }
        env = self._build([0] * len(self))
        return env, env.action_space

    def _start_games(self, seeds: list[int]) -> np.ndarray:
        self._envs.close()
        self._envs = self._build(seeds)
        return np.asarray(self._envs.reset()[0])

    def _channels_last(self, image: np.ndarray) -> np.ndarray:
        return np.moveaxis(image, 1, -1)

    def _build(self, seeds: list[int]) -> Any:
        import envpool

        return envpool.make(
            self._task, env_type="gymnasium", env_seed=seeds, **self._options
        )
