"""An ensemble of MLPs of the same size, computed with one matrix product per layer.

A hidden layer is a linear layer without bias, followed by layer norm and activation, as
in dreamerv3-torch. The output layer is a linear layer with bias. The members differ
only in their weights, whose tensors have the members as their first axis.

Shapes: `M` members, `I` inputs, `O` outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.nets.blocks import TRUNC_NORMAL_STD_CORRECTION, activation
from reverie.nets.dreamerv3_torch.layers import uniform_limit

EPS = 1e-3
"""Epsilon of the layer norms."""


@dataclass(frozen=True)
class EnsembleConfig:
    """Ensemble of MLPs that predict a Gaussian with a fixed standard deviation."""

    models: int = 10
    """Number of MLPs."""
    layers: int = 4
    """Hidden layers of each MLP."""
    units: int = 400
    """Width of the hidden layers."""
    act: str = "silu"
    """Activation function."""
    output: Literal["linear", "tanh"] = "linear"
    """Predicted mean: the output of the MLP, or its tanh (dreamerv3-torch)."""
    std: float = 1.0
    """Standard deviation of the Gaussian."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        if not self.std > 0:
            raise ValueError("std must be above zero")


@dataclass(frozen=True)
class TokenHeadsConfig:
    """Ensemble of heads that predict the next token of Δ-IRIS from shared features."""

    models: int = 5
    """Number of heads."""
    layers: int = 1
    """Hidden layers of each head."""
    units: int = 256
    """Width of the hidden layers."""

    def __post_init__(self) -> None:
        _check_sizes(self)


def _check_sizes(config: EnsembleConfig | TokenHeadsConfig) -> None:
    if config.models < 2:
        raise ValueError("models must be at least 2, to measure their disagreement")
    if config.layers < 0 or config.units < 1:
        raise ValueError("layers must be at least 0 and units at least 1")


class Ensemble(nn.Module):
    """MLPs with shared inputs; hidden layers compute in the dtype of the inputs."""

    def __init__(
        self, inputs: int, outputs: int, models: int, layers: int, units: int, act: str
    ):
        super().__init__()
        self.hidden = nn.ModuleList()
        for _ in range(layers):
            self.hidden.append(MemberLayer(models, inputs, units, act))
            inputs = units
        self.out = MemberOutput(models, inputs, outputs)

    def forward(self, x: Float[Tensor, "*b I"]) -> Float[Tensor, "M *b O"]:
        """Return the outputs of all members, in float32."""
        # (1, N, I): the same inputs for all members
        y: Tensor = x.reshape(1, -1, x.shape[-1])
        for layer in self.hidden:
            y = layer(y)
        y = self.out(y.float())  # (M, N, O)
        return y.reshape(-1, *x.shape[:-1], y.shape[-1])


class MemberLayer(nn.Module):
    """One hidden layer of all members."""

    def __init__(self, models: int, inputs: int, units: int, act: str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(models, units, inputs))
        self.scale = nn.Parameter(torch.empty(models, units))
        self.shift = nn.Parameter(torch.empty(models, units))
        self.act = activation(act)
        self.std = TRUNC_NORMAL_STD_CORRECTION * math.sqrt(2 / (inputs + units))

    def forward(self, x: Float[Tensor, "_ N I"]) -> Float[Tensor, "M N U"]:
        y = _product(x, self.weight.to(x.dtype)).float()
        y = F.layer_norm(y, y.shape[-1:], eps=EPS)
        y = torch.addcmul(self.shift[:, None], y, self.scale[:, None])
        return self.act(y.to(x.dtype))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(self.weight, 0, 1, -2, 2, generator=generator)
        self.weight.mul_(self.std)
        self.scale.fill_(1)
        self.shift.zero_()


class MemberOutput(nn.Module):
    """The output layer of all members."""

    def __init__(self, models: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(models, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(models, outputs))
        self.limit = uniform_limit(inputs, outputs, 1.0)

    def forward(self, x: Float[Tensor, "_ N I"]) -> Float[Tensor, "M N O"]:
        return _product(x, self.weight) + self.bias[:, None]

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        self.weight.uniform_(-self.limit, self.limit, generator=generator)
        self.bias.zero_()


def _product(
    x: Float[Tensor, "_ N I"], weight: Float[Tensor, "M U I"]
) -> Float[Tensor, "M N U"]:
    """Multiply inputs by the weights of each member.

    If `x` has a single entry on its first axis, all members share it.
    """
    if len(x) == len(weight):
        return torch.bmm(x, weight.transpose(1, 2))
    models, units, _ = weight.shape
    y = F.linear(x[0], weight.flatten(0, 1))  # (N, M * U): one product for all members
    return y.reshape(-1, models, units).transpose(0, 1)
