"""bsuite: small experiments that probe one ability each, such as memory or exploration.

A task is `experiment/number`; the number picks the difficulty, the seed or the noise of
the sweep, and without one it is 0. The three `mnist` experiments download their data
when they are made. bsuite scores what its own files record: set `env.bsuite.results`
to a folder and it writes them there (with one environment, and not across a resume).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Env, UserError
from reverie.envs.adapters.dm_env import DmEnv

_NAMES = """
bandit bandit_noise bandit_scale cartpole cartpole_noise cartpole_scale cartpole_swingup
catch catch_noise catch_scale deep_sea deep_sea_stochastic discounting_chain memory_len
memory_size mnist mnist_noise mnist_scale mountain_car mountain_car_noise
mountain_car_scale umbrella_distract umbrella_length
"""
EXPERIMENTS: tuple[str, ...] = tuple(_NAMES.split())


@dataclass(frozen=True)
class BSuiteConfig:
    results: str = ""
    """Folder for the records that bsuite's own analysis reads; empty keeps none."""


def is_experiment(name: str) -> bool:
    """Whether a name is an experiment of the sweep, with or without a number."""
    known = re.fullmatch(r"(\w+)(/\d+)?", name)
    return known is not None and known[1] in EXPERIMENTS


def make_bsuite(name: str, config: BSuiteConfig | None = None) -> Env:
    config = config or BSuiteConfig()
    import bsuite
    from bsuite import sweep

    experiment, _, number = name.partition("/")
    task = f"{experiment}/{number or 0}"
    if task not in sweep.SETTINGS:
        count = sum(each.startswith(f"{experiment}/") for each in sweep.SWEEP)
        raise UserError(
            f"bsuite has no task {task!r}.\n"
            f"  Fix: give a number from 0 to {count - 1}, as in bsuite_{experiment}/0."
        )
    try:
        if config.results:
            env = bsuite.load_and_record_to_csv(task, config.results, overwrite=True)
        else:
            env = bsuite.load(experiment, dict(sweep.SETTINGS[task]))
    except OSError as error:  # URLError is one
        raise UserError(
            f"bsuite could not get what {task!r} needs: {error}\n"
            "  Fix: connect to the internet once, or pick a task without MNIST, such "
            "as bsuite_catch/0."
        ) from error
    return DmEnv(env, lambda seed: _reseed(env, seed))


def _reseed(env: Any, seed: int) -> None:
    """Give an experiment, and what it is wrapped in, random numbers of their own.

    What belongs to the task (`mapping_seed`) was drawn when it was made, and stays.
    """
    depth = 0
    while env is not None:
        if "_rng" in vars(env):
            env._rng = np.random.RandomState([seed, depth])
        env, depth = vars(env).get("_env"), depth + 1
