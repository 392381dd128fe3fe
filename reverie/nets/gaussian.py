"""Diagonal Gaussians as a pair of tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from reverie.nets.rng import Rng


class Gaussian(NamedTuple):
    """A diagonal Gaussian; unlike those of `Normal`, its samples have gradients."""

    mean: Float[Tensor, "*b Z"]
    std: Float[Tensor, "*b Z"]

    def sample(self, rng: Rng) -> Float[Tensor, "*b Z"]:
        """A reparameterized sample."""
        return rng.normal(self.mean, self.std)

    def detach(self) -> Gaussian:
        return Gaussian(self.mean.detach(), self.std.detach())

    def kl(self, other: Gaussian) -> Float[Tensor, "*b"]:
        """KL(self || other) in nats, summed over the last axis."""
        ratio = self.std / other.std
        distance = (self.mean - other.mean) / other.std
        terms = 0.5 * (ratio.square() + distance.square() - 1) - torch.log(ratio)
        return terms.sum(-1)

    def entropy(self) -> Float[Tensor, "*b"]:
        """Entropy in nats, summed over the last axis."""
        constant = 0.5 * math.log(2 * math.pi * math.e)
        return (torch.log(self.std) + constant).sum(-1)
