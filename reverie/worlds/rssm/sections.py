"""The world-model loss of the RSSM, split into sections that are timed separately.

The inputs of each section (outputs of the preceding ones) are leaf tensors. Its
backward pass computes the gradients of its weights and, as in training, of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from reverie.api import Batch
from reverie.nets.rng import Rng

if TYPE_CHECKING:
    from reverie.worlds.rssm.dynamics import RSSMState
    from reverie.worlds.rssm.world import RSSM


class Section(NamedTuple):
    """The forward pass of one section, and the tensors to compute gradients for.

    A section without outputs has no backward pass.
    """

    forward: Callable[[], list[Tensor]]
    inputs: list[Tensor]
    weights: list[Tensor] | None = None  # None for all weights of the agent


def rssm_sections(
    world: RSSM, state: RSSMState, batch: Batch, rng: Rng
) -> dict[str, Section]:
    """Return the sections `encoder`, `scan`, `heads and prior`, and `representation`,
    `decoder` or both."""
    state, batch = world.with_augmented_views(state, batch, rng)
    prevact, is_first = batch["prevact"], batch["is_first"]
    with torch.no_grad():
        tokens = world.enc(batch, world.dtype)
        states, logits = world.dyn.observe(state, tokens, prevact, is_first, rng)
    tokens, logits = _leaf(tokens), _leaf(logits)
    deter, stoch = _leaf(states.deter), _leaf(states.stoch)
    states = type(states)(deter, stoch)

    def encode() -> list[Tensor]:
        return [world.enc(batch, world.dtype)]

    def scan() -> list[Tensor]:
        states, logits = world.dyn.observe(state, tokens, prevact, is_first, rng)
        return [*states, logits]

    def decode() -> list[Tensor]:
        return [x.mean() for x in world.decoder_losses(states, batch).values()]

    def represent() -> list[Tensor]:
        assert world.representation is not None
        losses = world.representation(world.features(states), tokens, batch)
        return [loss.mean() for loss in losses.values()]

    def heads() -> list[Tensor]:
        losses = world.head_losses(world.features(states), batch)
        losses |= world.kl_losses(logits, deter)[0]
        return [x.mean() for x in losses.values()]

    sections = {"encoder": Section(encode, []), "scan": Section(scan, [tokens])}
    if world.representation is not None:
        sections["representation"] = Section(represent, [tokens, deter, stoch])
    if world.dec is not None:
        sections["decoder"] = Section(decode, [deter, stoch])
    return {
        **sections,
        "heads and prior": Section(heads, [deter, stoch, logits]),
    }


def _leaf(x: Tensor) -> Tensor:
    """Return a copy that is a leaf of the autograd graph and needs a gradient."""
    return x.detach().clone().requires_grad_()
