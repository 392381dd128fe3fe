"""Record demonstrations: successful episodes of an expert policy, as HDF5.

The environment needs a method `expert`, which returns the action to take; `reach` has
one. The file has robomimic's layout, with masks `train` and `valid`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from reverie import envs
from reverie.api import Env, UserError
from reverie.config import differences
from reverie.datasets.convert import refuse_existing
from reverie.datasets.episode_format import MODEL, STATE, Episode
from reverie.datasets.robomimic import write_robomimic
from reverie.datasets.split import HELD_OUT_FRACTION, split_by_seed
from reverie.envs.wrappers import has_simulator_state
from reverie.spaces import SUCCESS

MAX_FAILURES = 50
"""Consecutive failed episodes after which recording stops."""


def record_demonstrations(
    task: str,
    path: Path,
    episodes: int = 100,
    seed: int = 0,
    noise: float = 0.0,
    config: envs.EnvConfig | None = None,
) -> int:
    """Record successful episodes; return their total number of rows.

    `noise` is the standard deviation of noise added to each action, so that the
    demonstrations include recovery from deviations. The noisy action is recorded.
    """
    if path.suffix not in (".hdf5", ".h5"):
        raise UserError(
            f"Demonstrations are written as HDF5, not as {path.name!r}.\n"
            f"  Fix: reverie data demos {path.with_suffix('.hdf5')}"
        )
    refuse_existing(path)
    if episodes < 2:
        raise UserError(
            f"At least 2 demonstrations are needed, not {episodes}.\n"
            "  Fix: --episodes 100"
        )
    config = config or envs.EnvConfig()
    env = envs.make(task, config, seed)
    settings = {
        name: new for name, (_, new) in differences(envs.EnvConfig(), config).items()
    }
    names = [f"demo_{i}" for i in range(episodes)]
    train, valid = split_by_seed(names, HELD_OUT_FRACTION, seed)
    recorded = successful_episodes(env, task, seed, noise)
    try:
        steps = write_robomimic(
            path,
            zip(names, recorded, strict=False),
            env.act_space,
            masks={"train": train, "valid": valid},
            env_args={"env_name": task, "type": "reverie", "env_kwargs": settings},
        )
    finally:
        env.close()
    return steps + episodes  # an episode has one row more than steps


def successful_episodes(
    env: Env, task: str, seed: int, noise: float
) -> Iterator[Episode]:
    """Yield successful episodes of the expert; failed ones are discarded.

    An episode is successful if `log/success` is positive in its last row or, if success
    is not reported, if the last reward is positive.
    """
    expert: Any = getattr(env, "expert", None)
    if expert is None:
        raise UserError(
            f"Task {task!r} has no expert policy to record.\n  Fix: --task reach, or "
            "give its environment a method `expert` that returns an action."
        )
    rng = np.random.default_rng([seed, 1])
    failures = 0
    env.reset(seed)  # only to seed it: every episode begins with a reset
    while True:
        episode = _record_episode(env, expert, rng, noise)
        success = episode.get(SUCCESS, episode["reward"])[-1]
        # a negative value means that success is not reported
        is_success = (success if success >= 0 else episode["reward"][-1]) > 0
        failures = 0 if is_success else failures + 1
        if failures == MAX_FAILURES:
            raise UserError(
                f"The expert of {task!r} failed {MAX_FAILURES} times in a row.\n"
                "  Fix: use a smaller --noise."
            )
        if is_success:
            yield episode


def _record_episode(
    env: Env, expert: Any, rng: np.random.Generator, noise: float
) -> Episode:
    """Record one episode of the expert, with noise added to continuous actions."""
    rows = []
    obs = env.reset()
    model = env.simulator_model() if has_simulator_state(env) else ""
    while True:
        if has_simulator_state(env):
            obs = {**obs, STATE: env.simulator_state()}
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
            episode = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            return episode | ({MODEL: _to_bytes(model)} if model else {})
        obs = env.step(action)


def _to_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
