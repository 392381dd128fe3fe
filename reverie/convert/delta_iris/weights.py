"""Import checkpoints of the original Δ-IRIS (`last.pt`).

The original stores one dict from names like `tokenizer.encoder.encoder.0.weight` to
tensors, for tokenizer, world model and actor-critic (`model` and `target_model`). The
values are copied exactly. `--run.from_checkpoint last.pt` is the same as

    agent.load_weights(from_original(read_checkpoint("last.pt"), agent.state_dict()))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from reverie.agents.iris.config import COMPONENTS
from reverie.api import StateDict, UserError
from reverie.convert.delta_iris.names import TOKENIZER, WORLD_MODEL, copy_weights
from reverie.convert.importer import select_prefix
from reverie.patterns import select_names
from reverie.storage.torch_file import read_tensors

# Regular expressions and replacements, as in `names.py`.
ACTOR_CRITIC = [
    (r"cnn\.0\.encoder", "frame.layers"),
    (r"actor_linear", "actor"),
    (r"critic_linear", "critic"),
]
NETS = {"model.": "online.", "target_model.": "target."}
"""Prefixes of the actor-critic and its target network: original, and in Reverie."""


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of `last.pt` by their original names."""
    tensors = read_tensors(path)
    if not any(key.startswith("tokenizer.") for key in tensors):
        raise UserError(
            f"{path} is not a checkpoint of Δ-IRIS.\n"
            "  Fix: use checkpoints/last.pt in a run folder of the original."
        )
    return tensors


def import_state(
    path: str | Path, template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of an agent with the matching components of a file."""
    tensors = read_checkpoint(path)
    available = {name.split(".")[0] for name in tensors}
    try:
        wanted = select_names(components, COMPONENTS)
    except re.error:  # reported by `load_weights`
        wanted = []
    if missing := [part for part in wanted if part not in available]:
        raise UserError(
            f"{path} has no {missing[0]}.\n  Fix: --run.from_components "
            f"'{'|'.join(sorted(available & set(COMPONENTS)))}'"
        )
    chosen = {k: v for k, v in tensors.items() if k.split(".")[0] in wanted}
    return from_original(chosen, template)


def from_original(tensors: Mapping[str, Tensor], template: StateDict) -> StateDict:
    """Return the state of an agent with the values of the original.

    `template` is the state of an agent of the same size. Components that the file does
    not have, optimizers and random generators are taken from it.
    """
    state = dict(template)
    for part, rules in (("tokenizer", TOKENIZER), ("world_model", WORLD_MODEL)):
        if weights := select_prefix(tensors, f"{part}."):
            state[part] = copy_weights(weights, rules, template[part])
    if actor := select_prefix(tensors, "actor_critic."):
        state["actor_critic"] = {}
        for prefix, new_prefix in NETS.items():
            net = copy_weights(
                select_prefix(actor, prefix),
                ACTOR_CRITIC,
                select_prefix(template["actor_critic"], new_prefix),
            )
            state["actor_critic"] |= {new_prefix + name: x for name, x in net.items()}
    return state
