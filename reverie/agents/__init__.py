"""Names of the built-in agents, and `make`, which builds an agent by name."""

from __future__ import annotations

import difflib
from typing import Any

from reverie.agents.options import BuildOptions
from reverie.api import Agent, UserError
from reverie.plugins import import_object, is_plugin
from reverie.spaces import Spaces

AGENTS = {
    "bc": "reverie.agents.bc.agent:BC",
    "dreamer": "reverie.agents.dreamer.agent:Dreamer",
    "iris": "reverie.agents.iris.agent:Iris",
    "random": "reverie.agents.random:RandomAgent",
    "vta": "reverie.agents.vta.agent:VTAAgent",
}


def check_name(name: str) -> None:
    """Raise unless `name` is a built-in agent or of the form `package.module:Class`."""
    if name not in AGENTS and not is_plugin(name):
        closest = difflib.get_close_matches(name, AGENTS, n=1, cutoff=0)[0]
        raise UserError(
            f"There is no agent {name!r}.\n  Fix: did you mean --agent {closest}? Or "
            "use --agent package.module:Class."
        )


def find_class(name: str) -> Any:
    """Return the class of a built-in agent, or of `package.module:Class`."""
    check_name(name)
    return import_object(AGENTS.get(name, name), "--agent")


def make(
    name: str, obs_space: Spaces, act_space: Spaces, config: Any, options: BuildOptions
) -> Agent:
    """Build an agent by name; `config` is an instance of that agent's config class."""
    agent: Agent = find_class(name)(obs_space, act_space, config, options)
    return agent
