"""Recurrent VTA (Variational Temporal Abstraction): replaces the RSSM in Dreamer.

The upper level (prefix `abs`) has a belief (its deterministic state) and a Gaussian
state that change only where a segment begins. The lower level (`obs`) has a belief and
a Gaussian state of its own; where a segment begins, its belief is reset to a function
of the upper level. Encoder, decoder and heads are those of the RSSM.

In training, the boundary flags come from a detector (temporal convolutions over the
whole sequence). When acting, future observations are not available, so the flags come
from the prior, which predicts each flag from the lower level of the preceding step.
Both are subject to the limits on length and number of segments. Here the limit on the
number takes precedence (in `world.py`, the limit on the length).

The prior logits of row t belong to the flag of row t; in `world.py`, to that of row
t + 1.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from reverie.api import Batch, Extras, Policy, Rollout, WorldLoss
from reverie.nets.rng import Rng
from reverie.spaces import Space, Spaces
from reverie.worlds.latent import LatentWorldBase, eval_mode
from reverie.worlds.rollout import rollout
from reverie.worlds.vta.boundaries import BOUNDARY
from reverie.worlds.vta.config import RecurrentVTAConfig
from reverie.worlds.vta.dynamics import (
    RecurrentVTADynamics,
    RecurrentVTAState,
    VTADistributions,
)


class RecurrentVTA(LatentWorldBase):
    """Implements `api.LatentWorld`."""

    Dynamics = RecurrentVTADynamics
    dyn: RecurrentVTADynamics
    config: RecurrentVTAConfig

    def initial(self, batch: int) -> RecurrentVTAState:
        state = self.dyn.initial(batch, self.dtype)
        return RecurrentVTAState(*(x.detach().clone() for x in state))

    def observe(
        self, state: RecurrentVTAState, batch: Batch, rng: Rng
    ) -> RecurrentVTAState:
        """Return the posterior states, with the most probable flags instead of samples.

        The flags come from the prior if sequences have a single row, otherwise from the
        detector.
        """
        with eval_mode(self):
            return self._observe(state, batch, rng)[0]

    def imagine(
        self, state: RecurrentVTAState, policy: Policy, horizon: int, rng: Rng
    ) -> Rollout:
        return rollout(state, policy, horizon, partial(self.dyn.imagine, rng))

    def features(self, states: RecurrentVTAState) -> Float[Tensor, "*b F"]:
        """Concatenate belief and state of the upper, then of the lower level."""
        return torch.cat(states[:4], -1)

    def boundaries(self, states: RecurrentVTAState) -> Bool[Tensor, "*b"]:
        """True where a segment begins."""
        return states.boundary > 0.5

    @torch.no_grad()
    def boundary_probability(self, states: RecurrentVTAState) -> Float[Tensor, "*b"]:
        """Return the prior probability that the next step begins a segment."""
        return torch.softmax(self.dyn.prior_flag(states), -1)[..., BOUNDARY]

    @torch.no_grad()
    def prior_kl(
        self, state: RecurrentVTAState, batch: Batch, rng: Rng
    ) -> Float[Tensor, "B T"]:
        """Return KL(posterior || prior): the sum of both levels at boundaries, and that
        of the lower level at other steps."""
        with eval_mode(self):
            states, dists = self._observe(state, batch, rng)
        upper = dists.post_abs.kl(dists.prior_abs)
        return states.boundary * upper + dists.post_obs.kl(dists.prior_obs)

    def decoder_inputs(self, states: RecurrentVTAState) -> tuple[Tensor, Tensor]:
        belief = torch.cat([states.abs_belief, states.obs_belief], -1)
        return belief, torch.cat([states.abs_stoch, states.obs_stoch], -1)

    @property
    def extras(self) -> Spaces:
        config = self.config
        levels = ("abs_belief", "abs_stoch", "obs_belief", "obs_stoch")
        shapes: dict[str, tuple[int, ...]] = {k: (getattr(config, k),) for k in levels}
        shapes |= {"segment_length": (), "segment_count": (), "boundary": ()}
        return {f"dyn/{k}": Space(np.float32, shape) for k, shape in shapes.items()}

    def to_replay(self, states: RecurrentVTAState) -> Extras:
        fields = states._asdict()
        return {f"dyn/{key}": value.detach().float() for key, value in fields.items()}

    def from_replay(self, extras: Extras) -> RecurrentVTAState:
        values = [extras[f"dyn/{key}"] for key in RecurrentVTAState._fields]
        levels, counters = values[:4], values[4:]
        return RecurrentVTAState(*(x.to(self.dtype) for x in levels), *counters)

    def loss(self, state: RecurrentVTAState, batch: Batch, rng: Rng) -> WorldLoss:
        states, dists = self._observe(state, batch, rng)
        losses = self.prediction_losses(states, batch)
        losses |= latent_losses(states, dists, self.config)
        metrics = {
            "boundary_ratio": states.boundary.mean(),
            "prior_abs_ent": dists.prior_abs.entropy().mean(),
            "post_abs_ent": dists.post_abs.entropy().mean(),
            "prior_obs_ent": dists.prior_obs.entropy().mean(),
            "post_obs_ent": dists.post_obs.entropy().mean(),
        }
        return WorldLoss(losses, states, metrics)

    def _observe(
        self, state: RecurrentVTAState, batch: Batch, rng: Rng
    ) -> tuple[RecurrentVTAState, VTADistributions]:
        """Return the posterior states of a batch, and their distributions.

        The detector is used for sequences of more than one row (see `observe`).
        """
        tokens = self.enc(batch, self.dtype)
        detector_logits = None
        if tokens.shape[1] > 1:
            inputs = tokens.float()
            if self.config.reward_to_detector:
                inputs = torch.cat([inputs, batch["reward"].float()[..., None]], -1)
            detector_logits = self.dyn.detector(inputs)
        return self.dyn.observe(
            state, tokens, detector_logits, batch["prevact"], batch["is_first"], rng
        )


def latent_losses(
    states: RecurrentVTAState, dists: VTADistributions, config: RecurrentVTAConfig
) -> dict[str, Float[Tensor, "B T"]]:
    """Return the KL losses `dyn` and `rep` of the states and `boundary` of the flags.

    The upper level's KL counts where a segment begins. The loss `boundary` trains the
    prior of the flags only; the detector is trained by the other losses.
    """
    prior_abs, post_abs, prior_obs, post_obs, prior_flag, post_flag = dists
    dyn_abs = post_abs.detach().kl(prior_abs)
    rep_abs = post_abs.kl(prior_abs.detach())
    dyn_obs = post_obs.detach().kl(prior_obs)
    rep_obs = post_obs.kl(prior_obs.detach())
    post_prob = torch.softmax(post_flag, -1)
    prior_prob = torch.softmax(prior_flag, -1)
    target = post_prob.detach()
    log_ratio = torch.log(target + 1e-8) - torch.log(prior_prob + 1e-8)
    losses = {
        "dyn": (states.boundary * dyn_abs + dyn_obs).clamp(min=config.free_nats),
        "rep": (states.boundary * rep_abs + rep_obs).clamp(min=config.free_nats),
        "boundary": (target * log_ratio).sum(-1),
    }
    if config.boundary_rate:
        losses["boundary_rate"] = rate_loss(
            post_prob[..., BOUNDARY], config.boundary_rate
        )
    return losses


def rate_loss(probability: Float[Tensor, "*b"], rate: float) -> Float[Tensor, "*b"]:
    """Return KL(boundary probability || target rate), in nats."""
    probability = probability.clamp(1e-6, 1 - 1e-6)
    boundary = probability * torch.log(probability / rate)
    return boundary + (1 - probability) * torch.log((1 - probability) / (1 - rate))
