"""Diagonal Gaussians as two tensors: draw from them, compare them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from reverie.nets.rng import Rng


class Gaussian(NamedTuple):
    mean: Float[Tensor, "*b Z"]
    std: Float[Tensor, "*b Z"]

    def sample(self, rng: Rng) -> Float[Tensor, "*b Z"]:
        return rng.normal(self.mean, self.std)

    def detach(self) -> Gaussian:
        return Gaussian(self.mean.detach(), self.std.detach())

    def kl(self, other: Gaussian) -> Float[Tensor, "*b"]:
        """How far this one is from `other`, in nats, summed over the last axis."""
        ratio = self.std / other.std
        apart = (self.mean - other.mean) / other.std
        each = 0.5 * (ratio.square() + apart.square() - 1) - torch.log(ratio)
        return each.sum(-1)

    def entropy(self) -> Float[Tensor, "*b"]:
        constant = 0.5 * math.log(2 * math.pi * math.e)
        return (torch.log(self.std) + constant).sum(-1)
