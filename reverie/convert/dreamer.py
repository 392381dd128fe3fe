"""Import checkpoints of both DreamerV3 implementations into the Dreamer agent."""

from __future__ import annotations

from pathlib import Path

from reverie.api import StateDict, UserError
from reverie.convert import dreamerv3
from reverie.convert.dreamerv3_torch import weights as dreamerv3_torch
from reverie.convert.dreamerv3_torch.checkpoint import is_torch_file


def import_state(
    path: str | Path, template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of an agent with the weights of `agent.pkl` or `latest.pt`."""
    if is_torch_file(str(path)):
        if "gru.weight" not in template["dyn"]:
            raise UserError(
                f"{path} is a checkpoint of dreamerv3-torch, but this run has another "
                "world model.\n  Fix: --configs dreamerv3_torch, without other "
                "settings of dreamer.world and dreamer.actor_critic."
            )
        return dreamerv3_torch.import_state(path, template, components)
    return dreamerv3.import_state(path, template, components)
