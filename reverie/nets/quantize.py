"""Quantization of images to fewer than 256 levels, with uniform dequantization.

The likelihood of discrete values under a continuous density is unbounded: the density
can concentrate on them. Fewer levels, and uniform noise within the bin of each level,
avoid that.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def quantize(x: Float[Tensor, "*any"], bits: int) -> Float[Tensor, "*any"]:
    """Round values in [0, 1] down to multiples of 2 ** -bits."""
    bins = float(2**bits)
    return torch.floor(x * bins) / bins


def dequantize(
    x: Float[Tensor, "*any"], bits: int, noise: Float[Tensor, "*any"]
) -> Float[Tensor, "*any"]:
    """Quantize values in [0, 1], add `noise` (in bins), and scale to [-1, 1)."""
    level, bins = x * 255, float(2**bits)
    if bits < 8:
        level = torch.floor(level / float(2 ** (8 - bits)))
    return 2 * ((level + noise) / bins - 0.5)


def requantize(y: Float[Tensor, "*any"], bits: int) -> Float[Tensor, "*any"]:
    """Invert `dequantize`: remove the noise and scale the levels to [0, 1]."""
    bins = float(2**bits)
    level = torch.floor(bins * (y / 2 + 0.5))
    return (level * (255 / (bins - 1))).clamp(0, 255) / 255
