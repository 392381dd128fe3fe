"""bsuite: small experiments that each test one ability, such as memory or exploration.

A task is `experiment/number`. The number (default 0) selects one of the experiment's
variants, which differ in difficulty, seed or noise. The three `mnist` experiments
download their data when they are built. To score an agent with bsuite's own analysis,
set `env.bsuite.results` to a folder for its result files and use one environment; a
resumed run overwrites these files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Env, UserError
from reverie.envs.adapters.dm_env import DmEnv
from reverie.envs.suite import Package, Suite

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
    """Folder for the CSV files that bsuite's analysis reads; empty disables them."""


def is_experiment(name: str) -> bool:
    """True if `name` is an experiment, with or without a number."""
    match = re.fullmatch(r"(\w+)(/\d+)?", name)
    return match is not None and match[1] in EXPERIMENTS


def make_bsuite(name: str, config: BSuiteConfig | None = None) -> Env:
    """Build the task `experiment` or `experiment/number`."""
    config = config or BSuiteConfig()
    import bsuite
    from bsuite import sweep

    experiment, _, number = name.partition("/")
    task = f"{experiment}/{number or 0}"
    if task not in sweep.SETTINGS:
        count = sum(each.startswith(f"{experiment}/") for each in sweep.SWEEP)
        raise UserError(
            f"bsuite has no task {task!r}.\n"
            f"  Fix: use a number from 0 to {count - 1}, as in bsuite_{experiment}/0."
        )
    try:
        if config.results:
            env = bsuite.load_and_record_to_csv(task, config.results, overwrite=True)
        else:
            env = bsuite.load(experiment, dict(sweep.SETTINGS[task]))
    except OSError as error:  # includes URLError
        raise UserError(
            f"bsuite could not download the data of {task!r}: {error}\n"
            "  Fix: connect to the internet once, or choose a task without MNIST, such "
            "as bsuite_catch/0."
        ) from error
    return DmEnv(env, lambda seed: _set_seed(env, seed))


def _set_seed(env: Any, seed: int) -> None:
    """Seed the generators of an experiment and its wrappers.

    Randomness that defines the task itself (`mapping_seed`) is not changed.
    """
    depth = 0
    while env is not None:
        if "_rng" in vars(env):
            env._rng = np.random.RandomState([seed, depth])
        env, depth = vars(env).get("_env"), depth + 1


SUITE = Suite(
    name="bsuite",
    description="bsuite: small experiments that each test one ability",
    make=make_bsuite,
    config=BSuiteConfig,
    tasks=EXPERIMENTS,
    accepts=is_experiment,
    name_format="bsuite_EXPERIMENT/NUMBER, such as bsuite_catch/0",
    package=Package("bsuite", ("bsuite",), group="small", license="Apache-2.0"),
)
