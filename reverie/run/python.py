"""The Python interface: `reverie.train` and `reverie.load`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import Action, Agent, Env, Obs, UserError
from reverie.envs import PYTHON_ENV, TaskFactory
from reverie.run import train as train_loop
from reverie.run.config import Config, resolve, with_flags
from reverie.run.folder import read_config, resolve_logdir
from reverie.run.load import open_run
from reverie.spaces import FLAGS, Space, Spaces, agent_obs_space


def train(
    env: Env | Callable[..., Any] | Any = None,
    configs: str | Sequence[str] = (),
    **settings: Any,
) -> Path:
    """Train an agent and return its run folder; a run in an existing folder is resumed.

    `env` is a Reverie or Gymnasium environment, or a function or class that makes one;
    without it, give a `task`. `configs` are names of preset blocks. Settings have their
    dotted names with `__` for the dot: `run__steps=10_000`, `logdir="..."`.
    """
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    configs = configs.split() if isinstance(configs, str) else configs
    if env is not None and "task" in flags:
        raise UserError(
            f"Both an env and the task {flags['task']!r} are given.\n"
            "  Fix: remove one of them."
        )
    if env is None:
        return train_loop.train(_config(configs, flags))
    # a task without a suite, so that no preset block of a suite is applied
    flags = {"task": PYTHON_ENV, **flags}
    if not callable(env) and int(flags.setdefault("run.envs", 1)) != 1:
        raise UserError(
            "A single environment object cannot be used as several environments.\n"
            "  Fix: pass a function that makes an environment, or run__envs=1."
        )
    config = _config(configs, flags)
    return train_loop.train(config, TaskFactory(env, config.env, config.seed))


def _config(configs: Sequence[str], flags: dict[str, Any]) -> Config:
    """Return the config of a new run; without blocks, also that of a run to resume."""
    logdir = resolve_logdir(str(flags["logdir"])) if "logdir" in flags else None
    if logdir is None or not (logdir / "ckpt").exists():
        return resolve(configs, flags=flags)
    saved = read_config(logdir)
    if configs:
        return resolve(configs, flags=flags, saved=saved)
    return with_flags(saved, list(flags.items()))


def load(logdir: str | Path, device: str | None = None) -> Player:
    """Load the agent of a run from its newest checkpoint, to act in an environment.

    `device` is `cuda`, `cpu` or `mps`; None for that of the run.
    """
    run = open_run(Path(logdir), [] if device is None else [("device", device)])
    spaces = run.spaces()
    if not set(FLAGS) <= set(spaces.obs_space):
        raise UserError(
            f"The agent of {logdir} was trained on sequences and cannot act.\n"
            f"  Fix: `reverie eval {logdir}` or `reverie draw boundaries {logdir}`"
        )
    return Player(run.load_policy(spaces), spaces.obs_space, spaces.act_space)


class Player:
    """A trained agent that acts in one environment and keeps its recurrent state."""

    def __init__(self, agent: Agent, obs_space: Spaces, act_space: Spaces):
        self.agent = agent
        self.obs_space = obs_space
        self.act_space = act_space
        self.reset()

    def reset(self) -> None:
        """Start a new episode with the next observation."""
        self._carry = self.agent.initial(1)
        self._is_first = True

    def act(self, obs: Any, **flags: Any) -> Any:
        """Return the action for one observation.

        `obs` is a dict of arrays by key, or an array if there is only one key. With
        `is_first` in it or among `flags`, a new episode starts. Returns a dict of
        arrays by key, or an array if there is only one, in the units of the
        environment: what its `step` takes.
        """
        row = self._row(obs, flags)
        batch = {key: value[None] for key, value in row.items()}
        self._carry, action, _ = self.agent.policy(self._carry, batch, mode="eval")
        self._is_first = bool(row["is_last"])
        native: Action = {}
        for key, space in self.act_space.items():
            value = action[key][0]
            if space.dtype.kind == "f":
                value = space.to_native(np.clip(value, space.low, space.high))
            native[key] = value
        return native["action"] if set(native) == {"action"} else native

    def _row(self, obs: Any, flags: dict[str, Any]) -> Obs:
        inputs = agent_obs_space(self.obs_space)
        if not isinstance(obs, dict):
            if len(inputs) != 1:
                raise UserError(
                    f"This agent needs {', '.join(inputs)}, but got a single array.\n"
                    "  Fix: pass a dict with these keys to act()."
                )
            obs = {next(iter(inputs)): obs}
        row = {**obs, **flags}
        row.setdefault("is_first", self._is_first)
        missing = [key for key in inputs if key not in row]
        if missing:
            raise UserError(
                f"The observation has no {', '.join(missing)}.\n"
                f"  Fix: pass a dict with the keys {', '.join(inputs)} to act()."
            )
        keys = {**inputs, **{key: self.obs_space[key] for key in FLAGS}}
        return {
            key: _to_array(key, row.get(key, 0), space) for key, space in keys.items()
        }


def _to_array(key: str, value: Any, space: Space) -> np.ndarray:
    array = np.asarray(value).astype(space.dtype)
    if array.shape != space.shape:
        raise UserError(
            f"The observation {key!r} has shape {array.shape}, expected {space.shape}."
            "\n  Fix: pass it in that shape."
        )
    return array
