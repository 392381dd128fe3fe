"""Bring in agents of the original Δ-IRIS (`last.pt`).

The original keeps one mapping from names like `tokenizer.encoder.encoder.0.weight` to
tensors: the three parts, the last of them twice (`model` and its slow copy). Nothing is
computed, so the numbers stay what they were. Any of the parts may be taken alone:

    agent.load_weights(from_original(read_checkpoint("last.pt"), agent.state_dict()))

which is what `--run.from_checkpoint last.pt` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from reverie.agents.iris.config import PARTS
from reverie.api import StateDict, UserError
from reverie.convert.delta_iris.names import TOKENIZER, WORLD_MODEL, take_over
from reverie.storage.torch_file import read_torch_file

ACTOR_CRITIC = [
    (r"cnn\.0\.encoder", "frame.layers"),
    (r"actor_linear", "actor"),
    (r"critic_linear", "critic"),
]
NETS = {"model.": "online.", "target_model.": "target."}


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The tensors of the original's `last.pt`, by its names."""
    data = read_torch_file(path)
    entries = data.items() if isinstance(data, Mapping) else ()
    tensors = {k: v for k, v in entries if isinstance(v, Tensor) and isinstance(k, str)}
    if not any(key.startswith("tokenizer.") for key in tensors):
        raise UserError(
            f"{path} holds no agent of Δ-IRIS.\n"
            "  Fix: pass checkpoints/last.pt of the original's run folder."
        )
    return tensors


def read_state(path: str | Path, like: StateDict, components: str = ".*") -> StateDict:
    """The state of an agent with the parts of a file in it that a pattern names."""
    tensors = read_checkpoint(path)
    held = {name.split(".")[0] for name in tensors}
    try:
        wanted = [part for part in PARTS if re.fullmatch(components, part)]
    except re.error:  # said by whoever is to load them
        wanted = []
    if missing := [part for part in wanted if part not in held]:
        raise UserError(
            f"{path} holds no {missing[0]}.\n  Fix: --run.from_components "
            f"'{'|'.join(sorted(held & set(PARTS)))}'"
        )
    chosen = {k: v for k, v in tensors.items() if k.split(".")[0] in wanted}
    return from_original(chosen, like)


def from_original(tensors: Mapping[str, Tensor], like: StateDict) -> StateDict:
    """The state of an agent with the original's numbers in it.

    `like` is the state of an agent of that size. Parts the original's file does not
    have, optimizers and random generators stay as they are.
    """
    state = dict(like)
    for part, rules in (("tokenizer", TOKENIZER), ("world_model", WORLD_MODEL)):
        if theirs := _under(tensors, f"{part}."):
            state[part] = take_over(theirs, rules, like[part])
    if actor := _under(tensors, "actor_critic."):
        state["actor_critic"] = {}
        for prefix, ours in NETS.items():
            net = take_over(
                _under(actor, prefix), ACTOR_CRITIC, _under(like["actor_critic"], ours)
            )
            state["actor_critic"] |= {ours + name: x for name, x in net.items()}
    return state


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
