"""Reverie from Python: train on an environment object, act with a trained agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import Action, Agent, Env, Obs, UserError
from reverie.envs import PYTHON_ENV, TaskFactory
from reverie.evaluation.episodes import load_agent
from reverie.run import checkpoint
from reverie.run import train as train_loop
from reverie.run.config import Config, resolve, with_flags
from reverie.run.folder import read_config, resolve_logdir, run_folder_of
from reverie.spaces import FLAGS, Space, Spaces, agent_obs_space
from reverie.storage.run_spaces import read_spaces


def train(
    env: Env | Callable[..., Any] | Any = None,
    configs: str | Sequence[str] = (),
    **settings: Any,
) -> Path:
    """Train an agent and return its run folder; the same folder resumes.

    `env` is an environment (ours or Gymnasium's), or a function or class that makes
    one; without it, `task` says what to learn. `configs` are names of blocks. Settings
    go by their dotted names with `__` for the dot: `run__steps=10_000`, `logdir="..."`.
    """
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    configs = configs.split() if isinstance(configs, str) else configs
    if env is not None and "task" in flags:
        raise UserError(
            f"Both an env and the task {flags['task']!r} are given to learn.\n"
            "  Fix: leave out one of them."
        )
    if env is None:
        return train_loop.train(_config(configs, flags))
    # No suite knows this environment, so no suite's settings come along with it.
    flags = {"task": PYTHON_ENV, **flags}
    if not callable(env) and int(flags.setdefault("run.envs", 1)) != 1:
        raise UserError(
            "One environment object cannot be stepped as several.\n"
            "  Fix: pass a function that makes one, or run__envs=1."
        )
    config = _config(configs, flags)
    return train_loop.train(config, TaskFactory(env, config.env, config.seed))


def _config(configs: Sequence[str], flags: dict[str, Any]) -> Config:
    """The config of a run; without blocks, a folder goes on with its own settings."""
    home = resolve_logdir(str(flags["logdir"])) if "logdir" in flags else None
    if home is None or configs or not (home / "ckpt").exists():
        return resolve(configs, flags=flags)
    return with_flags(read_config(home), list(flags.items()))


def load(logdir: str | Path, device: str | None = None) -> Player:
    """The agent of a run, ready to act, from its newest checkpoint.

    `device` is where it thinks; by itself where it was trained.
    """
    path = checkpoint.find_checkpoint(Path(logdir))
    home = run_folder_of(path)
    spaces = read_spaces(home)
    if not set(FLAGS) <= set(spaces.obs_space):
        raise UserError(
            f"The agent of {logdir} has only watched and cannot act.\n"
            f"  Fix: `reverie eval {logdir}` or `reverie draw boundaries {logdir}`"
        )
    flags = [] if device is None else [("device", device)]
    agent = load_agent(with_flags(read_config(home), flags), path, spaces)
    return Player(agent, spaces.obs_space, spaces.act_space)


class Player:
    """A trained agent in one environment; it remembers the episode so far."""

    def __init__(self, agent: Agent, obs_space: Spaces, act_space: Spaces):
        self.agent = agent
        self.obs_space = obs_space
        self.act_space = act_space
        self.reset()

    def reset(self) -> None:
        """Forget the episode so far; a new one begins with the next observation."""
        self._memory = self.agent.initial(1)
        self._is_first = True

    def act(self, obs: Any, **flags: Any) -> Any:
        """The action for one observation.

        `obs` is a dict of arrays by key, or the array itself where there is only one
        key; an `is_first` in it (or given by name) begins a new episode. Returns a dict
        of arrays by key, or the array itself where there is only one, in the units and
        bounds of the environment itself: what its `step` takes.
        """
        row = self._row(obs, flags)
        batch = {key: value[None] for key, value in row.items()}
        self._memory, action, _ = self.agent.policy(self._memory, batch, mode="eval")
        self._is_first = bool(row["is_last"])
        single: Action = {
            key: _to_native(value[0], self.act_space[key])
            for key, value in action.items()
        }
        return single["action"] if set(single) == {"action"} else single

    def _row(self, obs: Any, flags: dict[str, Any]) -> Obs:
        seen = agent_obs_space(self.obs_space)
        if not isinstance(obs, dict):
            if len(seen) != 1:
                raise UserError(
                    f"This agent sees {', '.join(seen)}, but one array came.\n"
                    "  Fix: pass a dict with these keys to act()."
                )
            obs = {next(iter(seen)): obs}
        given = {**obs, **flags}
        given.setdefault("is_first", self._is_first)
        missing = [key for key in seen if key not in given]
        if missing:
            raise UserError(
                f"The observation lacks {', '.join(missing)}.\n"
                f"  Fix: pass a dict with the keys {', '.join(seen)} to act()."
            )
        keys = {**seen, **{key: self.obs_space[key] for key in FLAGS}}
        return {key: _fit(key, given.get(key, 0), space) for key, space in keys.items()}


def _to_native(value: Any, space: Space) -> Any:
    """As the environment in training got it: clipped, then stretched."""
    if space.dtype.kind != "f":
        return value
    return space.to_native(np.clip(value, space.low, space.high))


def _fit(key: str, value: Any, space: Space) -> np.ndarray:
    array = np.asarray(value).astype(space.dtype)
    if array.shape != space.shape:
        raise UserError(
            f"The observation {key!r} has shape {array.shape}, but the agent was "
            f"trained with {space.shape}.\n  Fix: pass it in that shape."
        )
    return array
