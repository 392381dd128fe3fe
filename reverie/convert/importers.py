"""Import checkpoint files of original implementations (`--run.from_checkpoint FILE`).

The settings of an agent name its importer (`AgentConfig.importer`): a function
`import_state(path, template, components)` that returns the state of the agent with the
weights of a file.
"""

from __future__ import annotations

from pathlib import Path

from reverie.api import StateDict, UserError
from reverie.capabilities import AgentConfig
from reverie.plugins import import_object


def import_checkpoint(
    config: AgentConfig, path: Path, template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of an agent with the weights of a file.

    `template` is the agent's current state. Components that do not match the regular
    expression `components` are returned unchanged.
    """
    if not config.importer:
        agent = type(config).__name__.removesuffix("Config")
        raise UserError(
            f"{path} is a file, and there is no importer for the agent {agent!r}.\n"
            "  Fix: use the folder of a run."
        )
    import_state = import_object(config.importer, "The importer")
    state: StateDict = import_state(path, template, components)
    return state
