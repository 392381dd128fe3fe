"""Task registry: find all suites and build any task by name.

A task is `SUITE_NAME` (`atari_pong`, `pinpad_three`), the name of a suite with a single
task (`catch`), any Gymnasium id (`gym_CartPole-v1`), or the import path of a function
that returns an environment (`my_package.my_module:make_env`; modules in the current
directory are found).

Suites are the modules of `reverie/envs/suites/`, each of which declares a `SUITE` (or
several `SUITES`). Adding a module there adds its tasks and its flags `--env.NAME.*`.
Simulators are imported when a task is built, not when the suites are found.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reverie.api import Env, UserError, VecEnv
from reverie.envs import suites, wrappers
from reverie.envs.adapters.custom import (
    as_env,
    check_spaces,
    import_task,
    make_from_path,
)
from reverie.envs.seeding import derive_seed
from reverie.envs.suite import Suite, suggest
from reverie.envs.suites.gym import gym_tasks
from reverie.envs.vector.vec_env import VecEnvConfig
from reverie.envs.wrappers import Resample
from reverie.plugins import summarize_error

T = TypeVar("T")


def _find_suites() -> Iterator[Suite]:
    """Import all modules in `suites/` and yield their suites."""
    for module_info in pkgutil.iter_modules(suites.__path__):
        module: Any = importlib.import_module(f"{suites.__name__}.{module_info.name}")
        yield from getattr(module, "SUITES", None) or (module.SUITE,)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in sorted(_find_suites(), key=lambda suite: bool(suite.package))
}
"""All suites by name, installed or not; the built-in ones first."""


def _add_suite_configs(cls: type[T]) -> type[T]:
    """Add one field per suite config, before `dataclass` reads the annotations."""
    for suite in SUITES.values():
        if suite.config is not None:
            name = suite.config_name or suite.name
            cls.__annotations__[name] = suite.config
            setattr(cls, name, field(default_factory=suite.config))
    return cls


@dataclass(frozen=True)
@_add_suite_configs
class EnvConfig:
    """Environment settings; each suite with a config adds a field with its name."""

    repeat: int = 1
    """Number of times each action is repeated, in addition to the suite's own action
    repeat."""
    length: int = 0
    """Time limit of episodes in agent steps (truncation); 0 disables it."""
    clip_reward: float = 0.0
    """Clip rewards to plus and minus this value; 0 disables it."""
    resize: tuple[int, int] = (0, 0)
    """Height and width that all images are resized to; 0 0 disables it."""
    resample: Resample = "bilinear"
    """Interpolation used by `resize`."""
    render: bool = False
    """Render environments without image observations, for videos (`log/image`). It is
    set by `reverie eval --videos`."""
    vector: VecEnvConfig = field(default_factory=VecEnvConfig)
    """Settings of vectorized environments."""

    if TYPE_CHECKING:  # the fields of the suites

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.length < 0 or self.clip_reward < 0:
            raise ValueError(
                "env needs repeat >= 1, length >= 0 and clip_reward >= 0, got "
                f"repeat={self.repeat}, length={self.length}, "
                f"clip_reward={self.clip_reward}"
            )


def make(
    task: str | Callable[..., Any] | Any,
    config: EnvConfig | None = None,
    seed: int = 0,
    index: int = 0,
) -> Env:
    """Build a task, with wrappers that give it a uniform interface.

    Continuous actions are scaled to [-1, 1], floats become float32 and integers int32,
    and every observation is checked against its space. Besides a name, `task` may be a
    Gymnasium or Reverie environment, or a function that returns one. Environments with
    different `index` get different seeds.
    """
    config = config or EnvConfig()
    if isinstance(task, str):
        suite, name = split_task(task)
        if suite:
            env = _make_suite_task(SUITES[suite], name, config)
        else:
            env = make_from_path(name)
    else:
        env = as_env(task() if callable(task) else task, str(task))
        task = type(env).__name__
    return _wrap(env, task, config, derive_seed(seed, index))


@dataclass(frozen=True)
class TaskFactory:
    """Picklable function that builds environment number `index` of a task.

    Defined in this module so that worker processes can unpickle it without importing
    torch.
    """

    task: str | Callable[..., Any] | Any
    config: EnvConfig
    seed: int

    def __call__(self, index: int) -> Env:
        return make(self.task, self.config, self.seed, index)

    def make_native(
        self, count: int, vector: VecEnvConfig, seed: int | None, first: int
    ) -> VecEnv:
        """Build the environments `first` to `first + count - 1` as a native `VecEnv`.

        Native means the vectorized implementation of the simulator itself.
        """
        suite, name = split_task(self.task) if isinstance(self.task, str) else ("", "")
        build = SUITES[suite].make_native if suite else None
        if build is None:
            raise UserError(
                f"Task {self.task!r} has no native vectorized environment; only "
                f"{', '.join(s.name for s in SUITES.values() if s.make_native)} have "
                "one.\n  Fix: remove --env.vector.native."
            )
        seed = derive_seed(self.seed if seed is None else seed, first)
        return build(name, self.config, count, vector, seed)


def split_task(task: str) -> tuple[str, str]:
    """Split a task into its suite and its name within the suite.

    For an import path the suite is empty. Raises `UserError` with the closest valid
    names if there is no such task.
    """
    if ":" in task and not _is_gym_id(task):
        module, _, function = task.partition(":")
        if not module or not function:
            raise UserError(
                f"Task {task!r} is neither a task of a suite nor an import path.\n"
                "  Fix: write an import path as package.module:function."
            )
        return "", task
    prefix = _find_prefix(task)
    if not prefix:
        raise _unknown_task(task)
    suite, name = SUITES[prefix], task[len(prefix) + 1 :]
    if not name and "" not in suite.tasks:
        name_format = suite.name_format or f"{prefix}_TASK, such as {suite.example}"
        raise UserError(
            f"Task {task!r} is not complete.\n  Fix: write it as {name_format}."
        )
    if not suite.has_task(name):
        names = [suite.full_name(each) for each in suite.tasks]
        # includes the tasks of dmc_subtle if the suite is dmc
        similar = [each for each in task_names() if each.startswith(f"{prefix}_")]
        raise UserError(
            f"Suite {prefix!r} has no task {name!r}.{suggest(task, similar)}\n"
            f"  Fix: choose one of {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
        )
    return prefix, name


def _find_prefix(task: str) -> str:
    """Return the longest name of a suite that a task starts with, empty if none."""
    names = [s for s in SUITES if task == s or task.startswith(f"{s}_")]
    return max(names, key=len, default="")


def add_gym_prefix(name: str) -> str:
    """Add the prefix `gym_` to a Gymnasium id; return other names unchanged."""
    is_gym_id = re.fullmatch(r"[\w./]+-v\d+", name) is not None
    return f"gym_{name}" if is_gym_id and name.partition("_")[0] not in SUITES else name


def _unknown_task(task: str) -> UserError:
    """Return an error with similar tasks, including those of Gymnasium."""
    names = gym_tasks()
    similar = suggest(task, [*names, *task_names(), *SUITES])
    if (full := add_gym_prefix(task)) != task and (full in names or not similar):
        return UserError(
            f"Task {task!r} has no suite; it looks like a Gymnasium id.\n"
            f"  Fix: --task {full}"
        )
    return UserError(
        f"Unknown task {task!r}.{similar}\n"
        f"  Fix: choose a task of the suites {', '.join(sorted(SUITES))}, a "
        "Gymnasium id as gym_ID, or an import path as package.module:function."
    )


def action_repeat(task: str, config: EnvConfig) -> int:
    """Return the number of simulator frames per agent step."""
    suite = SUITES.get(split_task(task)[0])
    own_config = suite.own_config(config) if suite else None
    return config.repeat * int(getattr(own_config, "repeat", 1))


def task_names() -> list[str]:
    """Return the full names of all listed tasks of all suites."""
    return [s.full_name(name) for s in SUITES.values() for name in s.tasks]


def benchmark_tasks(name: str) -> list[str]:
    """Return the benchmark tasks of the suite `name`, or `[name]` if it is a task."""
    suite = SUITES.get(name)
    if suite is None:
        split_task(name)  # raises an error if it does not exist
        return [name]
    if not suite.tasks:
        raise UserError(
            f"The tasks of the suite {name!r} cannot be listed.\n"
            f"  Fix: give single tasks, such as {suite.example}."
        )
    return [suite.full_name(task) for task in suite.benchmark or suite.tasks]


def check_installed(task: str) -> None:
    """Raise `UserError` if the simulator of a task is not installed."""
    name = split_task(task)[0]
    suite = SUITES.get(name)
    if suite is not None and not suite.is_installed:
        problem, command = suite.install_help
        raise UserError(f"Task {task!r} {problem}\n  Fix: {command}")


def check_available(task: str) -> None:
    """Raise `UserError` if a task cannot be built on this machine.

    The simulator of a suite must be installed. The module of an import path is
    imported, and must have the function.
    """
    if split_task(task)[0]:
        check_installed(task)
    else:
        import_task(task)


def describe_suites(name: str = "") -> str:
    """Format all suites, or one suite with all of its tasks, for a terminal."""
    if name and name not in SUITES:
        raise UserError(
            f"There is no suite {name!r}.{suggest(name, SUITES)}\n"
            f"  Fix: choose one of {', '.join(sorted(SUITES))}."
        )
    if name:
        return SUITES[name].describe(all_tasks=True)
    lines = [suite.describe() for suite in SUITES.values()]
    lines.append(
        "Your own: --task package.module:function, see docs/add-an-environment.md.\n"
        "`reverie envs SUITE` lists all tasks of a suite."
    )
    return "\n".join(lines)


def _make_suite_task(suite: Suite, name: str, config: EnvConfig) -> Env:
    """Build a task without wrappers; `UserError` if the simulator cannot be loaded."""
    task = suite.full_name(name)
    check_installed(task)
    try:
        return suite.make(name, suite.own_config(config))
    except (ImportError, AttributeError) as error:  # incompatible package versions
        if not suite.package:
            raise
        raise UserError(
            f"The simulator of task {task!r} failed to load: {summarize_error(error)}\n"
            f"  Fix: {suite.install_command}, in a separate virtual environment: "
            "packages of other suites may be incompatible."
        ) from error


def _wrap(env: Env, task: str, config: EnvConfig, seed: int) -> Env:
    """Add the wrappers of `EnvConfig`, then those that every environment has."""
    check_spaces(env, task)
    if config.render:
        env = wrappers.RenderImage(env, task)
    if config.repeat > 1:
        env = wrappers.ActionRepeat(env, config.repeat)
    if config.length:
        env = wrappers.TimeLimit(env, config.length)
    if any(config.resize):
        env = wrappers.ResizeImage(env, config.resize, config.resample)
    if config.clip_reward:
        env = wrappers.ClipReward(env, config.clip_reward)
    env = wrappers.NormalizeAction(env)
    env = wrappers.UnifyDtypes(env)
    env = wrappers.CheckSpaces(env, task)
    env = wrappers.ClipAction(env)
    return wrappers.SeedFirstReset(env, seed)


def _is_gym_id(task: str) -> bool:
    """True if a task with a colon is a Gymnasium id, not an import path.

    `gym_package:Name-v0` is the Gymnasium id `package:Name-v0` with the prefix `gym_`.
    It is an import path if the current directory has a module `gym_package`.
    """
    if not task.startswith("gym_"):
        return False
    module = task.partition(":")[0].partition(".")[0]
    return not (Path(f"{module}.py").exists() or Path(module).is_dir())
