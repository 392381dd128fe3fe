"""Layers of dreamerv3-torch.

Hidden layers are initialized from a truncated normal distribution and output layers
from a uniform one, both with a variance of 1 / fan, where fan is the mean of fan-in and
fan-out. Images are `(b, h, w, c)`, as in `nets/conv.py`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.nets.blocks import (
    TRUNC_NORMAL_STD_CORRECTION,
    AffineLayer,
    Linear,
    MLPConfig,
    Norm,
    activation,
)

STRIDE = 2
"""Stride of all convolutions: they halve or double the height and width."""


class HiddenLayer(nn.Module):
    """Base class of hidden layers: weight without bias, norm, activation."""

    def __init__(
        self, shape: tuple[int, ...], units: int, fan: float, config: MLPConfig
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.std = TRUNC_NORMAL_STD_CORRECTION * math.sqrt(1 / fan)
        self.norm = Norm(config.norm, units)
        self.act = activation(config.act)

    def forward(self, x: Float[Tensor, "*b I"]) -> Float[Tensor, "*b2 O"]:
        return self.act(self.norm(self._product(x, self.weight.to(x.dtype))))

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply the weight: a matrix product or a convolution."""
        raise NotImplementedError

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(self.weight, 0, 1, -2, 2, generator=generator)
        self.weight.mul_(self.std)


class HiddenLinear(HiddenLayer):
    """A hidden layer of an MLP."""

    def __init__(self, inputs: int, units: int, config: MLPConfig):
        super().__init__((units, inputs), units, (inputs + units) / 2, config)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class DownConv(HiddenLayer):
    """A convolution of stride two with "same" padding, as in TensorFlow."""

    def __init__(self, inputs: int, units: int, kernel: int, config: MLPConfig):
        fan = kernel * kernel * (inputs + units) / 2
        super().__init__((units, inputs, kernel, kernel), units, fan, config)
        self.kernel = kernel

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        vertical, horizontal = (self._padding(side) for side in x.shape[1:3])
        top, left = vertical // 2, horizontal // 2
        x = x.permute(0, 3, 1, 2)
        if vertical % 2 or horizontal % 2 or vertical != horizontal:
            x = F.pad(x, (left, horizontal - left, top, vertical - top))
            top = 0
        return F.conv2d(x, weight, None, STRIDE, top).permute(0, 2, 3, 1)

    def _padding(self, side: int) -> int:
        """Total padding of an axis; an odd one has one more pixel at the end."""
        return max(0, STRIDE * (-(-side // STRIDE) - 1) + self.kernel - side)


class UpConv(HiddenLayer):
    """A transposed convolution that doubles the size of an image."""

    def __init__(self, inputs: int, units: int, kernel: int, config: MLPConfig):
        fan = kernel * kernel * (inputs + units) / 2
        super().__init__((inputs, units, kernel, kernel), units, fan, config)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return transposed_conv(x, weight, None)


class UniformInitLayer(AffineLayer):
    """Base class of output layers: uniform initial weights, zero initial bias."""

    limit: float

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        self.weight.uniform_(-self.limit, self.limit, generator=generator)
        self.bias.zero_()


class UpConvOutput(UniformInitLayer):
    """The last transposed convolution: with a bias, without norm and activation."""

    def __init__(self, inputs: int, units: int, kernel: int, outscale: float):
        area = kernel * kernel
        shape = (inputs, units, kernel, kernel)
        super().__init__(shape, units, area * inputs, outscale)
        self.limit = uniform_limit(area * inputs, area * units, outscale)

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c2"]:
        return transposed_conv(x, *self.cast(x.dtype))


class OutputLinear(UniformInitLayer, Linear):
    """The output layer of an MLP."""

    def __init__(
        self, inputs: int, units: int | tuple[int, ...], outscale: float = 1.0
    ):
        super().__init__(inputs, units, outscale)
        self.limit = uniform_limit(inputs, math.prod(self.shape), outscale)


class HiddenMLP(nn.Module):
    """The hidden layers of an MLP."""

    def __init__(self, inputs: int, config: MLPConfig):
        super().__init__()
        self.width = inputs
        self.layers = nn.ModuleList()
        for _ in range(config.layers):
            self.layers.append(HiddenLinear(self.width, config.units, config))
            self.width = config.units

    def forward(self, x: Float[Tensor, "*b I"]) -> Float[Tensor, "*b F"]:
        for layer in self.layers:
            x = layer(x)
        return x


def transposed_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Double the height and width of images `(b, h, w, c)`."""
    # without padding, a side of n pixels would become 2 n + excess pixels
    excess = weight.shape[-1] - STRIDE
    padding = math.ceil(excess / 2)
    y = F.conv_transpose2d(
        x.permute(0, 3, 1, 2), weight, bias, STRIDE, padding, 2 * padding - excess
    )
    return y.permute(0, 2, 3, 1)


def uniform_limit(fan_in: int, fan_out: int, scale: float) -> float:
    """Bound of the uniform distribution of initial weights."""
    return math.sqrt(3 * scale / ((fan_in + fan_out) / 2))
