"""Environments: `make` builds a task by name, `make_vec_env` several copies of it."""

from reverie.envs.adapters.custom import PYTHON_ENV, from_gymnasium
from reverie.envs.registry import (
    SUITES,
    EnvConfig,
    TaskFactory,
    action_repeat,
    add_gym_prefix,
    benchmark_tasks,
    check_available,
    check_installed,
    describe_suites,
    make,
    split_task,
    task_names,
)
from reverie.envs.suite import Suite
from reverie.envs.vector.env_slot import EnvFailure
from reverie.envs.vector.vec_env import IndexOffset, VecEnvConfig, make_vec_env

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
    "add_gym_prefix",
    "benchmark_tasks",
    "check_available",
    "check_installed",
    "describe_suites",
    "from_gymnasium",
    "make",
    "make_vec_env",
    "split_task",
    "task_names",
]
