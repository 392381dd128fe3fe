"""The carry of Dreamer and its part on each rank, and latents for the replay buffer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from reverie.api import Batch, LatentWorld
from reverie.distributed.collective import all_gather, local_sequences
from reverie.nets.streams import SideStream, on_stream
from reverie.nets.tree import tree_map

LATENTS = SideStream("latents")
"""Stream on which latent states are converted to the format of the replay buffer."""


class DreamerCarry(NamedTuple):
    """Latent state and previous actions, carried between steps or batches."""

    state: Any
    prevact: dict[str, Tensor]


def update_carry(
    carry: DreamerCarry, states: Any, actions: dict[str, Tensor], stepped: Tensor
) -> None:
    """Write the last states and actions of a batch to the carry, in place.

    A skipped update (`stepped` is False) keeps the carry.
    """
    last = tree_map(lambda x: x[:, -1].detach(), (states, actions))
    new = DreamerCarry(*last)
    tree_map(lambda old, x: old.copy_(torch.where(stepped, x, old)), carry, new)


def latents_to_store(
    world: LatentWorld, states: Any, data: Batch, stepped: Tensor
) -> dict[str, Tensor]:
    """Return the latents of a batch for the replay buffer.

    These are the new `states`, or the latents in `data` if the update was skipped. They
    are computed on the stream `LATENTS`.
    """
    latents = {}
    with on_stream(stepped, LATENTS):
        for key, new in world.to_replay(states).items():
            old = data[key][:, -new.shape[1] :]  # without the context rows
            latents[key] = torch.where(stepped, new, old)
    return latents


def local_carry(carry: DreamerCarry) -> DreamerCarry:
    """Return the part of a global batch's carry that belongs to this rank.

    A carry that has another size than the global batch is returned unchanged.
    """
    local = local_sequences()  # part of the global batch; None without several ranks
    if local is None or local.size == local.total or len(carry.state[0]) != local.total:
        return carry
    part: DreamerCarry = tree_map(lambda x: x[local.start : local.stop].clone(), carry)
    return part


def gather_carry(carry: DreamerCarry, total: int) -> DreamerCarry:
    """Return the carry of a global batch of `total` sequences, gathered from all ranks.

    A carry that already has this size is returned unchanged.
    """
    if len(carry.state[0]) >= total:
        return carry
    gathered: DreamerCarry = tree_map(all_gather, carry)
    return gathered
