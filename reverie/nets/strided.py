"""Convolutional encoder and decoder of VTA: strided, with batch norm and ELU.

The encoder maps an image of side 2 ** n to a vector by n - 2 layers of stride two and a
layer over the last 4 x 4 pixels; the decoder is the mirror image. Weights have
PyTorch's default initialization.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError
from reverie.nets.batch_norm import BatchNorm1d, BatchNorm2d
from reverie.nets.gru import GRU


class ImageEncoder(nn.Module):
    """Images to vectors of size `width`."""

    fast_version = "reverie.kernels.conv.strided:FastImageEncoder"

    def __init__(self, side: int, channels: int, width: int, bias: bool):
        super().__init__()
        self.layers = num_halvings(side) + 1
        for i in range(self.layers):
            stride, pad = (2, 1) if i < self.layers - 1 else (1, 0)
            inputs = width if i else channels
            conv = nn.Conv2d(inputs, width, 4, stride, pad, bias=bias)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"norm{i}", BatchNorm2d(width))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n E"]:
        for i in range(self.layers):
            x = F.elu(getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(x)))
        return x.flatten(1)


class ImageDecoder(nn.Module):
    """Vectors to images; without an output activation."""

    fast_version = "reverie.kernels.conv.strided:FastImageDecoder"

    def __init__(self, side: int, channels: int, width: int, bias: bool):
        super().__init__()
        self.layers = num_halvings(side) + 1
        for i in range(self.layers):
            stride, pad = (2, 1) if i else (1, 0)
            last = i == self.layers - 1
            units = channels if last else width
            conv = nn.ConvTranspose2d(width, units, 4, stride, pad, bias=bias or last)
            self.add_module(f"conv{i}", conv)
            if not last:
                self.add_module(f"norm{i}", BatchNorm2d(width))

    def forward(self, x: Float[Tensor, "n E"]) -> Float[Tensor, "n c h w"]:
        x = x[..., None, None]
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        for i in range(self.layers - 1):
            x = F.elu(getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(x)))
        image: Tensor = getattr(self, f"conv{self.layers - 1}")(x)
        return image


class TimeConvs(nn.Module):
    """1D convolutions over time; the last one has neither norm nor activation."""

    def __init__(
        self,
        inputs: int,
        width: int,
        layers: int,
        units: int,
        act: Callable[[Tensor], Tensor] = F.elu,
    ):
        super().__init__()
        self.layers, self.act = layers, act
        for i in range(layers):
            conv = nn.Conv1d(width if i else inputs, width, 3, padding=1, bias=False)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"norm{i}", BatchNorm1d(width))
        self.out = nn.Conv1d(width if layers else inputs, units, 3, padding=1)

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T U"]:
        x = x.transpose(1, 2)
        for i in range(self.layers):
            x = self.act(getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(x)))
        out: Tensor = self.out(x)
        return out.transpose(1, 2)

    def initialize(self, generator: torch.Generator) -> None:
        initialize_as_torch(self, generator)


def num_halvings(side: int) -> int:
    """Return how often an image must be halved to have 4 x 4 pixels."""
    times = int(math.log2(max(1, side))) - 2
    if times < 0 or 4 * 2**times != side:
        raise UserError(
            f"Images of {side} x {side} cannot be halved down to 4 x 4.\n"
            "  Fix: use square images with a side of 8, 16, 32, 64, ...; "
            "`reverie data convert SRC DST --size 32 32` resizes recordings."
        )
    return times


@torch.no_grad()
def initialize_as_torch(module: nn.Module, generator: torch.Generator) -> None:
    """Initialize all layers with PyTorch's defaults, from one generator."""
    affine = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)
    for layer in module.modules():
        if isinstance(layer, affine):
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        elif isinstance(layer, GRU):
            layer.initialize(generator)
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.reset_parameters()
