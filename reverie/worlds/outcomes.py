"""Reconstruction, reward and continuation losses shared by RSSM and recurrent VTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor

from reverie.api import Batch
from reverie.nets.decoder import DecoderConfig
from reverie.nets.distributions import Distribution
from reverie.nets.encoder import EncoderConfig
from reverie.nets.heads import Head, HeadConfig


@dataclass(frozen=True)
class WorldNetworks:
    """Configs of the networks around the latent dynamics, and their loss options."""

    enc: EncoderConfig
    """Encoder of observations."""
    dec: DecoderConfig
    """Decoder of observations."""
    rewhead: HeadConfig
    """Reward head."""
    conhead: HeadConfig
    """Continuation head."""
    discount: float
    """Target of the continuation head at non-terminal steps, so that its prediction
    includes the discount."""
    reward_grad: bool
    """Backpropagate the reward loss into the latent state."""


class PredictingWorld(Protocol):
    """What `prediction_losses` uses of a world."""

    networks: WorldNetworks
    rew: Head
    con: Head

    def features(self, states: Any) -> Tensor: ...

    def decoder_distributions(self, states: Any) -> dict[str, Distribution]: ...


def prediction_losses(
    world: PredictingWorld, states: Any, batch: Batch
) -> dict[str, Float[Tensor, "B T"]]:
    """Return the decoder losses by observation key, and the losses `rew` and `con`."""
    feat, networks = world.features(states), world.networks
    losses = {
        k: dist.loss(batch[k])
        for k, dist in world.decoder_distributions(states).items()
    }
    reward = world.rew(feat if networks.reward_grad else feat.detach())
    losses["rew"] = reward.loss(batch["reward"])
    target = (~batch["is_terminal"]).float() * networks.discount
    losses["con"] = world.con(feat).loss(target)
    return losses
