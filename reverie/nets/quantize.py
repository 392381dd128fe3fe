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
    return torch.floor(x * 2**bits) / 2**bits


def spread_levels(
    x: Float[Tensor, "*any"], bits: int, noise: Float[Tensor, "*any"]
) -> Float[Tensor, "*any"]:
    """Values in [0, 1] cut to 2 ** bits levels, each spread over its bin of [-1, 1)."""
    level = x * 255
    if bits < 8:
        level = torch.floor(level / 2 ** (8 - bits))
    return 2 * ((level + noise) / 2**bits - 0.5)


def unspread_levels(y: Float[Tensor, "*any"], bits: int) -> Float[Tensor, "*any"]:
    """Values in [0, 1] again, one for each level."""
    level = torch.floor(2**bits * (y / 2 + 0.5))
    return (level * (255 / (2**bits - 1))).clamp(0, 255) / 255
