"""Plan2Explore in checkpoints of dreamerv3-torch: its ensemble and its settings.

The ensemble is `_expl_behavior._networks`, a list of MLPs; here, the tensors of all
members are stacked. Actor and critic of `_expl_behavior._behavior` have the names of
the task behavior.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reverie.api import UserError

NETWORKS = "_expl_behavior._networks."
BEHAVIOR = "_expl_behavior._behavior."
LEAVES = {"linear.weight": "weight", "norm.weight": "scale", "norm.bias": "shift"}
"""Parameters of a hidden layer: original names, and those of the ensemble here."""


def is_exploration(name: str) -> bool:
    """True for the tensors of Plan2Explore, except references to the world model."""
    if name.startswith(BEHAVIOR):
        return not name.startswith(f"{BEHAVIOR}_world_model.")
    return name.startswith(NETWORKS)


def ensemble_names(names: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the original names of all members, by the name of the stacked tensor."""
    stacked: dict[str, dict[int, str]] = {}
    for name in names:
        if not name.startswith(NETWORKS):
            continue
        member, _, rest = name.removeprefix(NETWORKS).partition(".")
        layer = re.fullmatch(r"layers\.[A-Za-z]+_(linear|norm)(\d+)\.(\w+)", rest)
        if layer and f"{layer[1]}.{layer[3]}" in LEAVES:
            new = f"hidden.{layer[2]}.{LEAVES[f'{layer[1]}.{layer[3]}']}"
        elif rest.startswith("mean_layer."):
            new = f"out.{rest.removeprefix('mean_layer.')}"
        else:
            continue
        stacked.setdefault(new, {})[int(member)] = name
    return {new: [old[i] for i in sorted(old)] for new, old in stacked.items()}


def stack_ensemble(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack tensors with the original names of all members."""
    return {
        new: torch.stack([tensors[name] for name in names])
        for new, names in ensemble_names(tensors).items()
    }


def infer_exploration(
    weights: Mapping[str, Tensor], widths: Mapping[str, int], actions: int
) -> dict[str, Any]:
    """Return the settings of Plan2Explore, if the checkpoint has an ensemble.

    `widths` has the sizes of the possible targets; `actions` is the size of an action.
    """
    ensemble = ensemble_names(weights)
    if "out.weight" not in ensemble:
        return {}
    hidden = [new for new in ensemble if re.fullmatch(r"hidden\.\d+\.weight", new)]
    outputs, units = weights[ensemble["out.weight"][0]].shape
    first = "hidden.0.weight" if hidden else "out.weight"
    inputs = weights[ensemble[first][0]].shape[1]
    targets = [name for name, width in widths.items() if width == outputs]
    if not targets or inputs not in (widths["feat"], widths["feat"] + actions):
        raise UserError(
            f"The ensemble of the checkpoint predicts {outputs} entries from {inputs}, "
            "which are not sizes of its world model.\n  Fix: use a latest.pt of "
            "dreamerv3-torch."
        )
    return {
        "explore.policy": "plan2explore",
        "explore.ensemble.models": len(ensemble["out.weight"]),
        "explore.ensemble.layers": len(hidden),
        "explore.ensemble.units": units if hidden else 1,
        "explore.target": targets[0],
        "explore.action_conditioned": inputs != widths["feat"],
    }
