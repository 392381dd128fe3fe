"""Reconstruction, reward and continuation losses shared by RSSM and recurrent VTA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from reverie.api import Batch, Obs
from reverie.nets.conv import DecoderConfig, EncoderConfig
from reverie.nets.distributions import Output
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


def prediction_losses(
    decoded: Mapping[str, Output],
    reward_head: Head,
    continue_head: Head,
    feat: Float[Tensor, "B T F"],
    batch: Batch,
    networks: WorldNetworks,
) -> dict[str, Float[Tensor, "B T"]]:
    """Return the decoder losses by observation key, and the losses `rew` and `con`."""
    reward = reward_head(feat if networks.reward_grad else feat.detach())
    cont = continue_head(feat)
    losses = {key: dist.loss(batch[key]) for key, dist in decoded.items()}
    losses["rew"] = reward.loss(batch["reward"])
    losses["con"] = cont.loss((~batch["is_terminal"]).float() * networks.discount)
    return losses


def predictions(decoded: Mapping[str, Output]) -> Obs:
    """Return the predicted observation of each decoder distribution."""
    return {key: dist.pred() for key, dist in decoded.items()}
