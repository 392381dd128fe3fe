"""Settings of the VTA world."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class VTAConfig:
    """Defaults are those of the port to bouncing balls.

    The authors' own code for the maze has `bias=False`, `loss="gaussian"`,
    `levels="spread"` and `bits=5`; the port's maze has `levels="floor"` instead.
    """

    context: int = 5
    """Frames before the modelled ones, and as many after them."""
    length: int = 20
    """Modelled frames of a window."""
    belief: int = 128
    """Width of beliefs and features."""
    state: int = 8
    """Width of the stochastic states."""
    layers: int = 3
    """Hidden convolutions over time of the boundary detector."""
    bias: bool = True
    """Give image convolutions in front of a norm a bias that cannot matter."""
    loss: Literal["bernoulli", "gaussian"] = "bernoulli"
    """How pixels are compared: Bernoulli of a sigmoid, or Gaussian around a tanh."""
    obs_std: float = 1.0
    """Deviation of the Gaussian."""
    levels: Literal["all", "floor", "spread"] = "all"
    """Pixel values: all 256, cut to fewer in [0, 1], or cut and spread over [-1, 1)."""
    bits: int = 5
    """Where they are cut, to this many bits."""
    max_segment: int = 8
    """Steps after which the prior is certain that a segment ends."""
    max_segments: int = 5
    """Segments after which it is certain that none begins."""
    temperature: float = 1.0
    """Of the flags, in the beginning."""
    min_temperature: float = 0.1
    """Of the flags, in the end."""
    anneal: float = 100.0
    """How slowly one becomes the other, 0 for never: after this many thousand updates
    37 % of the way are left."""
    static_lower_belief: bool = False
    """Hold the lower belief, so that within a segment nothing is foreseen to change. A
    segment then is a stretch in which something stays as it is, told once, by the upper
    state; what changes is told by the lower state, anew at each step."""
    random_boundary_steps: int = 0
    """Updates in which coins decide where segments begin, before the detector does.
    Until the upper state has learnt to tell something, no segment is worth its price,
    and a detector that is asked too early learns to find none, or each frame."""
    kl_to_detector: bool = False
    """Let the detector know what a new segment costs the upper level. The original
    hides that from it, so its gradient is not that of the bound."""
    obs_scale: float = 1.0
    """Weight of the KL of the lower level. Above 1 what surprises within a segment
    costs more than a new segment does, so segments end at surprises."""
    abs_scale: float = 1.0
    """Weight of the KL of the upper level."""
    mask_scale: float = 1.0
    """Weight of the KL of the flags."""

    def __post_init__(self) -> None:
        sizes = (self.context, self.belief, self.state)
        if min(sizes) < 1 or self.layers < 0 or self.length < 2:
            raise ValueError(
                "context, belief and state must be at least 1, layers 0, length 2"
            )
        if not 1 <= self.bits <= 8:
            raise ValueError("bits must be between 1 and 8")
        if self.random_boundary_steps < 0:
            raise ValueError("coins must be at least 0")
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
                "levels cannot be spread with a bernoulli loss, which takes pixels in "
                "[0, 1]"
            )

    @property
    def window(self) -> int:
        """Frames of a window."""
        return self.length + 2 * self.context
