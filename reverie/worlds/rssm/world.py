"""The world model of DreamerV3: encoder, RSSM dynamics, decoder, reward and continue.

The losses are the prediction losses of observations, reward and continuation, and the
two KL losses `dyn` and `rep` between posterior and prior.

In row t, `batch["prevact"]` holds the actions chosen in row t - 1, by key; all other
entries of a batch belong to row t.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from reverie.api import Batch, Extras, Policy, Rollout, WorldLoss
from reverie.nets.rng import Rng
from reverie.nets.standardize import frozen_statistics, standardizers
from reverie.spaces import Space, Spaces
from reverie.worlds.latent import REPRESENTATIONS, LatentWorldBase
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.dynamics import RSSMDynamics, RSSMState
from reverie.worlds.rssm.sections import Section, rssm_sections


class RSSM(LatentWorldBase):
    """Implements `api.LatentWorld`."""

    Dynamics = RSSMDynamics
    representations = ("decoder", *REPRESENTATIONS)
    dyn: RSSMDynamics
    config: RSSMConfig

    @property
    def extras(self) -> Spaces:
        """Spaces of the latent state in the replay buffer: `deter`, and class indices
        for `stoch`, which need less memory."""
        config = self.config
        index_dtype = np.uint8 if config.classes <= 256 else np.int16
        stoch = Space(np.dtype(index_dtype), (config.stoch,), 0, config.classes)
        return {
            "dyn/deter": Space(np.dtype(config.store), (config.deter,)),
            "dyn/stoch": stoch,
        }

    def to_replay(self, states: RSSMState) -> Extras:
        spaces = self.extras
        deter_dtype = getattr(torch, spaces["dyn/deter"].dtype.name)
        index_dtype = getattr(torch, spaces["dyn/stoch"].dtype.name)
        return {
            "dyn/deter": states.deter.detach().to(deter_dtype),
            "dyn/stoch": states.stoch.detach().argmax(-1).to(index_dtype),
        }

    def from_replay(self, extras: Extras) -> RSSMState:
        classes = torch.arange(self.config.classes, device=extras["dyn/stoch"].device)
        stoch = extras["dyn/stoch"].long()[..., None] == classes
        # rows without stored extras are all zero: restore the initial state for them
        stoch &= (extras["dyn/deter"] != 0).any(-1)[..., None, None]
        return RSSMState(extras["dyn/deter"].to(self.dtype), stoch.to(self.dtype))

    def initial(self, batch: int) -> RSSMState:
        return self.dyn.initial(batch, self.dtype)

    def observe(self, state: RSSMState, batch: Batch, rng: Rng) -> RSSMState:
        # images are standardized with moving averages and not with the statistics of
        # the batch, which may be a single frame
        by_batch = self.networks.enc.standard == "batch"
        with frozen_statistics(standardizers(self.enc, "batch") if by_batch else ()):
            return self._observe(state, batch, rng)[0]

    def imagine(
        self, state: RSSMState, policy: Policy, horizon: int, rng: Rng
    ) -> Rollout:
        return self.dyn.imagine(state, policy, horizon, rng)

    def features(self, states: RSSMState) -> Float[Tensor, "*b F"]:
        return self.dyn.features(states)

    def decoder_inputs(self, states: RSSMState) -> tuple[Tensor, Tensor]:
        return states.deter, states.stoch.flatten(-2)

    def loss(self, state: RSSMState, batch: Batch, rng: Rng) -> WorldLoss:
        state, batch = self.with_augmented_views(state, batch, rng)
        embed = self.enc(batch, self.dtype)
        states, logits = self._infer(state, embed, batch, rng)
        losses = self.prediction_losses(states, batch, embed)
        kl_losses, metrics = self.kl_losses(logits, states.deter)
        return self.average_views(WorldLoss(losses | kl_losses, states, metrics))

    def kl_losses(
        self, logits: Float[Tensor, "B T S K"], deter: Float[Tensor, "B T D"]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the losses `dyn` and `rep`, and metrics.

        They have separate loss scales, so that the prior is trained faster towards the
        posterior than the posterior towards the prior. `logits` are of the posterior.
        """
        kl = self.dyn.kl_terms(logits, self.dyn.prior_logits(deter))
        free_nats = self.config.free_nats
        losses = {
            "dyn": kl.dyn.clamp(min=free_nats),
            "rep": kl.rep.clamp(min=free_nats),
        }
        return losses, {"dyn_ent": kl.prior_entropy, "rep_ent": kl.post_entropy}

    @torch.no_grad()
    def prior_kl(
        self, state: RSSMState, batch: Batch, rng: Rng
    ) -> Float[Tensor, "B T"]:
        """Return KL(posterior || prior) of every step, without a gradient."""
        states, logits = self._observe(state, batch, rng)
        return self.dyn.kl_terms(logits, self.dyn.prior_logits(states.deter)).dyn

    def sections(self, state: RSSMState, batch: Batch, rng: Rng) -> dict[str, Section]:
        """Return the sections of `loss` that `reverie bench` times separately."""
        return rssm_sections(self, state, batch, rng)

    def _observe(
        self, state: RSSMState, batch: Batch, rng: Rng
    ) -> tuple[RSSMState, Float[Tensor, "B T S K"]]:
        """Encode the observations; return posterior states and their logits."""
        return self._infer(state, self.enc(batch, self.dtype), batch, rng)

    def _infer(
        self, state: RSSMState, embed: Tensor, batch: Batch, rng: Rng
    ) -> tuple[RSSMState, Float[Tensor, "B T S K"]]:
        """Return posterior states and their logits, given the embedding."""
        return self.dyn.observe(state, embed, batch["prevact"], batch["is_first"], rng)
