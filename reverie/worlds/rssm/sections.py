"""The RSSM's share of a training step, split into sections that can be timed alone.

Each section takes the outputs of the preceding ones as leaf tensors, so that its
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
    """The forward pass of one section, and what its outputs are differentiated by.

    A section without outputs has no backward pass.
    """

    forward: Callable[[], list[Tensor]]
    inputs: list[Tensor]
    weights: list[Tensor] | None = None  # None for all weights of the agent


def rssm_sections(
    world: RSSM, state: RSSMState, batch: Batch, rng: Rng
) -> dict[str, Section]:
    """Return encoder, posterior scan, decoder, and heads with the prior."""
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
        decoded = world.dec(deter, stoch.flatten(-2))
        return [dist.loss(batch[key]).mean() for key, dist in decoded.items()]

    def heads() -> list[Tensor]:
        feat = world.features(states)
        reward = world.rew(feat).loss(batch["reward"])
        cont = world.con(feat).loss((~batch["is_terminal"]).float())
        kl = world.dyn.kl_terms(logits, world.dyn.prior_logits(deter))
        return [x.mean() for x in (reward, cont, kl.dyn, kl.rep)]

    return {
        "encoder": Section(encode, []),
        "scan": Section(scan, [tokens]),
        "decoder": Section(decode, [deter, stoch]),
        "heads and prior": Section(heads, [deter, stoch, logits]),
    }


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()
