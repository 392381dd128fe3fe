"""The Python interface: `reverie.train`, `reverie.load` and `reverie.evaluate`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reverie.api import Env, UserError
from reverie.datasets.sequences import is_sequence_task
from reverie.distributed.launch import find_launch
from reverie.envs import PYTHON_ENV, TaskFactory
from reverie.evaluation import episodes as evaluation
from reverie.evaluation.result import EvalResult
from reverie.run import ranks
from reverie.run import train as train_loop
from reverie.run.config import Config, for_evaluation, import_paths, with_flags
from reverie.run.factory import MakeEnv
from reverie.run.folder import read_config, resolve_logdir
from reverie.run.load import is_foreign_checkpoint, open_run
from reverie.run.package import run_path
from reverie.run.player import Player
from reverie.run.signals import Interrupted, StoppedWithoutSaving
from reverie.run.trust import allow
from reverie.run.used_settings import (
    check_flags_used,
    resolve_for_command,
    unused_in_environment,
    with_used_flags,
)


def train(
    env: Env | Callable[..., Any] | Any = None,
    configs: str | Sequence[str] = (),
    trust: bool = False,
    **settings: Any,
) -> Path:
    """Train an agent and return its run folder; a run in an existing folder is resumed.

    Ctrl-C saves the run and raises `KeyboardInterrupt`.

    `env` is a Reverie or Gymnasium environment, or a function or class that makes one;
    without it, give a `task`. `configs` are names of presets. Settings have their
    dotted names with `__` for the dot: `run__steps=10_000`, `logdir="..."`. With
    `trust`, modules named in the config of the run to resume are imported even if the
    run is of another user or machine.
    """
    flags, presets = _flags(env, settings), _presets(configs)
    with allow(import_paths([flags]).values(), everything=trust):
        return _train(env, presets, flags)


def _train(env: Any, configs: Sequence[str], flags: dict[str, Any]) -> Path:
    """Same as `train`, with settings by dotted name and modules already allowed."""
    if env is None:
        return _run(_config(configs, flags))
    # this task has no suite, so no preset of a suite is applied
    flags = {"task": PYTHON_ENV, **flags}
    if not callable(env) and int(flags.get("actors.count", 0)):
        raise UserError(
            "A single environment object cannot be used by actors.\n"
            "  Fix: pass a function that makes an environment."
        )
    if not callable(env) and int(flags.setdefault("run.envs", 1)) != 1:
        raise UserError(
            "A single environment object cannot be used as several environments.\n"
            "  Fix: pass a function that makes an environment, or run__envs=1."
        )
    config = _config(configs, flags)
    return _run(config, TaskFactory(env, config.env, config.seed))


def _run(config: Config, make_env: MakeEnv | None = None) -> Path:
    """Train, or run the commands of rank 0 if this process has another rank."""
    launch = find_launch()
    if config.processes > 1 and launch.world_size == 1:
        raise UserError(
            "`reverie.train` cannot start other processes, and devices is "
            f"{config.processes}.\n  Fix: torchrun --nproc-per-node {config.processes} "
            "SCRIPT.py, without `devices`."
        )
    if launch.rank:
        ranks.run_follower(make_env)
        return resolve_logdir(config.logdir)
    try:
        return ranks.run_on_ranks(lambda: train_loop.train(config, make_env))
    except (Interrupted, StoppedWithoutSaving) as error:
        if error.exit_code == 128 + signal.SIGINT:  # Ctrl-C
            raise KeyboardInterrupt from error
        raise SystemExit(error.exit_code) from error


def _flags(env: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name; raise if both an env and a task are given."""
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    if env is not None and "task" in flags:
        raise UserError(
            f"Both an env and the task {flags['task']!r} are given.\n"
            "  Fix: remove one of them."
        )
    return flags


def _check_policy(logdir: str | Path, config: Config) -> None:
    """Raise if the agent was trained on sequences, so that it cannot act."""
    if config.agent_config.sequence_window is not None:
        raise UserError(
            f"The agent of {logdir} was trained on sequences and cannot act.\n"
            f"  Fix: `reverie eval {logdir}` or `reverie draw boundaries {logdir}`"
        )


def _presets(configs: str | Sequence[str]) -> list[str]:
    return configs.split() if isinstance(configs, str) else list(configs)


def _refuse_presets(logdir: str | Path, presets: list[str], imported: bool) -> None:
    """Raise if presets are given for a run of Reverie, which has a saved config."""
    if presets and not imported:
        raise UserError(
            f"{logdir} has its own settings, so presets are not used.\n"
            "  Fix: remove configs=; single settings can be changed."
        )


def _config(configs: Sequence[str], flags: dict[str, Any]) -> Config:
    """Return the config of a new run, or of the run in `logdir` to resume.

    Presets that are given for a run to resume must result in its saved settings.
    """
    logdir = resolve_logdir(str(flags["logdir"])) if "logdir" in flags else None
    if logdir is None or not (logdir / "ckpt").exists():
        return resolve_for_command("train", configs, flags=flags)
    saved = read_config(logdir)
    if configs:
        return resolve_for_command("train", configs, flags=flags, saved=saved)
    config = with_flags(saved, list(flags.items()))
    check_flags_used(config, "train", flags)
    return config


def evaluate(
    logdir: str | Path,
    env: Env | Callable[..., Any] | Any = None,
    episodes: int = 100,
    videos: int = 0,
    trust: bool = False,
    configs: str | Sequence[str] = (),
    **settings: Any,
) -> EvalResult:
    """Play episodes with the agent of a run, in the task of the run or in `env`.

    Returns what `reverie eval` writes to `eval.json`: `result.summary["score"]` is the
    mean score, `result.episodes` has every episode. With `videos`, that many episodes
    are recorded (`result.files`). `env`, `trust` and settings are those of `train`,
    `logdir` and `configs` are those of `load`.
    """
    flags, presets = _flags(env, settings), _presets(configs)
    with allow(import_paths([flags]).values(), everything=trust):
        return _evaluate(run_path(logdir), env, episodes, videos, presets, flags)


def _evaluate(
    logdir: Path,
    env: Any,
    episodes: int,
    videos: int,
    presets: list[str],
    flags: dict[str, Any],
) -> EvalResult:
    if episodes < 1:
        raise UserError(
            f"evaluate() got {episodes} episodes.\n  Fix: pass at least episodes=1."
        )
    imported = is_foreign_checkpoint(logdir, list(flags.items()))
    if imported and env is not None:  # the file does not contain a task
        flags["task"] = PYTHON_ENV
    _refuse_presets(logdir, presets, imported)
    given = list(flags.items()) if imported else ()
    replaces_task = env is not None or "task" in flags
    run = open_run(logdir, given, presets=presets, replaces_task=replaces_task)
    config = run.config
    task = str(flags.get("task", config.task))
    is_recorded = bool(config.offline.data) and "task" not in flags
    _check_policy(logdir, config)
    if env is None and (is_recorded or is_sequence_task(task)):
        raise UserError(
            f"{logdir} was trained on recorded data, not in an environment.\n"
            f"  Fix: pass env= or task= to evaluate(), or run `reverie eval {logdir}`."
        )
    if imported:
        check_flags_used(config, "eval", flags, unused_in_environment(config))
    else:
        unused = unused_in_environment(config)
        # raises if a flag is unknown or not used; the returned config is not needed
        with_used_flags(config, "eval", list(flags.items()), unused)
    make_env = None
    if env is not None:
        if not callable(env):
            flags["run.eval_envs"] = 1
        config = with_flags(for_evaluation(config), list(flags.items()))
        env_config = replace(config.env, render=config.env.render or videos > 0)
        make_env = TaskFactory(env, env_config, config.seed)
    pairs = list(flags.items())
    return evaluation.evaluate(
        logdir, episodes, pairs, make_env, videos=videos, presets=presets
    )


def load(
    logdir: str | Path,
    device: str | None = None,
    task: str | None = None,
    trust: bool = False,
    configs: str | Sequence[str] = (),
    **settings: Any,
) -> Player:
    """Load the agent of a run from its newest checkpoint, to act in an environment.

    `logdir` is a run folder, a checkpoint, a file of `reverie pack`, or a repository on
    the Hugging Face Hub: `hf://user/name` or `hf://user/name@revision`. `device` is
    `cuda`, `cpu` or `mps`; None for that of the run. With `trust`, modules named in the
    config of the run are imported even if the run is of another user or machine.

    `logdir` may also be a checkpoint of another implementation, a file or its run
    folder: `agent.pkl` of danijar/dreamerv3, `latest.pt` of dreamerv3-torch, or
    `last.pt` of Δ-IRIS. If no config was saved with it, give a `task`. Presets
    (`configs`) and settings, as in `train`, set what its tensors do not determine.
    """
    given = {**_flags(None, settings), "device": device, "task": task}
    flags = [(name, value) for name, value in given.items() if value is not None]
    presets, path = _presets(configs), run_path(logdir)
    with allow(import_paths([dict(flags)]).values(), everything=trust):
        _refuse_presets(logdir, presets, is_foreign_checkpoint(path, flags))
        run = open_run(path, flags, presets=presets)
    _check_policy(logdir, run.config)
    source = run.policy_source(run.spaces())
    # `adapt` converts actions and crops images, if the agent was trained with others
    return Player(source, source.adapt(run.load_agent(source.trained_spaces)))
