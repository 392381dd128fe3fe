"""Environments. `make` builds any task by its name; `registry.py` lists the suites."""

from reverie.envs.adapters.custom import FROM_PYTHON, from_gymnasium
from reverie.envs.registry import (
    SUITES,
    EnvConfig,
    TaskFactory,
    action_repeat,
    make,
    split_task,
    table,
    task_names,
)
from reverie.envs.suite import Suite
from reverie.envs.vector.pool import PoolConfig, Shifted, make_pool
from reverie.envs.vector.slot import EnvFailure

__all__ = [
    "FROM_PYTHON",
    "SUITES",
    "EnvConfig",
    "EnvFailure",
    "PoolConfig",
    "Shifted",
    "Suite",
    "TaskFactory",
    "action_repeat",
    "from_gymnasium",
    "make",
    "make_pool",
    "split_task",
    "table",
    "task_names",
]
