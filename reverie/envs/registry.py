"""Environments: the suite table, and `make`, which builds any task by its name.

A task is `suite_name` (`atari_pong`, `pinpad_three`), a bare built-in (`catch`), any
Gymnasium id (`gym_CartPole-v1`) or any factory (`my_package.my_module:make_env`, found
from the current folder). A suite's package is imported when one of its tasks is made,
not before. A new suite is one file here, one row in the table and one extra.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reverie.api import Env, UserError
from reverie.envs import wrappers
from reverie.envs.adapters.custom import (
    PYTHON_ENV,
    as_env,
    from_factory,
    from_gymnasium,
    refuse_wrong_spaces,
)
from reverie.envs.seeding import derive_seed
from reverie.envs.suite import Suite, nearest
from reverie.envs.suites.atari import GAMES, AtariConfig, is_installed_game
from reverie.envs.suites.bsuite import EXPERIMENTS, BSuiteConfig, is_experiment
from reverie.envs.suites.catch import CatchConfig
from reverie.envs.suites.craftax import NAMES as CRAFTAX_NAMES
from reverie.envs.suites.craftax import CraftaxConfig
from reverie.envs.suites.crafter import CrafterConfig
from reverie.envs.suites.dmc import TASKS as DMC_TASKS
from reverie.envs.suites.dmc import DMCConfig
from reverie.envs.suites.dmlab import LEVELS, DMLabConfig, is_level
from reverie.envs.suites.dummy import DummyConfig
from reverie.envs.suites.loconav import TASKS as LOCONAV_TASKS
from reverie.envs.suites.loconav import LocoNavConfig
from reverie.envs.suites.loconav import is_task as is_loconav
from reverie.envs.suites.memory import MemoryConfig
from reverie.envs.suites.metaworld import TASKS as METAWORLD_TASKS
from reverie.envs.suites.metaworld import MetaWorldConfig
from reverie.envs.suites.minecraft import TASKS as MINECRAFT_TASKS
from reverie.envs.suites.minecraft import MinecraftConfig
from reverie.envs.suites.minigrid import TASKS as MINIGRID_TASKS
from reverie.envs.suites.minigrid import MiniGridConfig, is_task
from reverie.envs.suites.mujoco import TASKS as MUJOCO_TASKS
from reverie.envs.suites.mujoco import MuJoCoConfig
from reverie.envs.suites.pinpad import PinPadConfig
from reverie.envs.suites.procgen import GAMES as PROCGEN_GAMES
from reverie.envs.suites.procgen import ProcgenConfig
from reverie.envs.suites.reach import ReachConfig
from reverie.envs.suites.robosuite import TASKS as ROBOSUITE_TASKS
from reverie.envs.suites.robosuite import RobosuiteConfig
from reverie.envs.vector.env_slot import EnvFailure, summary
from reverie.envs.vector.vec_env import IndexOffset, VecEnvConfig, make_vec_env
from reverie.envs.wrappers import Resample

__all__ = [
    "PYTHON_ENV",
    "SUITES",
    "EnvConfig",
    "EnvFailure",
    "IndexOffset",
    "Suite",
    "TaskFactory",
    "VecEnvConfig",
    "action_repeat",
    "describe_suites",
    "from_gymnasium",
    "make",
    "make_vec_env",
    "split_task",
    "task_names",
]


@dataclass(frozen=True)
class EnvConfig:
    repeat: int = 1
    """Take each action so many times (beside what a suite repeats by itself)."""
    length: int = 0
    """Cut episodes after so many agent steps; 0 leaves them alone."""
    clip_reward: float = 0.0
    """Keep rewards within plus and minus this; 0 leaves them alone."""
    resize: tuple[int, int] = (0, 0)
    """Bring every image to this height and width; 0 0 leaves them alone."""
    resample: Resample = "bilinear"
    """How `resize` computes pixels."""
    vector: VecEnvConfig = field(default_factory=VecEnvConfig)
    atari: AtariConfig = field(default_factory=AtariConfig)
    crafter: CrafterConfig = field(default_factory=CrafterConfig)
    dmc: DMCConfig = field(default_factory=DMCConfig)
    loconav: LocoNavConfig = field(default_factory=LocoNavConfig)
    mujoco: MuJoCoConfig = field(default_factory=MuJoCoConfig)
    metaworld: MetaWorldConfig = field(default_factory=MetaWorldConfig)
    robosuite: RobosuiteConfig = field(default_factory=RobosuiteConfig)
    dmlab: DMLabConfig = field(default_factory=DMLabConfig)
    minecraft: MinecraftConfig = field(default_factory=MinecraftConfig)
    procgen: ProcgenConfig = field(default_factory=ProcgenConfig)
    bsuite: BSuiteConfig = field(default_factory=BSuiteConfig)
    minigrid: MiniGridConfig = field(default_factory=MiniGridConfig)
    craftax: CraftaxConfig = field(default_factory=CraftaxConfig)
    catch: CatchConfig = field(default_factory=CatchConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    pinpad: PinPadConfig = field(default_factory=PinPadConfig)
    dummy: DummyConfig = field(default_factory=DummyConfig)
    reach: ReachConfig = field(default_factory=ReachConfig)

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.length < 0 or self.clip_reward < 0:
            raise ValueError(
                "env needs repeat >= 1, length >= 0 and clip_reward >= 0, got "
                f"repeat={self.repeat}, length={self.length}, "
                f"clip_reward={self.clip_reward}"
            )


def _adapter(suite: str, maker: str) -> Callable[[str, EnvConfig], Env]:
    """Builds tasks with a class, or a function, in the file of a suite."""

    def build(name: str, config: EnvConfig) -> Env:
        module = importlib.import_module(f"reverie.envs.suites.{suite}")
        env: Env = getattr(module, maker)(name, getattr(config, suite))
        return env

    return build


def _atari(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.atari import Atari

    return Atari(name, config.atari)


def _crafter(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.crafter import Crafter

    return Crafter(name, config.crafter)


def _dmc(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.dmc import DMC

    return DMC(name, config.dmc)


def _memorymaze(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.memorymaze import MemoryMaze

    return MemoryMaze(name)


def _mujoco(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.mujoco import MuJoCo

    return MuJoCo(name, config.mujoco)


def _metaworld(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.metaworld import MetaWorld

    return MetaWorld(name, config.metaworld)


def _robosuite(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.robosuite import Robosuite

    return Robosuite(name, config.robosuite)


def _loconav(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.loconav import LocoNav

    return LocoNav(name, config.loconav)


def _catch(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.catch import Catch

    return Catch(config.catch)


def _memory(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.memory import Memory

    return Memory(config.memory)


def _pinpad(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.pinpad import PinPad

    return PinPad(name, config.pinpad)


def _reach(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.reach import Reach

    return Reach(config.reach)


def _dummy(name: str, config: EnvConfig) -> Env:
    from reverie.envs.suites.dummy import Dummy

    return Dummy(name, config.dummy)


def _gym(name: str, config: EnvConfig) -> Env:
    from reverie.envs.adapters.gymnasium import make_gym

    return make_gym(name)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "catch",
            "a ball falls, a paddle catches it: pixels, solved in minutes on a CPU",
            "MIT",
            tasks=("",),
            build=_catch,
        ),
        Suite(
            "memory",
            "a cue is shown once and asked for later",
            "MIT",
            tasks=("",),
            build=_memory,
        ),
        Suite(
            "pinpad",
            "press three to six pads in an order nobody tells you",
            "MIT",
            tasks=("three", "four", "five", "six"),
            build=_pinpad,
        ),
        Suite(
            "reach",
            "move a hand to a mark that only the image shows, with an expert to copy",
            "MIT",
            tasks=("",),
            build=_reach,
        ),
        Suite(
            "dummy",
            "every kind of observation and action, to try code on",
            "MIT",
            tasks=("disc", "cont"),
            build=_dummy,
        ),
        Suite(
            "gym",
            "any environment registered with Gymnasium",
            "MIT",
            naming="gym_ID, such as gym_CartPole-v1",
            build=_gym,
        ),
        Suite(
            "atari",
            "Atari 2600 games",
            "GPL-2.0",
            tasks=GAMES,
            more=is_installed_game,
            build=_atari,
            package="ale_py",
        ),
        Suite(
            "atari100k",
            "Atari 2600 games within 400 thousand frames",
            "GPL-2.0",
            tasks=GAMES,
            more=is_installed_game,
            build=_atari,
            package="ale_py",
            extra="atari",
        ),
        Suite(
            "crafter",
            "open-world survival with 22 achievements",
            "MIT",
            tasks=("reward", "noreward"),
            build=_crafter,
            package="crafter",
        ),
        Suite(
            "dmc",
            "DeepMind Control: continuous control from state or pixels",
            "Apache-2.0",
            tasks=DMC_TASKS,
            naming="dmc_DOMAIN_TASK, such as dmc_walker_walk",
            build=_dmc,
            package="dm_control",
            newest_python=(3, 12),
        ),
        Suite(
            "dmlab",
            "DeepMind Lab: first-person mazes and memory",
            "GPL-2.0",
            tasks=LEVELS,
            more=is_level,
            naming="dmlab_LEVEL, such as dmlab_explore_goal_locations_small",
            build=_adapter("dmlab", "DMLab"),
            package="deepmind_lab",
            script="tools/install_dmlab.sh",
            note="It is not on the package index: a script of ours builds it.",
        ),
        Suite(
            "minecraft",
            "Minecraft: find a diamond",
            "MIT",
            tasks=MINECRAFT_TASKS,
            build=_adapter("minecraft", "Minecraft"),
            package="minerl",
            script="tools/install_minecraft.sh",
            newest_python=(3, 11),
            note="It needs Java 8, and old build tools that a script of ours brings.",
        ),
        Suite(
            "procgen",
            "ProcGen: 16 procedurally generated games",
            "MIT",
            tasks=PROCGEN_GAMES,
            build=_adapter("procgen", "Procgen"),
            package="procgen",
            newest_python=(3, 12),
        ),
        Suite(
            "bsuite",
            "bsuite: small experiments that probe one ability each",
            "Apache-2.0",
            tasks=EXPERIMENTS,
            more=is_experiment,
            naming="bsuite_EXPERIMENT/NUMBER, such as bsuite_catch/0",
            build=_adapter("bsuite", "make_bsuite"),
            package="bsuite",
        ),
        Suite(
            "loconav",
            "long-horizon locomotion mazes",
            "Apache-2.0",
            tasks=LOCONAV_TASKS,
            more=is_loconav,
            naming="loconav_BODY_MAZE, such as loconav_ant_maze_m",
            build=_loconav,
            package="dm_control",
            newest_python=(3, 12),
        ),
        Suite(
            "memorymaze",
            "Memory Maze: find coloured balls again",
            "MIT",
            tasks=("9x9", "11x11", "13x13", "15x15"),
            build=_memorymaze,
            package="memory_maze",
            newest_python=(3, 12),
        ),
        Suite(
            "minigrid",
            "MiniGrid: small grid worlds",
            "Apache-2.0",
            tasks=MINIGRID_TASKS,
            more=is_task,
            naming="minigrid_TASK, such as minigrid_Empty-5x5",
            build=_adapter("minigrid", "MiniGrid"),
            package="minigrid",
        ),
        Suite(
            "mujoco",
            "Gymnasium's MuJoCo locomotion tasks",
            "MIT",
            tasks=MUJOCO_TASKS,
            naming="mujoco_ID, such as mujoco_HalfCheetah-v5",
            build=_mujoco,
            package="mujoco",
        ),
        Suite(
            "metaworld",
            "Meta-World: 50 manipulation tasks",
            "MIT",
            tasks=METAWORLD_TASKS,
            naming="metaworld_TASK, such as metaworld_reach-v3",
            build=_metaworld,
            package="metaworld",
            newest_python=(3, 13),
        ),
        Suite(
            "robosuite",
            "robosuite: robot arm manipulation",
            "MIT",
            tasks=ROBOSUITE_TASKS,
            naming="robosuite_TASK, such as robosuite_Lift",
            build=_robosuite,
            package="robosuite",
            newest_python=(3, 13),
        ),
        Suite(
            "craftax",
            "Craftax: Crafter and NetHack ideas, written in JAX",
            "MIT",
            tasks=tuple(CRAFTAX_NAMES),
            build=_adapter("craftax", "Craftax"),
            package="craftax",
        ),
    )
}
"""Every suite by name, whether or not it is installed."""


def make(
    task: str | Callable[..., Any] | Any,
    config: EnvConfig | None = None,
    seed: int = 0,
    index: int = 0,
) -> Env:
    """Build a task, wrapped so that any agent can live in it.

    Actions are continuous in [-1, 1] or integers, floats are float32, integers int32,
    and every observation is held against its space. Besides a name, `task` may be a
    Gymnasium or Reverie environment, or a function that returns one.
    """
    config = config or EnvConfig()
    if isinstance(task, str):
        suite, name = split_task(task)
        env = from_factory(name) if suite == "" else _from_suite(task, name, config)
    else:
        env = as_env(task() if callable(task) else task, str(task))
        task = type(env).__name__
    return _wrap(env, task, config, derive_seed(seed, index))


@dataclass(frozen=True)
class TaskFactory:
    """Builds the environments of a task for a pool; it lives here, so that a worker
    that receives it need not import the learner."""

    task: str | Callable[..., Any] | Any
    config: EnvConfig
    seed: int

    def __call__(self, index: int) -> Env:
        return make(self.task, self.config, self.seed, index)


def split_task(task: str) -> tuple[str, str]:
    """The suite and the name within it; the suite of a factory is empty.

    Raises `UserError` with the nearest valid names where there is no such task.
    """
    prefix, _, name = task.partition("_")
    if ":" in task and not _is_gym_id(task):
        module, _, function = task.partition(":")
        if not module or not function:
            raise UserError(
                f"Task {task!r} is neither a task of a suite nor a factory.\n"
                "  Fix: name a factory as package.module:function."
            )
        return "", task
    suite = SUITES.get(prefix)
    if suite is None:
        raise UserError(
            f"Unknown task {task!r}.{nearest(task, [*task_names(), *SUITES])}\n"
            f"  Fix: pick a task of the suites {', '.join(sorted(SUITES))}, a "
            "Gymnasium id as gym_ID, or your own as package.module:function."
        )
    if not name and suite.naming:
        raise UserError(
            f"Task {task!r} is not complete.\n  Fix: name it {suite.naming}."
        )
    if suite.tasks and name not in suite.tasks and not suite.has_more(name):
        known = [_full_name(suite, each) for each in suite.tasks]
        raise UserError(
            f"Suite {prefix!r} has no task {name!r}.{nearest(task, known)}\n"
            f"  Fix: pick one of {', '.join(known[:8])}{', ...' * (len(known) > 8)}"
        )
    return prefix, name


def action_repeat(task: str, config: EnvConfig) -> int:
    """Simulator frames per agent step."""
    suite = split_task(task)[0]
    own = getattr(config, "atari" if suite == "atari100k" else suite or "vector", None)
    return config.repeat * int(getattr(own, "repeat", 1))


def task_names() -> list[str]:
    """Every task that has a name of its own, over all suites."""
    return [
        _full_name(suite, name) for suite in SUITES.values() for name in suite.tasks
    ]


def describe_suites(name: str = "") -> str:
    """All suites, or one with every task, for a terminal."""
    if name and name not in SUITES:
        raise UserError(
            f"There is no suite {name!r}.{nearest(name, SUITES)}\n"
            f"  Fix: pick one of {', '.join(sorted(SUITES))}."
        )
    if name:
        return SUITES[name].describe(every_task=True)
    lines = [suite.describe() for suite in SUITES.values()]
    lines.append(
        "Your own: --task package.module:function, see docs/add-an-environment.md.\n"
        "`reverie envs SUITE` lists every task of one."
    )
    return "\n".join(lines)


def _from_suite(task: str, name: str, config: EnvConfig) -> Env:
    suite = SUITES[task.partition("_")[0]]
    extra = f" {suite.note}" if suite.note else ""
    if suite.build is None:
        raise UserError(
            f"Task {task!r}: the {suite.name} suite has no adapter yet "
            f"({suite.install} gets its packages).{extra}\n"
            "  Fix: wrap the simulator in a gymnasium.Env and train on "
            "--task package.module:function."
        )
    if not suite.is_installed:
        lacks, fix = suite.missing
        raise UserError(f"Task {task!r} {lacks}\n  Fix: {fix}")
    try:
        return suite.build(name, config)
    except (ImportError, AttributeError) as error:  # versions that do not fit
        if not suite.package:
            raise
        raise UserError(
            f"The simulator of task {task!r} cannot be used: {summary(error)}\n"
            f"  Fix: {suite.install}, in a virtual environment of its own: packages of "
            "other suites may be in the way."
        ) from error


def _wrap(env: Env, task: str, config: EnvConfig, seed: int) -> Env:
    refuse_wrong_spaces(env, task)
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
    return wrappers.SeedFirst(env, seed)


def _is_gym_id(task: str) -> bool:
    """Whether `gym_package:Name-v0` means an id, not a module called `gym_package`."""
    if not task.startswith("gym_"):
        return False
    module = task.partition(":")[0].partition(".")[0]
    return not (Path(f"{module}.py").exists() or Path(module).is_dir())


def _full_name(suite: Suite, name: str) -> str:
    return f"{suite.name}_{name}" if name else suite.name
