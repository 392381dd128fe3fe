"""What VTA makes of frames: where it is, and how well they are explained.

An entry of `foreseen` is about the *next* frame, but in `Watched` about its own. The
letters are those of `vta.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from reverie.nets.gaussian import Gaussian
from reverie.worlds.vta.boundaries import READ


class Chapter(NamedTuple):
    """Where the world is: both levels, and what it expects of the next flag."""

    abs_belief: Float[Tensor, "*b D"]
    abs_state: Float[Tensor, "*b Z"]
    obs_belief: Float[Tensor, "*b D"]
    obs_state: Float[Tensor, "*b Z"]
    read: Float[Tensor, "*b"]  # whether this step began a segment
    foreseen: Float[Tensor, "*b 2"]  # logits of the next step's flag


class Story(NamedTuple):
    """Everything the world makes of a window."""

    embed: Float[Tensor, "B T D"]
    found: Float[Tensor, "B T 2"]  # the detector's logits
    log_sample: Float[Tensor, "B T 2"]
    abs_fwd: Float[Tensor, "B T D"]
    abs_bwd: Float[Tensor, "B T D"]
    obs_fwd: Float[Tensor, "B T D"]
    mask: Float[Tensor, "B S 2"]
    abs_belief: Float[Tensor, "B S D"]
    abs_state: Float[Tensor, "B S Z"]
    abs_feat: Float[Tensor, "B S D"]
    obs_belief: Float[Tensor, "B S D"]
    obs_state: Float[Tensor, "B S Z"]
    obs_feat: Float[Tensor, "B S D"]
    foreseen: Float[Tensor, "B S 2"]  # the prior's logits of the *next* flag
    prior_abs: Gaussian
    post_abs: Gaussian
    prior_obs: Gaussian
    post_obs: Gaussian

    @property
    def chapters(self) -> Chapter:
        return Chapter(
            self.abs_belief,
            self.abs_state,
            self.obs_belief,
            self.obs_state,
            self.mask[..., READ],
            self.foreseen,
        )


class Explained(NamedTuple):
    """A window, how well each of its steps is explained, and the flags' odds."""

    story: Story
    image: Float[Tensor, "B S c h w"]  # as the decoder drew it
    losses: dict[str, Tensor]  # each (B, S), not weighed
    prior_read: Float[Tensor, "B S"]  # chances of READ at the *next* step
    post_read: Float[Tensor, "B S"]


class Watched(NamedTuple):
    """What a watcher wants to know about the modelled frames of some windows."""

    losses: dict[str, Tensor]  # each (B, S), as they are weighed in training
    image: Float[Tensor, "B S h w c"]  # drawn again, in [0, 1]
    read: Bool[Tensor, "B S"]  # whether a segment begins with this very frame
    chance: Float[Tensor, "B S"]  # of that, by the detector
    foreseen: Float[Tensor, "B S"]  # of that, by the prior one frame earlier
