"""Training segments of Δ-IRIS, and conversions of their frames.

The time convention here is that of the original: reward and end of a row belong to the
action of the *same* row (in the replay they are stored one row later), and the last
observation of an episode is missing. A segment may extend beyond its episode on either
side; such padding rows are black, with action, reward and end 0, and not `real`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from reverie.distributed.collective import all_reduce_with_grad, global_count


class EpisodeSegment(NamedTuple):
    """A batch of segments of `L` frames each."""

    image: UInt8[Tensor, "B L h w c"]
    action: Int[Tensor, "B L"]
    reward: Float[Tensor, "B L"]
    end: Bool[Tensor, "B L"]
    real: Bool[Tensor, "B L"]  # False for padding rows


def to_float(image: UInt8[Tensor, "*b"], dtype: torch.dtype) -> Float[Tensor, "*b"]:
    """Convert uint8 pixels to floats in [0, 1]."""
    return image.to(dtype) / 255


def to_uint8(image: Float[Tensor, "*b"]) -> UInt8[Tensor, "*b"]:
    """Convert floats in [0, 1] to the nearest uint8 pixels."""
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def scale_by_mask(
    loss: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Mask and scale a loss so that its mean is the mean over unmasked steps."""
    count = all_reduce_with_grad(mask.sum()).clamp(min=1)
    weight = mask / count * global_count(mask.numel())
    return torch.where(mask, loss, 0) * weight
