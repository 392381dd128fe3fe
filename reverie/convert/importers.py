"""Checkpoint importers by agent, for `--run.from_checkpoint FILE`.

An importer is a module with a function `import_state(path, template, components)` that
returns the state of an agent with the weights of a file of the original implementation.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from reverie.api import StateDict, UserError

IMPORTERS = {
    "dreamer": "reverie.convert.dreamerv3",
    "iris": "reverie.convert.delta_iris.weights",
    "vta": "reverie.convert.vta.weights",
}
"""Importer modules by the name of the agent."""


def import_checkpoint(
    agent: str, path: Path, template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of an agent with the weights of a file.

    `template` is the agent's current state. Components that do not match the regular
    expression `components` are returned unchanged.
    """
    if agent not in IMPORTERS:
        raise UserError(
            f"{path} is a file, and there is no importer for the agent {agent!r}.\n"
            "  Fix: use the folder of a run."
        )
    importer = importlib.import_module(IMPORTERS[agent])
    state: StateDict = importer.import_state(path, template, components)
    return state
