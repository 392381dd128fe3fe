"""What the recurrent form of VTA is made of: layers, units and Gaussian heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.nets.blocks import Linear, Norm
from reverie.nets.gaussian import Gaussian

NORM = "layer1em3"


class Bare(Linear):
    """A dense layer without a bias: its own is zero and stays so."""

    def __init__(self, inputs: int, units: int):
        super().__init__(inputs, units)
        self.bias.requires_grad_(False)


class Layer(nn.Module):
    """Dense, normalized, and squashed."""

    def __init__(self, inputs: int, units: int):
        super().__init__()
        self.linear = Bare(inputs, units)
        self.norm = Norm(NORM, units)

    def forward(self, x: Float[Tensor, "*b E"]) -> Float[Tensor, "*b F"]:
        return F.silu(self.norm(self.linear(x)))


class Cell(nn.Module):
    """A layer on the inputs, then a GRU whose gates are normalized together."""

    def __init__(self, inputs: int, hidden: int, belief: int):
        super().__init__()
        self.into = Layer(inputs, hidden)
        self.linear = Bare(hidden + belief, 3 * belief)
        self.norm = Norm(NORM, 3 * belief)

    def forward(
        self, x: Float[Tensor, "B E"], belief: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B D"]:
        gates = self.norm(self.linear(torch.cat([self.into(x), belief], -1)))
        reset, candidate, update = gates.chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        return torch.lerp(belief, candidate, torch.sigmoid(update - 1))


class GaussianHead(nn.Module):
    """A hidden layer, unless the input has its width already, then two outputs."""

    def __init__(self, inputs: int, hidden: int, units: int, min_std: float):
        super().__init__()
        self.feat = Layer(inputs, hidden) if inputs != hidden else nn.Identity()
        self.out = Linear(hidden, (2, units))
        self.min_std = min_std

    def forward(self, x: Float[Tensor, "*b E"]) -> Gaussian:
        mean, raw = self.out(self.feat(x)).float().unbind(-2)
        return Gaussian(mean, F.softplus(raw) + self.min_std)
