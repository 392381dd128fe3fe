"""Basic layers of all networks: linear, block-linear, norm, MLP.

Parameters are float32. A layer casts its weights to the dtype of its input, so a
network computes in the dtype of its input; norms compute in float32 or float64.

Weights are initialized from a normal distribution truncated at two standard deviations,
scaled to a variance of 1 / fan_in (and by `outscale`); biases with zeros, norm scales
with ones. The constructor of a layer leaves its weights uninitialized: `initialize`
fills all layers of a module from one generator on the CPU, so that a seed gives the
same weights on every device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError

TRUNC_NORMAL_STD_CORRECTION = 1.1368
"""A standard normal distribution, truncated at two standard deviations, must be scaled
by this factor to have a standard deviation of 1."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "elu": F.elu,
    "tanh": torch.tanh,
    "none": lambda x: x,
    # other classes of torch.nn that configs of dreamerv3-torch may name
    "leakyrelu": F.leaky_relu,
    "selu": F.selu,
    "celu": F.celu,
    "mish": F.mish,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "identity": lambda x: x,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise UserError(f"Unknown activation {name!r}.\n  Fix: use one of {names}.")
    return ACTIVATIONS[name]


def symlog(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    return torch.sign(x) * torch.expm1(torch.abs(x))


class AffineLayer(nn.Module):
    """Base class of linear and convolutional layers: weight, bias, initialization."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self, shape: tuple[int, ...], units: int, fan_in: int, outscale: float
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(units))
        self.std = TRUNC_NORMAL_STD_CORRECTION * math.sqrt(1 / fan_in) * outscale
        # copies of weight and bias, see kernels/optim/low_precision_weights.py
        self.low_precision: tuple[Tensor, Tensor] | None = None

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weight and bias in the given dtype."""
        copies = self.low_precision
        if copies is not None and copies[0].dtype == dtype:
            return copies
        return self.weight.to(dtype), self.bias.to(dtype)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(self.weight, 0, 1, -2, 2, generator=generator)
        self.weight.mul_(self.std)
        self.bias.zero_()


class Linear(AffineLayer):
    """A dense layer; with a tuple of `units`, the output has that shape."""

    def __init__(
        self, inputs: int, units: int | tuple[int, ...], outscale: float = 1.0
    ):
        self.shape = (units,) if isinstance(units, int) else units
        flat = math.prod(self.shape)
        super().__init__((flat, inputs), flat, inputs, outscale)

    def forward(self, x: Float[Tensor, "*b I"]) -> Float[Tensor, "*any"]:
        y = F.linear(x, *self.cast(x.dtype))
        return y if len(self.shape) == 1 else y.reshape(*y.shape[:-1], *self.shape)


class BlockLinear(AffineLayer):
    """A dense layer with a block-diagonal weight matrix.

    For initialization, the fan-in is the size of the whole input, not of one block.
    """

    def __init__(self, inputs: int, units: int, blocks: int, outscale: float = 1.0):
        for width in (inputs, units):
            if width % blocks:
                raise UserError(
                    f"A layer of width {width} cannot be divided into {blocks} blocks."
                    f"\n  Fix: use a width that is a multiple of {blocks}, or another "
                    "number of blocks."
                )
        shape = (blocks, inputs // blocks, units // blocks)
        super().__init__(shape, units, inputs, outscale)

    def forward(self, x: Float[Tensor, "*b I"]) -> Float[Tensor, "*b O"]:
        blocks, width, _ = self.weight.shape
        rows = x.reshape(-1, blocks, width).transpose(0, 1)  # (blocks, rows, width)
        weight, bias = self.cast(x.dtype)
        y = torch.bmm(rows, weight).transpose(0, 1)
        return y.reshape(*x.shape[:-1], -1) + bias


class Norm(nn.Module):
    """RMS norm (`rms`), layer norm (`layer`) or identity (`none`) over the last axis.

    The default epsilon is 1e-4; `rms1em6` sets it to 1e-6.
    """

    fast_cpu_version = "reverie.kernels.norm.rms_norm_cpu:CpuNorm"

    def __init__(self, name: str, width: int):
        super().__init__()
        match = re.fullmatch(r"(rms|layer|none)(\d+em\d+)?", name)
        if not match:
            raise UserError(
                f"Unknown norm {name!r}.\n"
                "  Fix: use rms, layer or none, optionally with an epsilon (rms1em6)."
            )
        self.kind = match[1]
        self.eps = float(match[2].replace("em", "e-")) if match[2] else 1e-4
        self.width = width
        if self.kind != "none":
            self.scale = nn.Parameter(torch.empty(width))
        if self.kind == "layer":
            self.shift = nn.Parameter(torch.empty(width))

    def forward(self, x: Float[Tensor, "*b F"]) -> Float[Tensor, "*b F"]:
        if self.kind == "none":
            return x
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "rms":
            y = F.rms_norm(precise, (self.width,), self.scale, self.eps)
        else:
            y = F.layer_norm(precise, (self.width,), self.scale, self.shift, self.eps)
        return y.to(x.dtype)

    def activate(
        self, x: Float[Tensor, "*b F"], act: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "*b F"]:
        """Return `act(self(x))`, which the fast version computes in one function."""
        return act(self(x))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        if self.kind != "none":
            self.scale.fill_(1)
        if self.kind == "layer":
            self.shift.zero_()


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of an MLP, and of networks that contain one."""

    layers: int = 1
    """Hidden layers before the output."""
    units: int = 1024
    """Width of the hidden layers."""
    act: str = "silu"
    """Activation function."""
    norm: str = "rms"
    """Normalization: rms, layer or none."""

    def __post_init__(self) -> None:
        if self.layers < 0 or self.units < 1:
            raise ValueError("layers must be at least 0 and units at least 1")


class MLP(nn.Module):
    """Multilayer perceptron; each layer is linear, norm, activation."""

    fast_version = "reverie.kernels.norm.rms_norm:FastMLP"

    def __init__(self, inputs: int, config: MLPConfig):
        super().__init__()
        self.layers, self.width = config.layers, inputs
        self.act = activation(config.act)
        for i in range(config.layers):
            self.add_module(f"linear{i}", Linear(self.width, config.units))
            self.add_module(f"norm{i}", Norm(config.norm, config.units))
            self.width = config.units

    def forward(self, x: Float[Tensor, "*b I"]) -> Float[Tensor, "*b F"]:
        for i in range(self.layers):
            x = getattr(self, f"linear{i}")(x)
            x = getattr(self, f"norm{i}").activate(x, self.act)
        return x


class ModulesByKey(nn.Module):
    """One submodule per observation or action key; keys may have any name."""

    def __init__(self, modules: dict[str, nn.Module]):
        super().__init__()
        self.keys = tuple(modules)
        for key, module in modules.items():
            self.add_module(self.module_name(key), module)

    def __getitem__(self, key: str) -> nn.Module:
        return self.get_submodule(self.module_name(key))

    @staticmethod
    def module_name(key: str) -> str:
        """Return a valid module name: no dots, and no attribute of `nn.Module`."""
        name = key.replace(".", "%2e")
        return name + "%" if name == "keys" or hasattr(nn.Module, name) else name

    @staticmethod
    def key(module_name: str) -> str:
        """Return the key of a module name; the inverse of `module_name`."""
        return module_name.removesuffix("%").replace("%2e", ".")


def initialize(module: nn.Module, generator: torch.Generator) -> None:
    """Initialize all layers of `module`, in the order of their construction."""
    for layer in module.modules():
        initialize_layer = getattr(layer, "initialize", None)
        if initialize_layer is not None:
            initialize_layer(generator)
