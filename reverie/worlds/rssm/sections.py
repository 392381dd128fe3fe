"""The work of an RSSM in one update, in pieces that can be timed alone.

Each piece gives what it computes and is differentiated by its inputs as well as by the
weights, as in an update. The inputs are what the pieces before it computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from reverie.api import Batch
from reverie.nets.rng import Rng

if TYPE_CHECKING:
    from reverie.worlds.rssm.world import RSSM, State


class Work(NamedTuple):
    """A piece of an update: what it computes, and from what besides the weights."""

    forward: Callable[[], list[Tensor]]
    inputs: list[Tensor]


def rssm_sections(world: RSSM, state: State, batch: Batch, rng: Rng) -> dict[str, Work]:
    """Encoder, posterior scan, decoder, and the heads with the prior."""
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
        outs = world.dec(deter, stoch.flatten(-2))
        return [out.loss(batch[key]).mean() for key, out in outs.items()]

    def heads() -> list[Tensor]:
        feat = world.features(states)
        reward = world.rew(feat).loss(batch["reward"])
        goes_on = world.con(feat).loss((~batch["is_terminal"]).float())
        match = world.dyn.compare(logits, world.dyn.prior_logits(deter))
        return [x.mean() for x in (reward, goes_on, match.dyn, match.rep)]

    return {
        "encoder": Work(encode, []),
        "scan": Work(scan, [tokens]),
        "decoder": Work(decode, [deter, stoch]),
        "heads and prior": Work(heads, [deter, stoch, logits]),
    }


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()
