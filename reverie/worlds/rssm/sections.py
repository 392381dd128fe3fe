"""The world-model loss of the RSSM, split into sections that are timed separately.

The inputs of each section (outputs of the preceding ones) are leaf tensors, so that its
backward pass computes the gradients of its inputs and its weights, as in training.
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
    """Return the sections encoder, scan, decoder or representation, heads and prior."""
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
        assert world.dec is not None
        decoded = world.dec(deter, stoch.flatten(-2))
        return [dist.loss(batch[key]).mean() for key, dist in decoded.items()]

    def represent() -> list[Tensor]:
        assert world.representation is not None
        losses = world.representation(world.features(states), tokens, batch)
        return [loss.mean() for loss in losses.values()]

    def heads() -> list[Tensor]:
        feat = world.features(states)
        reward = world.rew(feat).loss(batch["reward"])
        cont = world.con(feat).loss((~batch["is_terminal"]).float())
        kl = world.dyn.kl_terms(logits, world.dyn.prior_logits(deter))
        return [x.mean() for x in (reward, cont, kl.dyn, kl.rep)]

    sections = {"encoder": Section(encode, []), "scan": Section(scan, [tokens])}
    if world.representation is not None:
        sections["representation"] = Section(represent, [deter, stoch])
    if world.dec is not None:
        sections["decoder"] = Section(decode, [deter, stoch])
    return {
        **sections,
        "heads and prior": Section(heads, [deter, stoch, logits]),
    }


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()
