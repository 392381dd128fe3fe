"""Build `reverie.api.Env` from import paths and from objects that users pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from reverie.api import Env, UserError
from reverie.plugins import import_object
from reverie.spaces import RESERVED, STEP_KEYS, Space

PYTHON_ENV = "python:env"
"""Task name of a run whose environment was passed as a Python object."""


def make_from_path(task: str) -> Env:
    """Call the function at the import path `package.module:function`."""
    make_env = import_task(task)
    return as_env(make_env() if callable(make_env) else make_env, task)


def import_task(task: str) -> Any:
    """Import the function at the import path `package.module:function`."""
    if task == PYTHON_ENV:
        raise UserError(
            "This run was trained on an environment that was passed as a Python "
            "object, so it cannot be built from the task name.\n  Fix: add --task "
            "package.module:function, the import path of a function that makes it. In "
            "Python: reverie.evaluate(logdir, env=...) or reverie.train(env=...)."
        )
    return import_object(task, "--task")


def as_env(env: Any, task: str) -> Env:
    """Return a Reverie or Gymnasium environment as a Reverie environment."""
    if hasattr(env, "num_envs") and hasattr(env, "reset"):
        raise UserError(
            f"Task {task!r} is a {type(env).__name__}, a vector environment of several "
            "environments.\n  Fix: return a single environment, such as "
            "gymnasium.make(ID); --run.envs N (run__envs=N in Python) steps N of them."
        )
    if hasattr(env, "observation_space") and hasattr(env, "action_space"):
        return from_gymnasium(env)
    required = ("obs_space", "act_space", "reset", "step", "close")
    if missing := [name for name in required if not hasattr(env, name)]:
        raise UserError(
            f"Task {task!r} returned a {type(env).__name__}, which is neither a "
            f"Gymnasium nor a Reverie environment (it lacks {', '.join(missing)}).\n"
            "  Fix: return a gymnasium.Env, or see docs/add-an-environment.md."
        )
    return cast(Env, env)


def from_gymnasium(env: Any, make_rendered: Callable[[], Any] | None = None) -> Env:
    """Adapt a `gymnasium.Env` object to the Reverie interface.

    `make_rendered` makes the same environment with `render_mode="rgb_array"`.
    """
    from reverie.envs.adapters.gymnasium import GymnasiumEnv

    return GymnasiumEnv(env, make_rendered)


def check_spaces(env: Env, task: str) -> None:
    """Raise `UserError` if the spaces have a wrong type or use reserved names."""
    for name in ("obs_space", "act_space"):
        spaces = getattr(env, name)
        if not isinstance(spaces, dict) or not spaces:
            raise UserError(
                f"Task {task!r}: its {name} is not a dict with at least one entry.\n"
                "  Fix: return {name: reverie.spaces.Space(dtype, shape, low, high)}."
            )
        for key, space in spaces.items():
            if not isinstance(space, Space):
                raise UserError(
                    f"Task {task!r}: {name}[{key!r}] is a {type(space).__name__}, not "
                    "a reverie.spaces.Space.\n  Fix: use Space(dtype, shape, low, "
                    "high), or return a gymnasium.Env, whose spaces are converted."
                )
            if 0 in space.shape:
                raise UserError(
                    f"Task {task!r}: {name}[{key!r}] has the shape {space.shape}, "
                    "which has no elements.\n  Fix: remove it from the space."
                )
            is_float = space.dtype.kind == "f"
            valid = space.low <= space.high if is_float else space.low < space.high
            if not valid.all():
                index = tuple(np.argwhere(~valid)[0].tolist())
                low, high = space.low[index], space.high[index]
                raise UserError(
                    f"Task {task!r}: {name}[{key!r}] allows no values: it has bounds "
                    f"from {low} to {high}.\n  Fix: set a lower bound below the "
                    "upper bound (Discrete(n) needs n of 1 or more)."
                )
    obs_keys, act_keys = {*env.obs_space} - {*STEP_KEYS}, {*env.act_space}
    if names := obs_keys & act_keys | (obs_keys | act_keys) & {*RESERVED}:
        raise UserError(
            f"Task {task!r}: the keys {', '.join(sorted(names))} are reserved, or both "
            "an observation and an action.\n  Fix: rename them."
        )
