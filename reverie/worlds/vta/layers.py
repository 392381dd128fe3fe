"""Layers of the recurrent VTA dynamics: dense layer, GRU cell and Gaussian head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.nets.blocks import Linear, Norm
from reverie.nets.gaussian import Gaussian

NORM = "layer1em3"
"""Layer norm with an epsilon of 1e-3."""


class UnbiasedLinear(Linear):
    """A dense layer whose bias is zero and not trained."""

    def __init__(self, inputs: int, units: int):
        super().__init__(inputs, units)
        self.bias.requires_grad_(False)


class DenseNormSiLU(nn.Module):
    """A dense layer, layer norm and SiLU."""

    def __init__(self, inputs: int, units: int):
        super().__init__()
        self.linear = UnbiasedLinear(inputs, units)
        self.norm = Norm(NORM, units)

    def forward(self, x: Float[Tensor, "*b E"]) -> Float[Tensor, "*b F"]:
        return F.silu(self.norm(self.linear(x)))


class NormGRUCell(nn.Module):
    """An input layer, then a GRU cell with one layer norm over all gates."""

    def __init__(self, inputs: int, hidden: int, belief: int):
        super().__init__()
        self.into = DenseNormSiLU(inputs, hidden)
        self.linear = UnbiasedLinear(hidden + belief, 3 * belief)
        self.norm = Norm(NORM, 3 * belief)

    def forward(
        self, x: Float[Tensor, "B E"], belief: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B D"]:
        gates = self.norm(self.linear(torch.cat([self.into(x), belief], -1)))
        reset, candidate, update = gates.chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        return torch.lerp(belief, candidate, torch.sigmoid(update - 1))


class GaussianHead(nn.Module):
    """Mean and standard deviation, after a hidden layer if the input width differs."""

    def __init__(self, inputs: int, hidden: int, units: int, min_std: float):
        super().__init__()
        self.feat = DenseNormSiLU(inputs, hidden) if inputs != hidden else nn.Identity()
        self.out = Linear(hidden, (2, units))
        self.min_std = min_std

    def forward(self, x: Float[Tensor, "*b E"]) -> Gaussian:
        mean, raw = self.out(self.feat(x)).float().unbind(-2)
        return Gaussian(mean, F.softplus(raw) + self.min_std)
