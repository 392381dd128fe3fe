"""The convolutional networks of Δ-IRIS: frames to small maps, and back.

A frame passes through residual blocks, some of which are followed by a halving; the
decoder is the mirror image. Every component of Δ-IRIS has networks of its own.

Outside a convolution, maps are `(rows, h, w, c)`; the convolutions see the same memory
as channels-last `(rows, c, h, w)`. A map is computed in the dtype in which it enters,
norms in float32.

What training keeps: with `recompute`, a residual block is remembered as its input and
what its convolutions gave. Norms and activations are cheap and large, so the backward
pass makes them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from reverie.api import UserError
from reverie.nets.blocks import Kernel

GROUPS = 32
"""Groups of every group norm; all channel counts are multiples of it."""

EPS = 1e-5


@dataclass(frozen=True)
class FrameConfig:
    """A network between frames and small maps."""

    channels: int = 64
    """Channels of the first stage, before `mults`; a multiple of 32."""
    latent: int = 64
    """Channels of the small map."""
    mults: tuple[int, ...] = (1, 1, 2, 2, 4)
    """Channel multiple of each residual block."""
    halve: tuple[int, ...] = (1, 0, 1, 1, 0)
    """1 where a block is followed by a halving (in a decoder: led by a doubling)."""

    def __post_init__(self) -> None:
        if len(self.mults) != len(self.halve) or not self.mults:
            raise ValueError("mults and halve must be as long as each other")
        if self.channels < 1 or self.channels % GROUPS:
            raise ValueError(f"channels must be a multiple of {GROUPS}")
        if min(self.mults) < 1 or self.latent < 1 or set(self.halve) - {0, 1}:
            raise ValueError(
                "mults and latent must be at least 1, and halve made of 0 and 1"
            )

    @property
    def shrink(self) -> int:
        """How many times smaller the map is than the frame, per side."""
        return int(2 ** sum(self.halve))

    def side(self, image_side: int) -> int:
        """The side of the small map of a square image."""
        side, rest = divmod(image_side, self.shrink)
        if rest or not side:
            raise UserError(
                f"Images of side {image_side} cannot be halved {sum(self.halve)} "
                f"times.\n  Fix: use images whose side is a multiple of "
                f"{self.shrink}, or fewer halvings."
            )
        return side


class Conv(Kernel):
    """A convolution with bias, initialized as PyTorch does it."""

    def __init__(self, inputs: int, units: int, kernel: int = 3, stride: int = 1):
        fan_in = inputs * kernel * kernel
        super().__init__((units, inputs, kernel, kernel), units, fan_in, 1.0)
        self.weight.data = self.weight.data.to(memory_format=torch.channels_last)
        self.kernel, self.stride = kernel, stride
        self.padding = kernel // 2 if stride == 1 else 0
        self.bound = 1 / math.sqrt(fan_in)

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c2"]:
        weight, bias = self.cast(x.dtype)
        x = x.permute(0, 3, 1, 2)
        y = F.conv2d(x, weight, bias, stride=self.stride, padding=self.padding)
        return y.permute(0, 2, 3, 1)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        self.weight.uniform_(-self.bound, self.bound, generator=generator)
        self.bias.uniform_(-self.bound, self.bound, generator=generator)


class NormSilu(nn.Module):
    """Group norm over the whole map, then SiLU."""

    def __init__(self, channels: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w c"]:
        # Contiguous: PyTorch's kernel for channels-last loses the variance of maps
        # that are almost constant, and black frames are.
        y = x.permute(0, 3, 1, 2).float().contiguous()
        y = F.group_norm(y, GROUPS, self.scale, self.shift, EPS)
        return F.silu(y).to(x.dtype).permute(0, 2, 3, 1)


class Residual(nn.Module):
    """Adds what two convolutions make of a map to the map itself."""

    def __init__(self, inputs: int, units: int):
        super().__init__()
        self.norm0, self.conv0 = NormSilu(inputs), Conv(inputs, units)
        self.norm1, self.conv1 = NormSilu(units), Conv(units, units)
        self.skip = Conv(inputs, units, kernel=1) if inputs != units else None
        self.recompute = False

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.conv.residual import FastResidual

        return FastResidual

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w c2"]:
        if not (self.recompute and torch.is_grad_enabled()):
            return self._block(x)
        out: Tensor = checkpoint(
            self._block,
            x,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(
                create_selective_checkpoint_contexts, _keep_convolutions
            ),
        )
        return out

    def _block(self, x: Tensor) -> Tensor:
        skip = x if self.skip is None else self.skip(x)
        y = self.conv0(self.norm0(x))
        change: Tensor = self.conv1(self.norm1(y))
        return skip + change


def _keep_convolutions(
    context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Keep what convolutions give; the backward pass makes everything else again."""
    if op == torch.ops.aten.convolution.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Halve(nn.Module):
    """Four pixels become one."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv(channels, channels, kernel=2, stride=2)

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.conv.residual import FastHalve

        return FastHalve

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        out: Tensor = self.conv(x)
        return out


class Double(nn.Module):
    """Each pixel becomes four, then a convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv(channels, channels)

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.conv.residual import FastDouble

        return FastDouble

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        y = F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2.0, mode="nearest")
        out: Tensor = self.conv(y.permute(0, 2, 3, 1))
        return out


class FrameEncoder(nn.Module):
    """Frames `(rows, h, w, c)` to maps `(rows, h / shrink, w / shrink, latent)`.

    Flattening the last three axes of the result gives features with channels fastest.
    """

    def __init__(self, inputs: int, config: FrameConfig):
        super().__init__()
        self.config = config
        width = config.channels
        layers: list[nn.Module] = [Conv(inputs, width)]
        for mult, halve in zip(config.mults, config.halve, strict=True):
            layers.append(Residual(width, mult * config.channels))
            width = mult * config.channels
            if halve:
                layers.append(Halve(width))
        layers += [NormSilu(width), Conv(width, config.latent)]
        self.layers = nn.Sequential(*layers)

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.conv.residual import FastFrameEncoder

        return FastFrameEncoder

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b r s latent"]:
        y: Tensor = self.layers(x)
        return y


class FrameDecoder(nn.Module):
    """The mirror image of a `FrameEncoder`; its output is not squashed."""

    def __init__(self, inputs: int, outputs: int, config: FrameConfig):
        super().__init__()
        self.config = config
        widths = [config.channels * mult for mult in (1, *config.mults)]
        layers: list[nn.Module] = [Conv(inputs, widths[-1])]
        for i in reversed(range(len(config.mults))):
            if config.halve[i]:
                layers.append(Double(widths[i + 1]))
            layers.append(Residual(widths[i + 1], widths[i]))
        layers += [NormSilu(widths[0]), Conv(widths[0], outputs)]
        self.layers = nn.Sequential(*layers)

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.conv.residual import FastFrameDecoder

        return FastFrameDecoder

    def forward(self, x: Float[Tensor, "b r s f"]) -> Float[Tensor, "b h w c"]:
        y: Tensor = self.layers(x)
        return y


def recompute(module: nn.Module, yes: bool = True) -> None:
    """Whether the residual blocks of a module trade a little time for much memory."""
    for layer in module.modules():
        if isinstance(layer, Residual):
            layer.recompute = yes
