"""Environments and agents, built as a config says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reverie import agents
from reverie import envs as suites
from reverie.api import Agent, Env, VecEnv
from reverie.convert.importers import import_checkpoint
from reverie.envs.vector.vec_env import make_vec_env
from reverie.run import checkpoint, device
from reverie.run.config import Config

MakeEnv = Callable[[int], Env]
"""Builds environment number `index`."""

EVAL_SEEDS = 1_000_000
"""Evaluation environments are numbered from here, so that they share no seed."""


def in_workers(config: Config) -> Config:
    """The config with environments in worker processes, unless it says where."""
    vector = config.env.vector
    if vector.workers or vector.native:
        return config
    return replace(config, env=replace(config.env, vector=replace(vector, workers=-1)))


def make_envs(
    config: Config, count: int, first: int = 0, make_env: MakeEnv | None = None
) -> VecEnv:
    """A pool of `count` environments of the config's task."""
    make = make_env or suites.TaskFactory(config.task, config.env, config.seed)
    return make_vec_env(suites.IndexOffset(make, first), count, config.env.vector)


def make_agent(
    config: Config, spaces: Any, where: torch.device, precision: str
) -> Agent:
    """The config's agent for the spaces of an environment or a pool."""
    device.avoid_crashes(where, precision)
    base = None
    if config.of_agent.base_agent:
        other = replace(config, agent=config.of_agent.base_agent, compile="none")
        base = make_agent(other, spaces, where, precision)
    return agents.make(
        config.agent,
        spaces.obs_space,
        spaces.act_space,
        config.of_agent,
        device=where,
        precision=precision,
        seed=config.seed,
        compile=device.pick_compile(config.compile, where),
        overlap=device.pick_overlap(config.run.overlap, where, config.deterministic),
        base=base,
    )


def load_initial_weights(agent: Agent, config: Config) -> str:
    """Load weights of another run, or of a file that an original saved; says which."""
    path = Path(config.run.from_checkpoint).expanduser()
    components = config.run.from_components
    if path.is_file():
        state = import_checkpoint(config.of_agent, path, agent.state_dict(), components)
    else:
        path = checkpoint.locate(path)
        state = checkpoint.read_part(path, "agent")
    taken = agent.load_weights(state, components)
    return f"Weights of {', '.join(taken)} from {path}."
