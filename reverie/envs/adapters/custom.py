"""Environments people bring: a factory by its name, or an object from Python.

Whatever comes, a `gymnasium.Env` or one of ours, leaves here as a Reverie environment
whose spaces can be relied on, or with a sentence that says what to change.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, cast

from reverie.api import Env, UserError
from reverie.envs.suite import nearest
from reverie.spaces import FLAGS, RESERVED, Space

PYTHON_ENV = "python:env"
"""What the task of a run is called whose environment was passed in from Python."""


def from_factory(task: str) -> Env:
    if task == PYTHON_ENV:
        raise UserError(
            "This run was trained on an environment that was passed in from Python, "
            "which no name leads to.\n  Fix: resume it with reverie.train(env=...), or "
            "use reverie.load."
        )
    module_name, _, function = task.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise  # the module is there, something it needs is not
        raise UserError(
            f"Task {task!r}: there is no module {module_name!r} here or installed.\n"
            f"  Fix: run from the folder that holds {module_name.split('.')[0]}.py, or "
            "install its package."
        ) from error
    make_env = getattr(module, function, None)
    if make_env is None:
        names = [n for n in vars(module) if not n.startswith("_")]
        raise UserError(
            f"Task {task!r}: module {module_name!r} has no {function!r}."
            f"{nearest(function, names)}\n"
            "  Fix: name a function in it that makes an environment."
        )
    return as_env(make_env() if callable(make_env) else make_env, task)


def as_env(env: Any, task: str) -> Env:
    if hasattr(env, "observation_space") and hasattr(env, "action_space"):
        return from_gymnasium(env)
    wanted = ("obs_space", "act_space", "reset", "step", "close")
    if missing := [name for name in wanted if not hasattr(env, name)]:
        raise UserError(
            f"Task {task!r} gave a {type(env).__name__}, which is neither a Reverie "
            f"environment (it lacks {', '.join(missing)}) nor a Gymnasium one.\n"
            "  Fix: return a gymnasium.Env, or see docs/add-an-environment.md."
        )
    return cast(Env, env)


def from_gymnasium(env: Any) -> Env:
    """Wear a `gymnasium.Env` object as a Reverie environment."""
    from reverie.envs.adapters.gymnasium import GymnasiumEnv

    return GymnasiumEnv(env)


def refuse_wrong_spaces(env: Env, task: str) -> None:
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
                    "a reverie.spaces.Space.\n  Fix: Space(dtype, shape, low, high) or "
                    "return a gymnasium.Env, whose spaces are converted."
                )
    taken = {*RESERVED} - {*FLAGS} | env.act_space.keys()
    if twice := sorted(taken & env.obs_space.keys()):
        raise UserError(
            f"Task {task!r}: the observations {', '.join(twice)} have the name of an "
            "action or of something else in a row.\n  Fix: rename them."
        )
    if twice := sorted({*RESERVED} & env.act_space.keys()):
        raise UserError(
            f"Task {task!r}: the actions {', '.join(twice)} have the name of something "
            "else in a row.\n  Fix: rename them."
        )
