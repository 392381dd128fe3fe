"""Base class of world models: networks and prediction losses.

The RSSM and recurrent VTA (Variational Temporal Abstraction) are subclasses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import Batch, Obs, UserError, WorldLoss
from reverie.capabilities import ObsEncoder
from reverie.nets.decoder import Decoder, DecoderConfig
from reverie.nets.distributions import Distribution
from reverie.nets.encoder import Encoder, EncoderConfig
from reverie.nets.heads import Head, HeadConfig
from reverie.nets.rng import Rng
from reverie.nets.standardize import frozen_statistics, standardizers
from reverie.nets.tree import tree_map
from reverie.spaces import Spaces
from reverie.worlds.prototypes import Prototypes
from reverie.worlds.representation import (
    Barlow,
    InfoNCE,
    RepresentationLoss,
    repeat_sequences,
)

REPRESENTATIONS: dict[str, Callable[..., RepresentationLoss]] = {
    "barlow": Barlow,
    "infonce": InfoNCE,
    "prototypes": Prototypes,
}
"""Representations without a decoder, by the name in `dreamer.representation`."""


@contextlib.contextmanager
def eval_mode(world: Any) -> Iterator[None]:
    """Context in which a world is in eval mode.

    VTA then uses the most probable boundary flags instead of samples.
    """
    if not world.training:
        yield
        return
    world.eval()
    try:
        yield
    finally:
        world.train()


@dataclass(frozen=True)
class WorldNetworksConfig:
    """Configs of the networks other than the latent dynamics, and loss options."""

    enc: EncoderConfig
    dec: DecoderConfig
    rewhead: HeadConfig
    conhead: HeadConfig
    discount: float
    """Target of the continue head at non-terminal steps, so that its prediction
    includes the discount."""
    reward_grad: bool
    """Backpropagate the reward loss into the latent state."""
    representation: str = "decoder"
    """Loss that trains the latent state: the reconstruction of observations by a
    decoder, or one of `REPRESENTATIONS`."""
    draw: bool = False
    """With a representation other than `decoder`, also train a decoder, for
    visualization only: its loss has no gradients for the latent state."""

    @property
    def has_decoder(self) -> bool:
        return self.representation == "decoder" or self.draw


class LatentWorldBase(nn.Module):
    """Encoder, dynamics, decoder, reward and continue head of a world model.

    `config` is the config of the dynamics. Networks compute in `dtype`. Subclasses that
    pass the embedding to `prediction_losses` can be trained without a decoder.
    """

    representations: ClassVar[tuple[str, ...]] = ("decoder",)
    """Values of `dreamer.representation` that the world supports."""

    Dynamics: ClassVar[Callable[..., nn.Module]]
    """Class of the dynamics; takes encoder width, action space and config."""
    Head: ClassVar[Callable[..., nn.Module]] = Head
    """Class of the reward and continue heads; takes feature width and config."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: Any,
        networks: WorldNetworksConfig,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        deter, stoch = config.feature_widths
        self.config, self.networks, self.dtype = config, networks, dtype
        self.width = deter + stoch  # of the features
        self.enc = self._make_encoder(obs_space)
        self.dyn = type(self).Dynamics(self.enc.width, act_space, config)
        self.dec: Any = None
        if networks.has_decoder:
            self.dec = self._make_decoder(obs_space, deter, stoch)
        self.representation: RepresentationLoss | None = None
        if networks.representation != "decoder":
            make_loss = REPRESENTATIONS[networks.representation]
            self.representation = make_loss(
                self.width, self.enc.width, lambda: self._make_encoder(obs_space)
            )
        self.rew = type(self).Head(self.width, networks.rewhead)
        self.con = type(self).Head(self.width, networks.conhead)

    def _make_encoder(self, obs_space: Spaces) -> Any:
        return Encoder(obs_space, self.networks.enc)

    def _make_decoder(self, obs_space: Spaces, deter: int, stoch: int) -> Any:
        return Decoder(obs_space, deter, stoch, self.networks.dec)

    @property
    def image_keys(self) -> tuple[str, ...]:
        return tuple(self.dec.images) if self.dec is not None else ()

    @property
    def encoder(self) -> ObsEncoder:
        encoder: ObsEncoder = self.enc
        return encoder

    def features(self, states: Any) -> Float[Tensor, "*b F"]:
        """Return the features of states, for heads and actor-critic."""
        raise NotImplementedError

    def decoder_inputs(self, states: Any) -> tuple[Tensor, Tensor]:
        """Return the deterministic and the stochastic part of the features."""
        raise NotImplementedError

    def reward_and_cont(
        self, feat: Float[Tensor, "*b F"]
    ) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
        return self.rew(feat).pred(), self.con(feat).prob()

    def target_width(self, name: str) -> int:
        """Return the size of a target of the Plan2Explore ensemble."""
        deter, stoch = self.config.feature_widths
        widths = {"deter": deter, "stoch": stoch, "embed": self.enc.width}
        return int(widths.get(name, self.width))

    @torch.no_grad()
    def target(
        self, name: str, states: Any, batch: Batch
    ) -> Float[Tensor, "B T width"]:
        """Return a target of the Plan2Explore ensemble, without a gradient.

        `name` is `embed`, the embedding of the observations in `batch`, or a part of
        the features of `states`: `deter`, `stoch`, or `feat` for both.
        """
        if name == "embed":
            # standardize images with moving averages, and do not update them
            with frozen_statistics(standardizers(self.enc, "batch")):
                embed: Tensor = self.enc(batch, self.dtype)
                return embed
        if name == "feat":
            return self.features(states).detach()
        deter, stoch = self.decoder_inputs(states)
        return (deter if name == "deter" else stoch).detach()

    def initialize_slow(self) -> None:
        """Copy the current weights to the moving averages of weights that the
        representation loss uses, if it uses any."""
        if self.representation is not None:
            self.representation.initialize_slow(self.enc)

    def update_slow(self, stepped: Tensor) -> None:
        """Update the averages of `initialize_slow`, if the optimizer has `stepped`."""
        if self.representation is not None:
            self.representation.update_slow(self.enc, stepped)

    def with_augmented_views(
        self, state: Any, batch: Batch, rng: Rng
    ) -> tuple[Any, Batch]:
        """Return state and batch with each sequence once per augmented view."""
        if self.representation is None or self.representation.views == 1:
            return state, batch
        batch = self.representation.make_views(batch, rng)
        return repeat_sequences(state, self.representation.views), batch

    def average_views(self, loss: WorldLoss) -> WorldLoss:
        """Return the mean losses over views, and the states of the first view."""
        if self.representation is None or self.representation.views == 1:
            return loss
        views = self.representation.views
        losses = {
            k: x.reshape(-1, views, x.shape[1]).mean(1) for k, x in loss.losses.items()
        }
        states = tree_map(lambda x: x[::views].contiguous(), loss.states)
        return WorldLoss(losses, states, loss.metrics)

    def decode(self, states: Any) -> Obs:
        """Return the predictions of the decoder; {} if there is none."""
        if self.dec is None:
            return {}
        decoded = self.dec(*self.decoder_inputs(states))
        return {key: dist.pred() for key, dist in decoded.items()}

    def prediction_losses(
        self, states: Any, batch: Batch, embed: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the decoder losses by observation key, and the losses `rew`, `con`.

        With a representation other than `decoder`, the embedding is required, and the
        losses of the representation are included.
        """
        feat = self.features(states)
        losses: dict[str, Tensor] = {}
        if self.representation is not None:
            if embed is None:
                raise UserError(
                    f"The world {type(self).__name__} computes its losses without the "
                    "embedding, which the representation "
                    f"{self.networks.representation!r} needs.\n"
                    "  Fix: call super().loss in the world, or "
                    "self.prediction_losses(states, batch, embed) with the output of "
                    "the encoder, or use --dreamer.representation decoder."
                )
            losses |= self.representation(feat, embed, batch)
        if self.dec is not None:
            losses |= self.decoder_losses(states, batch)
        return losses | self.head_losses(feat, batch)

    def decoder_losses(self, states: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the losses of the decoder by observation key."""
        inputs = self.decoder_inputs(states)
        if self.representation is not None:  # a decoder for visualization (`draw`)
            inputs = inputs[0].detach(), inputs[1].detach()
        decoded: dict[str, Distribution] = self.dec(*inputs)
        return {key: dist.loss(batch[key]) for key, dist in decoded.items()}

    def head_losses(
        self, feat: Float[Tensor, "B T F"], batch: Batch
    ) -> dict[str, Tensor]:
        """Return the losses `rew` and `con` of the reward and the continue head."""
        reward = self.rew(feat if self.networks.reward_grad else feat.detach())
        target = (~batch["is_terminal"]).float() * self.networks.discount
        return {
            "rew": reward.loss(batch["reward"]),
            "con": self.con(feat).loss(target),
        }
