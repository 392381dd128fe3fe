"""Networks and prediction losses that the RSSM and recurrent VTA share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import Batch, Obs
from reverie.capabilities import ObsEncoder
from reverie.nets import standardize as standard
from reverie.nets.decoder import Decoder, DecoderConfig
from reverie.nets.distributions import Distribution
from reverie.nets.encoder import Encoder, EncoderConfig
from reverie.nets.heads import Head, HeadConfig
from reverie.spaces import Spaces


@dataclass(frozen=True)
class WorldNetworks:
    """Configs of the networks around the latent dynamics, and their loss options."""

    enc: EncoderConfig
    dec: DecoderConfig
    rewhead: HeadConfig
    conhead: HeadConfig
    discount: float
    """Target of the continuation head at non-terminal steps, so that its prediction
    includes the discount."""
    reward_grad: bool
    """Backpropagate the reward loss into the latent state."""


class ReconstructiveWorld(nn.Module):
    """Encoder, dynamics, decoder, reward and continuation head of a latent world.

    `config` is that of the dynamics. Networks compute in `dtype`.
    """

    Dynamics: ClassVar[Callable[..., nn.Module]]
    """Class of the dynamics; takes the encoder width, the actions and the config."""
    Head: ClassVar[Callable[..., nn.Module]] = Head
    """Class of the reward and continuation heads; takes the feature width and the
    config of the head."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: Any,
        networks: WorldNetworks,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        deter, stoch = config.feature_widths
        self.config, self.networks, self.dtype = config, networks, dtype
        self.width = deter + stoch
        self.enc = self._make_encoder(obs_space)
        self.dyn = type(self).Dynamics(self.enc.width, act_space, config)
        self.dec = self._make_decoder(obs_space, deter, stoch)
        self.rew = type(self).Head(self.width, networks.rewhead)
        self.con = type(self).Head(self.width, networks.conhead)

    def _make_encoder(self, obs_space: Spaces) -> Any:
        return Encoder(obs_space, self.networks.enc)

    def _make_decoder(self, obs_space: Spaces, deter: int, stoch: int) -> Any:
        return Decoder(obs_space, deter, stoch, self.networks.dec)

    @property
    def image_keys(self) -> tuple[str, ...]:
        return tuple(self.dec.images)

    @property
    def encoder(self) -> ObsEncoder:
        encoder: ObsEncoder = self.enc
        return encoder

    def features(self, states: Any) -> Float[Tensor, "*b F"]:
        raise NotImplementedError

    def decoder_inputs(self, states: Any) -> tuple[Tensor, Tensor]:
        """Return the deterministic and the stochastic features."""
        raise NotImplementedError

    def reward_and_cont(
        self, feat: Float[Tensor, "*b F"]
    ) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
        return self.rew(feat).pred(), self.con(feat).prob()

    def target_width(self, name: str) -> int:
        """Return the size of a target; see `capabilities.HasEnsembleTargets`."""
        deter, stoch = self.config.feature_widths
        widths = {"deter": deter, "stoch": stoch, "embed": self.enc.width}
        return int(widths.get(name, self.width))

    @torch.no_grad()
    def target(
        self, name: str, states: Any, batch: Batch
    ) -> Float[Tensor, "B T width"]:
        if name == "embed":
            with standard.frozen_statistics(standard.standardizers(self.enc, "batch")):
                embed: Tensor = self.enc(batch, self.dtype)
                return embed
        if name == "feat":
            return self.features(states).detach()
        deter, stoch = self.decoder_inputs(states)
        return (deter if name == "deter" else stoch).detach()

    def decode(self, states: Any) -> Obs:
        decoded = self.dec(*self.decoder_inputs(states))
        return {key: dist.pred() for key, dist in decoded.items()}

    def prediction_losses(
        self, states: Any, batch: Batch
    ) -> dict[str, Float[Tensor, "B T"]]:
        """Return the decoder losses by observation key, and the losses `rew`, `con`."""
        feat = self.features(states)
        decoded: dict[str, Distribution] = self.dec(*self.decoder_inputs(states))
        losses = {key: dist.loss(batch[key]) for key, dist in decoded.items()}
        reward = self.rew(feat if self.networks.reward_grad else feat.detach())
        losses["rew"] = reward.loss(batch["reward"])
        target = (~batch["is_terminal"]).float() * self.networks.discount
        losses["con"] = self.con(feat).loss(target)
        return losses
