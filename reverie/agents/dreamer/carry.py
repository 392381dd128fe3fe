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
    rows = local_sequences()
    if rows is None or rows.size == rows.total or len(carry.state[0]) != rows.total:
        return carry
    local: DreamerCarry = tree_map(lambda x: x[rows.start : rows.stop].clone(), carry)
    return local


def gather_carry(carry: DreamerCarry, total: int) -> DreamerCarry:
    """Gather the carry of a global batch of `total` sequences from all ranks."""
    if len(carry.state[0]) >= total:
        return carry
    gathered: DreamerCarry = tree_map(all_gather, carry)
    return gathered
