"""What Δ-IRIS trains on, and how its frames become numbers.

Time is that of the original here: the reward and the end of a row belong to the action
of the *same* row (in Reverie's rows they would be found one row later), and the last
observation of an episode is not there. A segment may stick out of its episode on either
side; such rows are black, with action, reward and end 0, and are not `real`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor


class Segment(NamedTuple):
    """A batch of stretches of episodes, `L` frames each."""

    image: UInt8[Tensor, "B L h w c"]
    action: Int[Tensor, "B L"]
    reward: Float[Tensor, "B L"]
    end: Bool[Tensor, "B L"]
    real: Bool[Tensor, "B L"]


def pixels(image: UInt8[Tensor, "*b"], dtype: torch.dtype) -> Float[Tensor, "*b"]:
    """Bytes as numbers in [0, 1]."""
    return image.to(dtype) / 255


def to_bytes(image: Float[Tensor, "*b"]) -> UInt8[Tensor, "*b"]:
    """Numbers as the nearest bytes."""
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def mean_where(
    loss: Float[Tensor, "B T"], where: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Scale a loss so that its plain mean is the mean over the marked entries."""
    weight = where / where.sum().clamp(min=1) * where.numel()
    return torch.where(where, loss, 0) * weight
