"""A decoder's convolutions on the coarse grid, for the CPU.

A 5x5 convolution of a map whose every pixel was doubled meets each coarse pixel several
times. Added up, its taps are a 3x3 kernel for each of the four fine pixels (phases) of
a coarse one: one convolution with four times the outputs, of a map with a quarter of
the pixels, and 2.8 times less work. Gradients reach the 5x5 weight.

The same for an encoder (a convolution before max-pooling, on folded pixels) is slower
on a CPU than the plain way: it does more work to please wide matrix units.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from reverie.nets.conv import Conv

SIDE = 5
"""The kernel that this works for."""

MIN_PIXELS = 4096
"""Coarse pixels of a batch from which on it pays to add up the taps first."""


def _meets() -> Float[Tensor, "2 3 5"]:
    """Which of three coarse pixels each tap meets, seen from either phase."""
    meets = torch.zeros(2, 3, SIDE)
    for phase in range(2):
        for tap in range(SIDE):
            meets[phase, (tap + phase) // 2, tap] = 1
    return meets


MEETS = _meets()


class FusedUpsampleConv(Conv):
    """The same convolution; see the top of this file."""

    def after_doubling(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 o"]:
        fits = self.kernel == SIDE and self.stride == 1
        if not fits or x[..., 0].numel() < MIN_PIXELS:
            return super().after_doubling(x)
        weight, bias = self.cast(x.dtype)
        meets = MEETS.to(weight)
        coarse = torch.einsum("pay,qbx,oiyx->pqoiab", meets, meets, weight)
        coarse = coarse.flatten(0, 2).to(memory_format=torch.channels_last)
        phases = F.conv2d(x.permute(0, 3, 1, 2), coarse, bias.repeat(4), padding=1)
        batch, height, width, _ = x.shape
        y = phases.permute(0, 2, 3, 1).reshape(batch, height, width, 2, 2, -1)
        return y.transpose(2, 3).reshape(batch, 2 * height, 2 * width, -1)
