"""Configs of the two VTA worlds: for windows of sequences, and for Dreamer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from reverie.worlds.rssm.config import units_for_weights


@dataclass(frozen=True)
class VTAConfig:
    """Config of the VTA world for sequences.

    The defaults are the values that a port with actions
    (github.com/Mainlst/stable-deep-world-model) uses for bouncing balls. The authors'
    code for the 3D maze (github.com/taesupkim/vta) corresponds to `bias=False`,
    `loss="gaussian"`, `levels="spread"` and `bits=5`; the port uses `levels="floor"`
    for its maze.
    """

    context: int = 5
    """Context frames before the modeled frames of a window, and after them."""
    length: int = 20
    """Modeled frames of a window."""
    belief: int = 128
    """Size of the deterministic states (beliefs) of both levels, and of the features
    computed from belief and state."""
    state: int = 8
    """Size of the stochastic states."""
    layers: int = 3
    """Hidden temporal convolutions of the boundary detector."""
    bias: bool = True
    """Add a bias to convolutions that are followed by batch norm. It has no effect on
    outputs, only on the number of weights."""
    loss: Literal["bernoulli", "gaussian"] = "bernoulli"
    """Pixel likelihood: Bernoulli with sigmoid mean, or Gaussian with tanh mean."""
    obs_std: float = 1.0
    """Standard deviation of the Gaussian pixel likelihood."""
    levels: Literal["all", "floor", "spread"] = "all"
    """Pixel quantization: none (`all`), to `bits` bits in [0, 1] (`floor`), or to
    `bits` bits with uniform noise in [-1, 1) (`spread`)."""
    bits: int = 5
    """Bits per pixel channel for `levels` floor and spread."""
    max_segment: int = 8
    """Segment length at which the prior forces a boundary, in steps."""
    max_segments: int = 5
    """Number of segments in a window after which the prior forbids boundaries."""
    temperature: float = 1.0
    """Initial Gumbel-softmax temperature of the boundary flags."""
    min_temperature: float = 0.1
    """Final Gumbel-softmax temperature."""
    anneal: float = 100.0
    """Decay time of the temperature in thousands of updates (after it, 37 % of the
    difference to the final temperature remain); 0 for a constant temperature."""
    static_lower_belief: bool = False
    """Keep the lower belief constant within a segment, instead of updating it with an
    RNN. The lower prior is then the same at each step of a segment, so a lasting change
    has a lower KL cost if it is encoded by a new segment."""
    random_boundary_steps: int = 0
    """Warm-up: number of updates with random boundaries (probability 0.5) before the
    detector is used. Without it, the detector can collapse to no boundaries, or one at
    each frame, before the upper state encodes anything useful."""
    kl_to_detector: bool = False
    """Backpropagate the upper level's KL into the boundary detector, as the gradient of
    the ELBO does. The original detaches the flags in this term."""
    obs_scale: float = 1.0
    """Weight of the lower level's KL. Above 1, a change that the prior does not
    predict costs more within a segment than at its start, so the model learns to begin
    segments at such changes."""
    abs_scale: float = 1.0
    """Weight of the upper level's KL."""
    mask_scale: float = 1.0
    """Weight of the boundary flags' KL."""

    def __post_init__(self) -> None:
        sizes = (self.context, self.belief, self.state)
        if min(sizes) < 1 or self.layers < 0 or self.length < 2:
            raise ValueError(
                "context, belief and state must be at least 1, layers at least 0, and "
                "length at least 2"
            )
        if not 1 <= self.bits <= 8:
            raise ValueError("bits must be between 1 and 8")
        if self.random_boundary_steps < 0:
            raise ValueError("random_boundary_steps must be at least 0")
        if not 0 < self.min_temperature <= self.temperature:
            raise ValueError("min_temperature must be between 0 and temperature")
        if min(self.max_segment, self.max_segments) < 1 or self.obs_std <= 0:
            raise ValueError("segment limits and obs_std must be above 0")
        scales = (self.obs_scale, self.abs_scale, self.mask_scale)
        for number in (*scales, self.anneal, self.obs_std, self.temperature):
            if not 0 <= number < math.inf:
                raise ValueError(
                    "obs_scale, abs_scale, mask_scale, anneal, obs_std and temperature "
                    "must be finite and not below 0"
                )
        if self.loss == "bernoulli" and self.levels == "spread":
            raise ValueError(
                "levels must not be spread with the bernoulli loss, which takes pixels "
                "in [0, 1]"
            )

    @property
    def window(self) -> int:
        """Number of frames in a window, context included."""
        return self.length + 2 * self.context


@dataclass(frozen=True)
class RecurrentVTAConfig:
    """Config of the VTA world for Dreamer.

    The defaults are those of github.com/Mainlst/stable-deep-world-model.
    """

    abs_belief: int = 512
    """Size of the upper deterministic state (belief)."""
    abs_stoch: int = 32
    """Size of the upper stochastic state."""
    obs_belief: int = 512
    """Size of the lower deterministic state (belief)."""
    obs_stoch: int = 32
    """Size of the lower stochastic state."""
    hidden: int = 512
    """Units of the hidden layers."""
    layers: int = 1
    """Hidden temporal convolutions of the boundary detector."""
    min_std: float = 0.1
    """Minimum standard deviation of the stochastic states."""
    max_segment: int = 50
    """Segment length at which a boundary is forced, in steps."""
    max_segments: int = 200
    """Number of segments in an episode after which boundaries are forbidden."""
    temperature: float = 1.0
    """Gumbel-softmax temperature of the boundary flags."""
    forced_logit: float = 10.0
    """Logit of a flag forced by one of the two limits; 0 disables both limits."""
    free_nats: float = 1.0
    """Free nats: the KL of both levels together is set to this value if it is lower."""
    imagination: Literal["full", "jumpy"] = "full"
    """Imagine step by step, or one step per segment."""
    imagined_boundaries: Literal["prior", "fixed", "none"] = "prior"
    """Boundaries of full imagination: sampled from the prior, fixed (segments of
    `max_segment - 1` steps), or none."""
    reward_to_detector: bool = False
    """Give the boundary detector the rewards in addition to the embeddings."""
    boundary_rate: float = 0.0
    """Target fraction of steps that begin a segment, for the regularizer
    `loss_scales.boundary_rate`; 0 disables it."""

    def __post_init__(self) -> None:
        sizes = (self.abs_belief, self.abs_stoch, self.obs_belief, self.obs_stoch)
        limits = (self.hidden, self.max_segment, self.max_segments)
        if min(*sizes, *limits) < 1 or self.layers < 0:
            raise ValueError("sizes and limits must be at least 1, layers at least 0")
        if self.forced_logit < 0:
            raise ValueError("forced_logit must be at least 0 (0 disables the limits)")
        is_positive = self.temperature > 0 and self.min_std > 0
        if not (is_positive and 0 <= self.boundary_rate < 1 and self.free_nats >= 0):
            raise ValueError(
                "temperature and min_std must be above 0, free_nats at least 0, and "
                "boundary_rate from 0 to below 1"
            )

    @property
    def feature_widths(self) -> tuple[int, int]:
        """Sizes of the deterministic and the stochastic features of both levels."""
        belief = self.abs_belief + self.obs_belief
        return belief, self.abs_stoch + self.obs_stoch

    @property
    def equivalent_units(self) -> int:
        """Units of the size preset with about as many weights in its dynamics, to
        estimate the memory of training."""
        hidden, (belief, stoch) = self.hidden, self.feature_widths
        upper = self.abs_belief + self.abs_stoch
        cells = 3 * self.abs_belief * (hidden + self.abs_belief)
        cells += 3 * self.obs_belief * (hidden + self.obs_belief)
        reset = upper * self.obs_belief
        dense = hidden * (3 * belief + 6 * stoch + upper)
        return units_for_weights(cells + reset + dense)
