"""Images with fewer levels than 256, so that a likelihood means something.

A density can grow without bound on values that are really counts. Cutting the values to
a few levels, and spreading each level evenly over its bin, takes that away.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def floor_levels(x: Float[Tensor, "*any"], bits: int) -> Float[Tensor, "*any"]:
    """Values in [0, 1] cut to multiples of 2 ** -bits; they stay in [0, 1]."""
    bins = float(2**bits)
    return torch.floor(x * bins) / bins


def spread_levels(
    x: Float[Tensor, "*any"], bits: int, noise: Float[Tensor, "*any"]
) -> Float[Tensor, "*any"]:
    """Values in [0, 1] cut to 2 ** bits levels, each spread over its bin of [-1, 1)."""
    level, bins = x * 255, float(2**bits)
    if bits < 8:
        level = torch.floor(level / float(2 ** (8 - bits)))
    return 2 * ((level + noise) / bins - 0.5)


def unspread_levels(y: Float[Tensor, "*any"], bits: int) -> Float[Tensor, "*any"]:
    """Values in [0, 1] again, one for each level."""
    bins = float(2**bits)
    level = torch.floor(bins * (y / 2 + 0.5))
    return (level * (255 / (bins - 1))).clamp(0, 255) / 255
