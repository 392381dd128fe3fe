"""Import checkpoint files of original implementations (`--run.from_checkpoint FILE`).

The settings of an agent name its importer (`AgentConfig.importer`): a function
`import_state(path, template, components)` that returns the state of the agent with the
weights of a file. If the entry `continues_training` of the state is True, the state has
the optimizers of the file, too.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from reverie.api import StateDict, UserError
from reverie.capabilities import AgentConfig
from reverie.convert.dreamerv3_torch.checkpoint import is_torch_file, read_weights
from reverie.convert.dreamerv3_torch.config import BLOCK
from reverie.convert.dreamerv3_torch.sizes import infer_settings
from reverie.plugins import import_object


class ImpliedSettings(NamedTuple):
    """Settings that a run has if it uses a checkpoint file."""

    block: str
    """Preset with the algorithm of the file, under all other settings."""
    settings: dict[str, Any]
    """Settings that the tensors determine, over all others but flags."""


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


def implied_settings(
    file: str, stoch: int = 0, classes: int = 0
) -> ImpliedSettings | None:
    """Return the settings of a checkpoint of dreamerv3-torch; None for other files.

    `stoch` and `classes` are sizes that the tensors do not determine, 0 if unknown.
    """
    path = Path(file).expanduser()
    if not is_torch_file(file) or not path.is_file():
        return None
    return _implied_settings(path, path.stat().st_mtime_ns, stoch, classes)


@functools.lru_cache
def _implied_settings(
    path: Path, time: int, stoch: int, classes: int
) -> ImpliedSettings | None:
    """Read a file; the time of its last change is part of the cache's key."""
    try:
        weights = read_weights(path)
    except UserError:  # another file: reported when it is loaded
        return None
    return ImpliedSettings(BLOCK, infer_settings(weights, stoch, classes))
