"""Variational temporal abstraction (VTA) for windows of recorded sequences.

The model has two levels. The lower level models frames within a segment, like an RSSM.
The upper level is updated only where a segment begins; there, the lower level is reset
to a function of it. The posterior of the boundary flags comes from a detector (temporal
convolutions over the whole window); the prior predicts each flag one step ahead from
the lower level. So the prior can generate frame by frame, or one frame per segment
("jumpy").

A window has `T = I + S + I` frames. The first I are context, the next S are modeled,
and the last I are only inputs of the encoders:

    frame    0 .. I-1    I .. I+S-1                 I+S .. T-1
    flag     BOUNDARY    BOUNDARY, then detected    BOUNDARY

Step t of the prior flag logits (`next_flag_logits`) and of the loss `mask` belongs to
the flag of frame t + 1; step t of everything else belongs to frame t.

No posterior depends on the belief of its own level. So states are sampled for all steps
at once, and the loops over time contain only the recurrent cells.

The prefix `abs` (for abstraction) marks the upper level and `obs` the lower level, as
in the authors' code. Shape letters of this file: `I` context, `S` modeled steps, `D`
belief, `Z` state, `P` = 3 D gates. Kim, Ahn and Bengio, 2019, arXiv 1910.00775.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import Batch, Obs, Policy, Rollout, UserError, WorldLoss
from reverie.nets.gaussian import Gaussian
from reverie.nets.gru import GRU, SegmentHold, StateUpdate
from reverie.nets.inputs import Concat
from reverie.nets.rng import Rng
from reverie.nets.strided import (
    ImageDecoder,
    ImageEncoder,
    TimeConvs,
    initialize_as_torch,
)
from reverie.spaces import Spaces
from reverie.worlds.rollout import rollout
from reverie.worlds.vta.boundaries import (
    BOUNDARY,
    NO_BOUNDARY,
    all_boundaries_mask,
    annealed_temperature,
    bernoulli_entropy,
    limit_segments,
    log_density,
    sample_flags,
    signed_logits,
)
from reverie.worlds.vta.config import VTAConfig
from reverie.worlds.vta.pixels import PixelModel
from reverie.worlds.vta.states import (
    ELBOTerms,
    VTAState,
    WindowEvaluation,
    WindowPosterior,
)

UNIFORM_MARGIN = 1e-4
"""Minimum distance from 0 and 1 of the uniform samples for Gumbel noise, which would
be infinite there."""


class SigmoidGaussian(nn.Module):
    """Linear head for a Gaussian with standard deviations between 0 and 1."""

    def __init__(self, inputs: int, units: int):
        super().__init__()
        self.out = nn.Linear(inputs, 2 * units)

    def forward(self, x: Float[Tensor, "*b E"]) -> Gaussian:
        mean, raw = self.out(x).chunk(2, -1)
        return Gaussian(mean, torch.sigmoid(raw))


class VTA(nn.Module):
    """Models one image key, with or without actions. Implements `api.World`.

    In training mode, flags are sampled, the prior is subject to the segment limits,
    batch norm uses batch statistics, and each call of `loss` anneals the temperature.
    In evaluation mode, flags are the mode of their distribution.
    """

    updates: Tensor
    temperature: Tensor

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: VTAConfig,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        images = [key for key, space in obs_space.items() if space.is_image]
        if len(images) != 1:
            raise UserError(
                "VTA needs exactly one image among the observations, but found: "
                f"{', '.join(images) or 'none'}.\n"
                "  Fix: keep one image key, uint8 with shape (height, width, channels)."
            )
        (self.key,) = images
        height, width, channels = obs_space[self.key].shape
        if height != width:
            raise UserError(
                f"VTA needs square images, but {self.key!r} is {height} x {width}.\n"
                "  Fix: resize the recordings, for example with `reverie data convert "
                "SRC DST --size 32 32`."
            )
        self.config, self.dtype = config, dtype
        self.pixels = PixelModel(config)
        belief, state = config.belief, config.state
        self.actions = Concat(act_space) if act_space else None
        action_width = self.actions.width if self.actions else 0

        self.enc = ImageEncoder(width, channels, belief, config.bias)
        self.dec = ImageDecoder(width, channels, belief, config.bias)
        self.detector = TimeConvs(belief, belief, config.layers, 2)
        self.flag_prior = nn.Linear(belief, 2)  # prior of the next boundary flag
        # three encoders: upper forward, lower forward, upper backward
        self.encoders = GRU(belief, belief, 3, dtype)
        self.abs_cell = GRU(state + action_width, belief, dtype=dtype)
        self.obs_cell: GRU | None = None
        if not config.static_lower_belief:
            self.obs_cell = GRU(state + belief, belief, dtype=dtype)
        self.hold = SegmentHold()  # keeps the upper state within a segment
        self.abs_feat = nn.Linear(belief + state, belief)
        self.obs_feat = nn.Linear(belief + state, belief)
        self.prior_abs = SigmoidGaussian(belief, state)
        self.prior_obs = SigmoidGaussian(belief, state)
        self.post_abs = SigmoidGaussian(2 * belief, state)
        self.post_obs = SigmoidGaussian(2 * belief, state)
        self.register_buffer("updates", torch.zeros(()))  # number of updates
        self.register_buffer("temperature", torch.tensor(config.temperature))

    def initialize(self, generator: torch.Generator) -> None:
        initialize_as_torch(self, generator)

    @property
    def image_keys(self) -> Iterable[str]:
        return (self.key,)

    def initial(self, batch: int) -> VTAState:
        """Return the state before the first frame: the next step begins a segment."""
        config, like = self.config, self.flag_prior.weight
        belief = like.new_zeros(batch, config.belief)
        state = like.new_zeros(batch, config.state)
        # the mode of the next flag is BOUNDARY
        logits = signed_logits(like.new_zeros(batch, 2), 1.0)
        return VTAState(belief, state, belief, state, like.new_zeros(batch), logits)

    def loss(self, batch: Batch, rng: Rng) -> WorldLoss:
        """Return the losses of the modeled frames of windows `(B, T, ...)`."""
        if self.training:
            self.updates += 1
            config = self.config
            temperature = annealed_temperature(
                self.updates, config.temperature, config.min_temperature, config.anneal
            )
            self.temperature.copy_(temperature)
        terms = self.elbo(batch, rng)
        boundary = terms.posterior.mask[..., BOUNDARY].detach()
        metrics = {
            "temperature": self.temperature,
            "segments": boundary.sum(1).mean(),
            "boundary_prob/post": terms.post_prob.mean(),
            "boundary_prob/prior": terms.prior_prob.mean(),
            "boundary_entropy/post": bernoulli_entropy(terms.post_prob).mean(),
            "boundary_entropy/prior": bernoulli_entropy(terms.prior_prob).mean(),
            "elbo": -torch.stack(list(terms.losses.values())).sum(0).mean(),
        }
        metrics |= {f"unscaled/{key}": x.mean() for key, x in terms.losses.items()}
        metrics = {key: value.detach().clone() for key, value in metrics.items()}
        return WorldLoss(self._scaled(terms.losses), terms.posterior.states, metrics)

    @torch.no_grad()
    def evaluate(self, batch: Batch, rng: Rng) -> WindowEvaluation:
        """Evaluate windows; step t of every result belongs to frame t.

        For this, the loss `mask` is rolled by one step. The first frame, which always
        begins a segment, gets the loss of the frame after the last one.
        """
        terms = self.elbo(batch, rng)
        first = torch.ones_like(terms.post_prob[:, :1])  # always begins a segment
        detector_prob = torch.cat([first, terms.post_prob[:, :-1]], 1)
        prior_prob = torch.cat([first, terms.prior_prob[:, :-1]], 1)
        image = self.pixels.postprocess(terms.image).movedim(-3, -1)
        boundary = terms.posterior.mask[..., BOUNDARY] > 0.5
        losses = self._scaled(terms.losses)
        losses["mask"] = losses["mask"].roll(1, 1)
        return WindowEvaluation(losses, image, boundary, detector_prob, prior_prob)

    def state_from_frames(self, images: Tensor, rng: Rng) -> VTAState:
        """Encode context frames and sample the first state of the next segment."""
        embed = self._encode(self.pixels.preprocess(images, rng))
        unused = embed.new_zeros(*embed.shape[:2], 2)  # `abs_fwd` ignores the flags
        abs_fwd, _, _ = self._run_encoders(embed, unused)
        state = self.initial(len(embed))
        boundary = torch.ones_like(state.boundary)
        return self._sample_states(state, abs_fwd[:, -1], boundary, rng)

    def imagine(
        self, state: VTAState, policy: Policy, horizon: int, rng: Rng
    ) -> Rollout:
        """Roll out the prior frame by frame; flags are the mode, states are sampled."""
        return rollout(state, policy, horizon, partial(self._prior_step, rng, False))

    def imagine_segments(
        self, state: VTAState, policy: Policy, horizon: int, rng: Rng
    ) -> Rollout:
        """Roll out the prior segment by segment, with one step per segment."""
        return rollout(state, policy, horizon, partial(self._prior_step, rng, True))

    def decode(self, states: VTAState) -> Obs:
        feat = self.obs_feat(torch.cat([states.obs_belief, states.obs_state], -1))
        image = self.pixels.mean(self._decode(feat))
        return {self.key: self.pixels.postprocess(image).movedim(-3, -1)}

    def elbo(self, batch: Batch, rng: Rng) -> ELBOTerms:
        """Infer the posterior of windows and compute the terms of the ELBO.

        The losses are the reconstruction error `image`, and the KL of the upper level
        (`abs`), of the lower level (`obs`), and of the boundary flags (`mask`).
        """
        config = self.config
        context, length = config.context, config.length
        target = self.pixels.preprocess(batch[self.key], rng)
        post = self.infer(target, batch, rng)
        target = target[:, context : context + length]
        image = self._decode(post.obs_feat)

        next_frames = slice(context + 1, context + length + 1)
        prior_logits = post.states.next_flag_logits
        post_logits = post.detector_logits[:, next_frames]
        if self.training:
            prior_logits = limit_segments(
                prior_logits, post.mask, config.max_segment, config.max_segments
            )
        sample, temperature = post.log_sample[:, next_frames], self.temperature
        # with `kl_to_detector`, the KL of the upper level also trains the detector
        boundary = post.mask[..., BOUNDARY]
        boundary = boundary if config.kl_to_detector else boundary.detach()
        losses = {
            "image": self.pixels.nll(image, target),
            "abs": post.post_abs.kl(post.prior_abs) * boundary,
            "obs": post.post_obs.kl(post.prior_obs),
            "mask": log_density(post_logits, sample, temperature)
            - log_density(prior_logits, sample, temperature),
        }
        prior_prob = torch.softmax(prior_logits / temperature, -1)[..., BOUNDARY]
        post_prob = torch.softmax(post_logits / temperature, -1)[..., BOUNDARY]
        return ELBOTerms(post, self.pixels.mean(image), losses, prior_prob, post_prob)

    def infer(
        self, target: Float[Tensor, "B T c h w"], batch: Batch, rng: Rng
    ) -> WindowPosterior:
        """Sample the posterior states of windows, and compute their priors."""
        config = self.config
        context, length = config.context, config.length
        if target.shape[1] != config.window:
            raise UserError(
                f"VTA expects windows of {context} + {length} + {context} frames, but "
                f"got {target.shape[1]}.\n  Fix: use windows of {config.window} frames."
            )
        embed = self._encode(target)
        logits = self.detector(embed)
        noise = None
        if self.training:
            if config.random_boundary_steps:  # zero logits give random boundaries
                logits = logits * (self.updates > config.random_boundary_steps)
            noise = rng.uniform(logits) * (1 - 2 * UNIFORM_MARGIN) + UNIFORM_MARGIN
        mask, log_sample = sample_flags(logits, self.temperature, noise)
        forced = all_boundaries_mask(mask[:, :context])
        detected = mask[:, context + 1 : context + length]
        mask = torch.cat([forced, forced[:, :1], detected, forced], 1)  # (B, T, 2)
        abs_fwd, obs_fwd, abs_bwd = self._run_encoders(embed, mask)

        modeled = slice(context, context + length)
        mask = mask[:, modeled]
        update, copy = mask[..., BOUNDARY], mask[..., NO_BOUNDARY]
        # upper level: where a segment begins, the posterior depends on all frames
        # before it, and on the frames of the segment
        past = abs_fwd[:, context - 1 : context + length - 1]
        post_abs = self.post_abs(torch.cat([past, abs_bwd[:, modeled]], -1))
        abs_state = self.hold(post_abs.sample(rng), update, copy)
        inputs = [abs_state[:, :-1]]
        if self.actions is not None:
            actions = {key: batch[key] for key in self.actions.spaces}
            action_vectors = self.actions(actions, torch.float32)
            inputs.append(action_vectors[:, context : context + length - 1])
        gates = self.abs_cell.gates(torch.cat(inputs, -1))  # (1, B, S - 1, P)
        start = abs_fwd[:, context - 1]  # the first belief encodes the context frames
        change_at_boundaries = StateUpdate(
            output_scale=update[None, :, 1:], state_scale=copy[None, :, 1:]
        )
        beliefs = self.abs_cell.scan(gates, start[None], change_at_boundaries)[0]
        abs_belief = torch.cat([start[:, None], beliefs], 1)
        abs_feat = self.abs_feat(torch.cat([abs_belief, abs_state], -1))

        # lower level: the posterior depends on the frames of the segment so far
        post_obs = self.post_obs(torch.cat([obs_fwd[:, modeled], abs_feat], -1))
        obs_state = post_obs.sample(rng)
        obs_belief = abs_feat
        if self.obs_cell is not None:
            previous = F.pad(obs_state[:, :-1], (0, 0, 1, 0))  # zero at the first step
            gates = self.obs_cell.gates(torch.cat([previous, abs_feat], -1))
            new_belief = (update[..., None] * abs_feat)[None]
            reset_at_boundaries = StateUpdate(
                output_scale=copy[None], offset=new_belief
            )
            start = torch.zeros_like(abs_feat[None, :, 0])
            obs_belief = self.obs_cell.scan(gates, start, reset_at_boundaries)[0]
        obs_feat = self.obs_feat(torch.cat([obs_belief, obs_state], -1))
        flag_logits = self.flag_prior(obs_feat)
        levels = (abs_belief, abs_state, obs_belief, obs_state)
        return WindowPosterior(
            *(embed, logits, log_sample),
            *(abs_fwd, abs_bwd, obs_fwd),
            *(mask, abs_feat, obs_feat),
            VTAState(*levels, update, flag_logits),
            *(self.prior_abs(abs_belief), post_abs),
            *(self.prior_obs(obs_belief), post_obs),
        )

    def _run_encoders(
        self, embed: Float[Tensor, "B T D"], mask: Float[Tensor, "B T 2"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the three recurrent encoders in one loop over time.

        The first (upper level, forward) is never reset. The second (lower level,
        forward) is reset before the first frame of each segment. The third (upper
        level) runs backwards, and is reset after the first frame of each segment.
        """
        copy = mask[..., NO_BOUNDARY]
        next_copy = torch.roll(copy, -1, 1)
        input_scale = torch.stack([torch.ones_like(copy), copy, next_copy])
        start = embed.new_zeros(3, len(embed), self.config.belief)
        gates = self.encoders.gates(embed)
        abs_fwd, obs_fwd, abs_bwd = self.encoders.scan(
            gates, start, StateUpdate(input_scale), backwards={2}
        )
        return abs_fwd, obs_fwd, abs_bwd

    def _prior_step(
        self, rng: Rng, by_segment: bool, state: VTAState, action: dict[str, Tensor]
    ) -> VTAState:
        """Return the next state, or with `by_segment` the first of the next segment."""
        logits = state.next_flag_logits
        is_boundary = (logits[:, BOUNDARY] >= logits[:, NO_BOUNDARY]) | by_segment
        inputs = [state.abs_state]
        if self.actions is not None:
            inputs.append(self.actions(action, torch.float32))
        gates = self.abs_cell.gates(torch.cat(inputs, -1))
        updated = self.abs_cell.step(gates, state.abs_belief[None])[0]
        belief = torch.where(is_boundary[:, None], updated, state.abs_belief)
        boundary = is_boundary.to(state.boundary.dtype)
        return self._sample_states(state, belief, boundary, rng)

    def _sample_states(
        self,
        state: VTAState,
        abs_belief: Float[Tensor, "B D"],
        boundary: Float[Tensor, " B"],
        rng: Rng,
    ) -> VTAState:
        """Sample the next upper and lower state, given the next upper belief."""
        is_boundary = boundary[:, None] > 0
        sample = self.prior_abs(abs_belief).sample(rng)
        abs_state = torch.where(is_boundary, sample, state.abs_state)
        abs_feat = self.abs_feat(torch.cat([abs_belief, abs_state], -1))
        obs_belief = abs_feat
        if self.obs_cell is not None:
            gates = self.obs_cell.gates(torch.cat([state.obs_state, abs_feat], -1))
            updated = self.obs_cell.step(gates, state.obs_belief[None])[0]
            obs_belief = torch.where(is_boundary, abs_feat, updated)
        obs_state = self.prior_obs(obs_belief).sample(rng)
        obs_feat = self.obs_feat(torch.cat([obs_belief, obs_state], -1))
        logits = self.flag_prior(obs_feat)
        return VTAState(abs_belief, abs_state, obs_belief, obs_state, boundary, logits)

    def _encode(self, x: Float[Tensor, "B T c h w"]) -> Float[Tensor, "B T D"]:
        frames = x.flatten(0, 1)
        if frames.is_cuda:
            frames = frames.contiguous(memory_format=torch.channels_last)
        with self._precision(frames):
            embed: Tensor = self.enc(frames)
        return embed.float().reshape(*x.shape[:2], -1)

    def _decode(self, feat: Float[Tensor, "*b D"]) -> Float[Tensor, "*b c h w"]:
        with self._precision(feat):
            image: Tensor = self.dec(feat.flatten(0, -2))
        return image.float().reshape(*feat.shape[:-1], *image.shape[1:])

    def _scaled(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Multiply the losses with their configured weights."""
        config = self.config
        return {
            "image": losses["image"],
            "abs": config.abs_scale * losses["abs"],
            "obs": config.obs_scale * losses["obs"],
            "mask": config.mask_scale * losses["mask"],
        }

    def _precision(self, x: Tensor) -> AbstractContextManager[Any]:
        """Return an autocast context for the convolutions if `dtype` is not float32."""
        enabled = self.dtype != torch.float32
        dtype = self.dtype if enabled else None
        return torch.autocast(x.device.type, dtype, enabled, cache_enabled=False)
