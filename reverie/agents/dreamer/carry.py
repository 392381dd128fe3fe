"""The carry of Dreamer, and its division among ranks in data-parallel training."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from reverie.distributed.collective import all_gather, local_sequences
from reverie.nets.tree import tree_map


class DreamerCarry(NamedTuple):
    """Latent state and previous actions, carried between steps or batches."""

    state: Any
    prevact: dict[str, Tensor]


def local_carry(carry: DreamerCarry) -> DreamerCarry:
    """Return the part of a global batch's carry that belongs to this rank.

    A carry that has another size than the global batch is returned unchanged.
    """
    part = local_sequences()
    if part is None or len(carry.state[0]) != part.total:
        return carry
    own: DreamerCarry = tree_map(lambda x: x[part.start : part.stop].clone(), carry)
    return own


def gather_carry(carry: DreamerCarry, total: int) -> DreamerCarry:
    """Gather the carry of a global batch of `total` sequences from all ranks."""
    if len(carry.state[0]) >= total:
        return carry
    gathered: DreamerCarry = tree_map(all_gather, carry)
    return gathered
