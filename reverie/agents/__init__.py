"""Agents: they act, learn, and say what they need for both."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import torch

from reverie.api import Agent, UserError
from reverie.spaces import Spaces

AGENTS = {
    "bc": "reverie.agents.bc.agent:BC",
    "dreamer": "reverie.agents.dreamer.agent:Dreamer",
    "iris": "reverie.agents.iris.agent:Iris",
    "random": "reverie.agents.random:RandomAgent",
    "vta": "reverie.agents.vta.agent:VTAAgent",
}


def make(
    name: str,
    obs_space: Spaces,
    act_space: Spaces,
    config: Any,
    *,
    device: torch.device,
    precision: str,
    seed: int,
    compile: str = "none",
    overlap: bool = False,
    base: Agent | None = None,
) -> Agent:
    """Build an agent by name; `config` is that agent's own dataclass.

    `compile` says how much faster machinery it may use: `none`, `step` or `graph`; with
    `overlap` its policy may act with slightly older weights instead of waiting.
    `base` is another agent whose world this one looks through.
    """
    if name not in AGENTS:
        near = difflib.get_close_matches(name, AGENTS, 1, 0) or list(AGENTS)
        raise UserError(
            f"There is no agent {name!r}.\n  Fix: did you mean {near[0]!r}?"
        )
    module, cls = AGENTS[name].split(":")
    build = getattr(importlib.import_module(module), cls)
    more = {} if base is None else {"base": base}
    agent: Agent = build(
        obs_space,
        act_space,
        config,
        device=device,
        precision=precision,
        seed=seed,
        compile=compile,
        overlap=overlap,
        **more,
    )
    return agent
