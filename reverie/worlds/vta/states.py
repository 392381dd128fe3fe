"""States of the VTA world, and the results of inference on a window.

Step t of a field `next_flag_logits` belongs to the flag of step t + 1. In
`WindowEvaluation`, step t of every field belongs to frame t. The shape letters are
those of `world.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from reverie.nets.gaussian import Gaussian


class VTAState(NamedTuple):
    """Upper (`abs_`) and lower (`obs_`) level, and the prior of the next flag."""

    abs_belief: Float[Tensor, "*b D"]
    abs_state: Float[Tensor, "*b Z"]
    obs_belief: Float[Tensor, "*b D"]
    obs_state: Float[Tensor, "*b Z"]
    boundary: Float[Tensor, "*b"]  # 1 if this step begins a segment
    next_flag_logits: Float[Tensor, "*b 2"]


class WindowPosterior(NamedTuple):
    """Encoder outputs, samples and distributions of a window (see `VTA.infer`)."""

    embed: Float[Tensor, "B T D"]
    detector_logits: Float[Tensor, "B T 2"]
    log_sample: Float[Tensor, "B T 2"]  # of the boundary flags
    abs_fwd: Float[Tensor, "B T D"]  # recurrent encoders, see `VTA._run_encoders`
    abs_bwd: Float[Tensor, "B T D"]
    obs_fwd: Float[Tensor, "B T D"]
    mask: Float[Tensor, "B S 2"]  # boundary flags
    abs_feat: Float[Tensor, "B S D"]
    obs_feat: Float[Tensor, "B S D"]
    states: VTAState
    prior_abs: Gaussian
    post_abs: Gaussian
    prior_obs: Gaussian
    post_obs: Gaussian


class ELBOTerms(NamedTuple):
    """The posterior of a window, its reconstruction, and the terms of the ELBO."""

    posterior: WindowPosterior
    image: Float[Tensor, "B S c h w"]  # mean of the pixel likelihood
    losses: dict[str, Tensor]  # negative ELBO terms, each (B, S), not scaled
    prior_prob: Float[Tensor, "B S"]  # boundary probability at the *next* step, prior
    post_prob: Float[Tensor, "B S"]  # boundary probability at the *next* step, detector


class WindowEvaluation(NamedTuple):
    """Losses, reconstructions and boundaries of the modeled frames of windows."""

    losses: dict[str, Tensor]  # each (B, S), scaled as in training
    image: Float[Tensor, "B S h w c"]  # reconstruction, in [0, 1]
    boundary: Bool[Tensor, "B S"]  # True if a segment begins with this frame
    detector_prob: Float[Tensor, "B S"]  # boundary probability, detector
    prior_prob: Float[Tensor, "B S"]  # boundary probability, prior (at frame t - 1)
