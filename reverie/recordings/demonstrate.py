"""Record an expert: episodes of a task that knows how to be solved, as HDF5.

An environment with a method `expert`, which says what to do now, can be demonstrated;
`reach` is one. The file has robomimic's layout, with masks `train` and `valid`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from reverie import envs
from reverie.api import Env, UserError
from reverie.config import differences
from reverie.datasets.episode_format import Episode
from reverie.datasets.readers.hdf5 import write_robomimic
from reverie.datasets.split import split_by_seed

HELD_OUT = 0.1


def demonstrate(
    task: str,
    path: Path,
    episodes: int = 100,
    seed: int = 0,
    noise: float = 0.0,
    config: envs.EnvConfig | None = None,
) -> int:
    """Write so many successful episodes of an expert; returns how many rows they have.

    `noise` is the deviation of what is added to each action, which makes for more
    varied places to recover from; what is recorded is what was done.
    """
    if path.suffix not in (".hdf5", ".h5"):
        raise UserError(
            f"Demonstrations are written as HDF5, not as {path.name!r}.\n"
            f"  Fix: reverie data demos {path.with_suffix('.hdf5')}"
        )
    if path.exists():
        raise UserError(
            f"{path} exists already.\n  Fix: remove it, or name another file."
        )
    if episodes < 2:
        raise UserError("Fewer than two demonstrations.\n  Fix: --episodes 100")
    config = config or envs.EnvConfig()
    env = envs.make(task, config, seed)
    settings = {
        name: new for name, (_, new) in differences(envs.EnvConfig(), config).items()
    }
    rows = 0
    names = [f"demo_{i}" for i in range(episodes)]
    train, valid = split_by_seed(names, HELD_OUT, seed)

    def played() -> Iterator[tuple[str, Episode]]:
        nonlocal rows
        for name, episode in zip(
            names, successes(env, task, seed, noise), strict=False
        ):
            rows += len(episode["reward"])
            yield name, episode

    try:
        write_robomimic(
            path,
            played(),
            env.act_space,
            masks={"train": train, "valid": valid},
            env_args={"env_name": task, "type": "reverie", "env_kwargs": settings},
        )
    finally:
        env.close()
    return rows


def successes(env: Env, task: str, seed: int, noise: float) -> Iterator[Episode]:
    """Episodes of the expert that end well; others are played again."""
    expert: Any = getattr(env, "expert", None)
    if expert is None:
        raise UserError(
            f"Task {task!r} knows no expert to record.\n  Fix: --task reach, or give "
            "its environment a method `expert` that returns an action."
        )
    rng = np.random.default_rng([seed, 1])
    failed = 0
    env.reset(seed)
    while True:
        episode = _play(env, expert, rng, noise)
        good = episode.get("log/success", episode["reward"])[-1] > 0
        failed = 0 if good else failed + 1
        if failed == 50:
            raise UserError(
                f"The expert of {task!r} failed 50 times in a row.\n"
                "  Fix: less --noise."
            )
        if good:
            yield episode


def _play(env: Env, expert: Any, rng: np.random.Generator, noise: float) -> Episode:
    rows = []
    obs = env.reset()
    while True:
        action = {k: s.zeros() for k, s in env.act_space.items()}
        if not obs["is_last"]:
            for key, value in expert().items():
                space = env.act_space[key]
                if space.dtype.kind == "f":
                    value = value + noise * rng.standard_normal(space.shape)
                    value = np.clip(value, space.low, space.high)
                action[key] = np.asarray(value, space.dtype)
        rows.append({**obs, **action})
        if obs["is_last"]:
            return {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        obs = env.step(action)
