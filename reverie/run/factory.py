"""Builds environments and agents from a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reverie import agents
from reverie import config as configs
from reverie import envs as suites
from reverie.agents.options import BuildOptions
from reverie.api import Agent, Env, VecEnv
from reverie.capabilities import AgentConfig
from reverie.envs.vector.vec_env import make_vec_env
from reverie.plugins import settings_name
from reverie.run import checkpoint
from reverie.run import device as devices
from reverie.run.config import Config
from reverie.run.imported import check_importing_agent, find_imported, import_state
from reverie.run.memory import explain_out_of_memory

MakeEnv = Callable[[int], Env]
"""Function that builds the environment with a given index."""

FIRST_EVAL_ENV = 1_000_000
"""Index of the first evaluation environment. The seed of an environment depends on its
index, so evaluation and training have different seeds."""


def with_env_workers(config: Config) -> Config:
    """Return the config with one env worker per CPU core, unless it sets workers."""
    vector = config.env.vector
    if vector.workers or vector.native:
        return config
    return replace(config, env=replace(config.env, vector=replace(vector, workers=-1)))


def make_envs(
    config: Config, count: int, first: int = 0, make_env: MakeEnv | None = None
) -> VecEnv:
    """Make `count` environments of the config's task, the first with index `first`."""
    make = make_env or suites.TaskFactory(config.task, config.env, config.seed)
    setting = "run.eval_envs" if first >= FIRST_EVAL_ENV else "run.envs"
    with explain_out_of_memory(config, "building the environments", setting):
        return make_vec_env(suites.IndexOffset(make, first), count, config.env.vector)


def make_agent(
    config: Config, spaces: Any, device: torch.device, precision: str, name: str = ""
) -> Agent:
    """Make the config's agent for the `obs_space` and `act_space` of `spaces`.

    `name` selects another agent than `config.agent`, with its settings in the config.
    """
    name = name or config.agent
    settings: AgentConfig = getattr(config, settings_name(name))
    devices.disable_onednn_if_needed(device, precision)
    base = None
    if settings.base_agent:  # the agent whose world model this agent uses
        plain = replace(config, compile="none")
        base = make_agent(plain, spaces, device, precision, settings.base_agent)
    options = BuildOptions(
        device,
        precision,
        config.seed,
        devices.pick_compile(config.compile, device),
        devices.pick_overlap(config.run.overlap, device, config.deterministic),
        base,
        config.explore,
    )
    with explain_out_of_memory(config, "building the agent"):
        return agents.make(name, spaces.obs_space, spaces.act_space, settings, options)


def load_initial_weights(agent: Agent, config: Config) -> str:
    """Load the weights of `run.from_checkpoint` and return a message for the user.

    It may be a run folder or a checkpoint, also of another implementation.
    """
    path = Path(config.run.from_checkpoint).expanduser()
    components = config.run.from_components
    if imported := find_imported(path, type(config)):
        path = imported.path
        check_importing_agent(imported, settings_name(config.agent))
        state = import_state(imported, agent.state_dict(), components)
    else:
        path = checkpoint.find_checkpoint(path)
        state = checkpoint.read_part(path, "agent")
    loaded = agent.load_weights(state, components)
    checkpoint.check_finite(state, loaded, path)
    if state.get("continues_training"):  # the file has the optimizers, too (`Importer`)
        agent.load_state_dict(state)
        text = f"Loaded weights and optimizers of {', '.join(loaded)} from {path}."
    else:
        text = f"Loaded weights of {', '.join(loaded)} from {path}."
    return "\n".join(filter(None, [text, import_note(config)]))


def import_note(config: Config) -> str:
    """Return a message about what was assumed to import `run.from_checkpoint`.

    It is empty for a checkpoint of Reverie, and if nothing was assumed.
    """
    imported = find_imported(config.run.from_checkpoint, type(config))
    if imported is None:
        return ""
    settings = configs.flatten(config.agent_config)
    return imported.importer.note(imported.contents, settings)
