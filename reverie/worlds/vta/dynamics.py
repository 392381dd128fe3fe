"""Dynamics of recurrent VTA: upper and lower level, and boundary flags.

`tokens` are the embedded observations, as in the RSSM. Shape letters of this file: `U`
and `Y` belief and state of the upper level, `C` both together, `D` and `Z` belief and
state of the lower level.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.nets.blocks import Linear, Norm
from reverie.nets.gaussian import Gaussian
from reverie.nets.inputs import Concat
from reverie.nets.rng import Rng
from reverie.nets.strided import TimeConvs
from reverie.nets.tree import tree_where
from reverie.spaces import Spaces
from reverie.worlds.rollout import stack_time
from reverie.worlds.vta.boundaries import (
    BOUNDARY,
    NO_BOUNDARY,
    all_boundaries_mask,
    sample_flags,
    signed_logits,
)
from reverie.worlds.vta.config import RecurrentVTAConfig

UNIFORM_MARGIN = 1e-8
"""Minimum distance from 0 and 1 of the uniform samples for Gumbel noise, which would
be infinite there."""
NORM = "layer1em3"
"""Layer norm with an epsilon of 1e-3."""


class RecurrentVTAState(NamedTuple):
    """Upper (`abs_`) and lower (`obs_`) level, and counters of the segment limits."""

    abs_belief: Float[Tensor, "*b U"]
    abs_stoch: Float[Tensor, "*b Y"]
    obs_belief: Float[Tensor, "*b D"]
    obs_stoch: Float[Tensor, "*b Z"]
    segment_length: Float[Tensor, "*b"]  # steps in the current segment
    segment_count: Float[Tensor, "*b"]  # segments since the start of the episode
    boundary: Float[Tensor, "*b"]  # 1 if this step begins a segment


class VTADistributions(NamedTuple):
    """Priors and posteriors of both levels, and the logits of the boundary flags."""

    prior_abs: Gaussian
    post_abs: Gaussian
    prior_obs: Gaussian
    post_obs: Gaussian
    prior_flag: Float[Tensor, "*b 2"]
    post_flag: Float[Tensor, "*b 2"]


class RecurrentVTADynamics(nn.Module):
    """Recurrent cells, priors and posteriors of both levels, and boundary flags."""

    def __init__(self, token_width: int, act_space: Spaces, config: RecurrentVTAConfig):
        super().__init__()
        self.config = config
        self.actions = Concat(act_space)
        hidden, acts = config.hidden, self.actions.width
        upper = config.abs_belief + config.abs_stoch
        lower = config.obs_belief + config.obs_stoch
        # upper belief at the start of an episode
        self.start = nn.Parameter(torch.zeros(config.abs_belief))
        # prior of the next boundary flag, computed from the lower level
        self.flag_prior_in = DenseNormSiLU(lower, hidden)
        self.flag_prior_out = Linear(hidden, 2)
        inputs = token_width + int(config.reward_to_detector)
        # posterior of all boundary flags of a sequence
        self.detector = TimeConvs(inputs, hidden, config.layers, 2, F.silu)
        self.abs_cell = NormGRUCell(config.abs_stoch + acts, hidden, config.abs_belief)
        self.obs_cell = NormGRUCell(
            config.obs_stoch + upper + acts, hidden, config.obs_belief
        )
        # belief of the lower level at the start of a segment
        self.reset_belief = DenseNormSiLU(upper, config.obs_belief)

        def head(inputs: int, units: int) -> GaussianHead:
            return GaussianHead(inputs, hidden, units, config.min_std)

        self.prior_abs = head(config.abs_belief, config.abs_stoch)
        self.post_abs = head(config.abs_belief + token_width, config.abs_stoch)
        self.prior_obs = head(config.obs_belief, config.obs_stoch)
        self.post_obs = head(config.obs_belief + upper + token_width, config.obs_stoch)

    def initial(self, batch: int, dtype: torch.dtype) -> RecurrentVTAState:
        config, device = self.config, self.start.device
        zeros = torch.zeros(batch, device=device)
        sizes = (config.abs_stoch, config.obs_belief, config.obs_stoch)
        abs_stoch, obs_belief, obs_stoch = (
            torch.zeros(batch, n, dtype=dtype, device=device) for n in sizes
        )
        start = self.start.to(dtype).expand(batch, -1)
        return RecurrentVTAState(
            start, abs_stoch, obs_belief, obs_stoch, zeros, zeros, zeros
        )

    def observe(
        self,
        state: RecurrentVTAState,
        tokens: Float[Tensor, "B T E"],
        detector_logits: Float[Tensor, "B T 2"] | None,
        prevact: dict[str, Tensor],
        is_first: Bool[Tensor, "B T"],
        rng: Rng,
    ) -> tuple[RecurrentVTAState, VTADistributions]:
        """Return the posterior states of a sequence, with their distributions.

        Without `detector_logits`, flags come from their prior. In training mode, flags
        are sampled; otherwise they are the mode.
        """
        dtype = tokens.dtype
        actions = torch.where(is_first[..., None], 0, self.actions(prevact, dtype))
        noise = None
        if self.training:
            noise = self._uniform(tokens[..., :2].float(), rng)
        initial = self.initial(tokens.shape[0], dtype)
        states, dists = [], []
        for t in range(tokens.shape[1]):
            token, action = tokens[:, t], actions[:, t]
            state = tree_where(is_first[:, t], initial, state)
            prior_flag = self.prior_flag(state)
            post_flag = prior_flag
            if detector_logits is not None:
                post_flag = self.limit_segments(detector_logits[:, t], state)
            uniform = None if noise is None else noise[:, t]
            mask = sample_flags(post_flag, self.config.temperature, uniform).mask
            state = self.update_upper(state, mask, action)
            prior_abs = self.prior_abs(state.abs_belief)
            post_abs = self.post_abs(torch.cat([state.abs_belief, token], -1))
            state = _replace_upper(state, mask, post_abs.sample(rng))
            belief, upper = self.lower_belief(state, mask, action)
            prior_obs = self.prior_obs(belief)
            post_obs = self.post_obs(torch.cat([belief, upper, token], -1))
            sample = post_obs.sample(rng).to(dtype)
            state = state._replace(obs_belief=belief, obs_stoch=sample)
            states.append(state)
            dists.append(
                VTADistributions(
                    prior_abs, post_abs, prior_obs, post_obs, prior_flag, post_flag
                )
            )
        return stack_time(states), stack_time(dists)

    def imagine(
        self, rng: Rng, state: RecurrentVTAState, action: dict[str, Tensor]
    ) -> RecurrentVTAState:
        """Imagine one step: return the next state, sampled from the priors."""
        action_vector: Tensor = self.actions(action, state.abs_belief.dtype)
        mask = self._imagined_flags(state, rng)
        if self.config.imagination == "jumpy":
            mask = all_boundaries_mask(mask)
        state = self.update_upper(state, mask, action_vector)
        sample = self.prior_abs(state.abs_belief).sample(rng)
        state = _replace_upper(state, mask, sample)
        belief, _ = self.lower_belief(state, mask, action_vector)
        stoch = self.prior_obs(belief).sample(rng).to(state.abs_belief.dtype)
        return state._replace(obs_belief=belief, obs_stoch=stoch)

    def prior_flag(self, state: RecurrentVTAState) -> Float[Tensor, "*b 2"]:
        """Return the prior logits of the next flag, within the segment limits."""
        lower = torch.cat([state.obs_belief, state.obs_stoch], -1)
        logits = self.flag_prior_out(self.flag_prior_in(lower)).float()
        return self.limit_segments(logits, state)

    def limit_segments(
        self, logits: Float[Tensor, "*b 2"], state: RecurrentVTAState
    ) -> Float[Tensor, "*b 2"]:
        """Force flag logits where a segment limit has been reached."""
        config = self.config
        if not config.forced_logit:
            return logits
        # logits of a forced boundary; negated, they forbid a boundary
        forced = signed_logits(logits, config.forced_logit)
        too_long = (state.segment_length >= config.max_segment)[..., None]
        too_many = (state.segment_count >= config.max_segments)[..., None]
        return torch.where(too_many, -forced, torch.where(too_long, forced, logits))

    def update_upper(
        self,
        state: RecurrentVTAState,
        mask: Float[Tensor, "B 2"],
        action: Float[Tensor, "B A"],
    ) -> RecurrentVTAState:
        """Update the upper belief and the segment counters for given flags."""
        update, copy = mask[:, BOUNDARY], mask[:, NO_BOUNDARY]
        count = state.segment_count
        new, old = (x[:, None].to(state.abs_belief.dtype) for x in (update, copy))
        inputs = torch.cat([state.abs_stoch, action], -1)
        updated = self.abs_cell(inputs, state.abs_belief)
        return state._replace(
            abs_belief=new * updated + old * state.abs_belief,
            segment_length=update + copy * (state.segment_length + 1),
            segment_count=update * (count + 1) + copy * count,
            boundary=update,
        )

    def lower_belief(
        self,
        state: RecurrentVTAState,
        mask: Float[Tensor, "B 2"],
        action: Float[Tensor, "B A"],
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B C"]]:
        """Return the next lower belief, and the upper level that it depends on."""
        new, old = (mask[:, i, None].to(action.dtype) for i in (BOUNDARY, NO_BOUNDARY))
        upper = torch.cat([state.abs_belief, state.abs_stoch], -1)
        inputs = torch.cat([state.obs_stoch, upper, action], -1)
        updated = self.obs_cell(inputs, state.obs_belief)
        return new * self.reset_belief(upper) + old * updated, upper

    def _imagined_flags(
        self, state: RecurrentVTAState, rng: Rng
    ) -> Float[Tensor, "B 2"]:
        """Return the boundary flags of an imagined step (`imagined_boundaries`)."""
        config = self.config
        if config.imagination == "full" and config.imagined_boundaries == "prior":
            logits, noise = self.prior_flag(state), None
            if self.training:
                noise = self._uniform(logits, rng)
            return sample_flags(logits, config.temperature, noise).mask
        update = torch.zeros_like(state.segment_length)
        if config.imagined_boundaries == "fixed":  # one step earlier than the limit
            update = (state.segment_length >= config.max_segment - 1).float()
        return torch.stack([update, 1 - update], -1)

    def _uniform(self, like: Tensor, rng: Rng) -> Tensor:
        """Return uniform samples for Gumbel noise, in the shape of `like`."""
        return rng.uniform(like).clamp(UNIFORM_MARGIN, 1 - UNIFORM_MARGIN)


def _replace_upper(
    state: RecurrentVTAState, mask: Float[Tensor, "B 2"], sample: Float[Tensor, "B Y"]
) -> RecurrentVTAState:
    """Replace the upper state by the sample where a segment begins."""
    new, old = mask[:, BOUNDARY, None], mask[:, NO_BOUNDARY, None]
    stoch = (new * sample + old * state.abs_stoch).to(state.abs_belief.dtype)
    return state._replace(abs_stoch=stoch)


class LinearWithoutBias(Linear):
    """A dense layer whose bias is zero and not trained."""

    def __init__(self, inputs: int, units: int):
        super().__init__(inputs, units)
        self.bias.requires_grad_(False)


class DenseNormSiLU(nn.Module):
    """A dense layer, layer norm and SiLU."""

    def __init__(self, inputs: int, units: int):
        super().__init__()
        self.linear = LinearWithoutBias(inputs, units)
        self.norm = Norm(NORM, units)

    def forward(self, x: Float[Tensor, "*b E"]) -> Float[Tensor, "*b F"]:
        return F.silu(self.norm(self.linear(x)))


class NormGRUCell(nn.Module):
    """An input layer, then a GRU cell with one layer norm over all gates."""

    def __init__(self, inputs: int, hidden: int, belief: int):
        super().__init__()
        self.into = DenseNormSiLU(inputs, hidden)
        self.linear = LinearWithoutBias(hidden + belief, 3 * belief)
        self.norm = Norm(NORM, 3 * belief)

    def forward(
        self, x: Float[Tensor, "B E"], belief: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B D"]:
        gates = self.norm(self.linear(torch.cat([self.into(x), belief], -1)))
        reset, candidate, update = gates.chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        return torch.lerp(belief, candidate, torch.sigmoid(update - 1))


class GaussianHead(nn.Module):
    """Predicts mean and standard deviation of a Gaussian.

    Inputs whose width is not `hidden` first pass through a hidden layer.
    """

    def __init__(self, inputs: int, hidden: int, units: int, min_std: float):
        super().__init__()
        self.feat = DenseNormSiLU(inputs, hidden) if inputs != hidden else nn.Identity()
        self.out = Linear(hidden, (2, units))
        self.min_std = min_std

    def forward(self, x: Float[Tensor, "*b E"]) -> Gaussian:
        mean, raw = self.out(self.feat(x)).float().unbind(-2)
        return Gaussian(mean, F.softplus(raw) + self.min_std)
