"""The Python interface: `reverie.train`, `reverie.load` and `reverie.evaluate`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reverie.api import Env, UserError
from reverie.datasets.sequences import is_sequence_task
from reverie.envs import PYTHON_ENV, TaskFactory
from reverie.evaluation import episodes as play
from reverie.evaluation.result import EvalResult
from reverie.run import train as train_loop
from reverie.run.config import Config, for_evaluation, import_paths, with_flags
from reverie.run.factory import MakeEnv
from reverie.run.folder import read_config, resolve_logdir
from reverie.run.load import open_run
from reverie.run.player import Player
from reverie.run.signals import Interrupted
from reverie.run.trust import allow
from reverie.run.used_settings import check_used, resolve_for_command
from reverie.spaces import FLAGS


def train(
    env: Env | Callable[..., Any] | Any = None,
    configs: str | Sequence[str] = (),
    trust: bool = False,
    **settings: Any,
) -> Path:
    """Train an agent and return its run folder; a run in an existing folder is resumed.

    Ctrl-C saves the run and raises `KeyboardInterrupt`.

    `env` is a Reverie or Gymnasium environment, or a function or class that makes one;
    without it, give a `task`. `configs` are names of preset blocks. Settings have their
    dotted names with `__` for the dot: `run__steps=10_000`, `logdir="..."`. `trust`
    resumes a run of another user or machine whose config names modules to import.
    """
    flags = _flags(env, settings)
    configs = configs.split() if isinstance(configs, str) else configs
    with allow(import_paths([flags]).values(), everything=trust):
        return _train(env, configs, flags)


def _train(env: Any, configs: Sequence[str], flags: dict[str, Any]) -> Path:
    if env is None:
        return _run(_config(configs, flags))
    # a task without a suite, so that no preset block of a suite is applied
    flags = {"task": PYTHON_ENV, **flags}
    if not callable(env) and int(flags.setdefault("run.envs", 1)) != 1:
        raise UserError(
            "A single environment object cannot be used as several environments.\n"
            "  Fix: pass a function that makes an environment, or run__envs=1."
        )
    config = _config(configs, flags)
    return _run(config, TaskFactory(env, config.env, config.seed))


def _run(config: Config, make_env: MakeEnv | None = None) -> Path:
    try:
        return train_loop.train(config, make_env)
    except Interrupted as error:
        if error.exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt from error
        raise SystemExit(error.exit_code) from error


def _flags(env: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name; raise if they name a task next to an env."""
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    if env is not None and "task" in flags:
        raise UserError(
            f"Both an env and the task {flags['task']!r} are given.\n"
            "  Fix: remove one of them."
        )
    return flags


def _config(configs: Sequence[str], flags: dict[str, Any]) -> Config:
    """Return the config of a new run; without blocks, also that of a run to resume."""
    logdir = resolve_logdir(str(flags["logdir"])) if "logdir" in flags else None
    if logdir is None or not (logdir / "ckpt").exists():
        return resolve_for_command("train", configs, flags=flags)
    saved = read_config(logdir)
    if configs:
        return resolve_for_command("train", configs, flags=flags, saved=saved)
    config = with_flags(saved, list(flags.items()))
    check_used(config, "train", flags)
    return config


def evaluate(
    logdir: str | Path,
    env: Env | Callable[..., Any] | Any = None,
    episodes: int = 100,
    videos: int = 0,
    trust: bool = False,
    **settings: Any,
) -> EvalResult:
    """Play episodes with the agent of a run, in the task of the run or in `env`.

    Returns what `reverie eval` writes to `eval.json`: `result.summary["score"]` is the
    mean score, `result.episodes` has every episode. With `videos`, that many episodes
    are recorded (`result.files`). `env`, `trust` and settings are those of `train`.
    """
    flags = _flags(env, settings)
    with allow(import_paths([flags]).values(), everything=trust):
        return _evaluate(Path(logdir), env, episodes, videos, flags)


def _evaluate(
    logdir: Path, env: Any, episodes: int, videos: int, flags: dict[str, Any]
) -> EvalResult:
    is_file = logdir.expanduser().is_file()
    if env is not None and is_file:  # which does not contain a task
        flags["task"] = PYTHON_ENV
    replaces_task = env is not None or "task" in flags
    config = open_run(
        logdir, list(flags.items()) if is_file else (), replaces_task=replaces_task
    ).config
    task = str(flags.get("task", config.task))
    is_recorded = bool(config.offline.data) and "task" not in flags
    if env is None and (is_recorded or is_sequence_task(task)):
        raise UserError(
            f"{logdir} was trained on recorded data, not in an environment.\n"
            f"  Fix: pass env= or task= to evaluate(), or run `reverie eval {logdir}`."
        )
    make_env = None
    if env is not None:
        if not callable(env):
            flags["run.eval_envs"] = 1
        config = with_flags(for_evaluation(config), list(flags.items()))
        env_config = replace(config.env, render=config.env.render or videos > 0)
        make_env = TaskFactory(env, env_config, config.seed)
    return play.evaluate(logdir, episodes, list(flags.items()), make_env, videos=videos)


def load(
    logdir: str | Path,
    device: str | None = None,
    task: str | None = None,
    trust: bool = False,
) -> Player:
    """Load the agent of a run from its newest checkpoint, to act in an environment.

    `device` is `cuda`, `cpu` or `mps`; None for that of the run. `task` is needed for a
    `latest.pt` of dreamerv3-torch, which does not contain it. `trust` loads a run of
    another user or machine whose config names modules to import.
    """
    given = {"device": device, "task": task}
    flags = [(name, value) for name, value in given.items() if value is not None]
    with allow(import_paths([dict(flags)]).values(), everything=trust):
        run = open_run(Path(logdir), flags)
    spaces = run.spaces()
    if not set(FLAGS) <= set(spaces.obs_space):
        raise UserError(
            f"The agent of {logdir} was trained on sequences and cannot act.\n"
            f"  Fix: `reverie eval {logdir}` or `reverie draw boundaries {logdir}`"
        )
    source = run.policy_source(spaces)
    return Player(source, source.adapt(run.load_agent(source.trained)))
