"""Convolutional encoder and decoder of Δ-IRIS, with residual blocks.

Some of the residual blocks are followed by downsampling; the decoder is the mirror
image. Tokenizer, dynamics and actor-critic do not share these networks.

Feature maps are `(b, h, w, c)`, as in `nets/conv.py`. Networks compute in the dtype of
their input, norms in float32.

With `recompute` (activation checkpointing), a residual block saves only its input and
the outputs of its convolutions. Outputs of norms and activations are large but cheap to
compute, so the backward pass recomputes them.
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
from reverie.nets.blocks import AffineLayer
from reverie.nets.conv import upsample_nearest

GROUPS = 32
"""Groups of every group norm; all channel counts are multiples of 32."""

EPS = 1e-5
"""Epsilon of the group norms."""


@dataclass(frozen=True)
class FrameConfig:
    """Encoder or decoder between frames and small feature maps."""

    channels: int = 64
    """Base number of channels, multiplied by `mults`; a multiple of 32."""
    latent: int = 64
    """Channels of the smallest feature map, an encoder's output; unused by decoders."""
    mults: tuple[int, ...] = (1, 1, 2, 2, 4)
    """Channel multiplier of each residual block."""
    halve: tuple[int, ...] = (1, 0, 1, 1, 0)
    """1 if the block is followed by downsampling (decoder: preceded by upsampling)."""

    def __post_init__(self) -> None:
        if len(self.mults) != len(self.halve) or not self.mults:
            raise ValueError("mults and halve must be of the same length, at least 1")
        if self.channels < 1 or self.channels % GROUPS:
            raise ValueError(f"channels must be a multiple of {GROUPS}")
        if min(self.mults) < 1 or self.latent < 1 or set(self.halve) - {0, 1}:
            raise ValueError(
                "mults and latent must be at least 1, and entries of halve 0 or 1"
            )

    @property
    def downsampling(self) -> int:
        """Side of the frame divided by the side of the smallest feature map."""
        return int(2 ** sum(self.halve))

    def side(self, image_side: int) -> int:
        """Side of the smallest feature map of a square image."""
        side, remainder = divmod(image_side, self.downsampling)
        if remainder or not side:
            raise UserError(
                f"Images of side {image_side} cannot be downsampled {sum(self.halve)} "
                "times by two.\n  Fix: use images whose side is a multiple of "
                f"{self.downsampling}, or set fewer entries of `halve` to 1."
            )
        return side


class FrameConv(AffineLayer):
    """A convolution with bias and PyTorch's default initialization."""

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
    """Group norm, then SiLU."""

    def __init__(self, channels: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w c"]:
        # Contiguous, because PyTorch's channels-last kernel is inaccurate for feature
        # maps that are almost constant, such as those of black frames.
        y = x.permute(0, 3, 1, 2).float().contiguous()
        y = F.group_norm(y, GROUPS, self.scale, self.shift, EPS)
        return F.silu(y).to(x.dtype).permute(0, 2, 3, 1)


class Residual(nn.Module):
    """Pre-norm residual block with two convolutions."""

    fast_version = "reverie.kernels.conv.residual:FastResidual"

    def __init__(self, inputs: int, units: int):
        super().__init__()
        self.norm0, self.conv0 = NormSilu(inputs), FrameConv(inputs, units)
        self.norm1, self.conv1 = NormSilu(units), FrameConv(units, units)
        self.skip = FrameConv(inputs, units, kernel=1) if inputs != units else None
        self.recompute = False

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w c2"]:
        if not (self.recompute and torch.is_grad_enabled()):
            return self._block(x)
        out: Tensor = checkpoint(
            self._block,
            x,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(
                create_selective_checkpoint_contexts, _save_convolutions
            ),
        )
        return out

    def _block(self, x: Tensor) -> Tensor:
        skip = x if self.skip is None else self.skip(x)
        y = self.conv0(self.norm0(x))
        residual: Tensor = self.conv1(self.norm1(y))
        return skip + residual


def _save_convolutions(
    context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save outputs of convolutions; recompute everything else."""
    if op == torch.ops.aten.convolution.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Downsample(nn.Module):
    """Downsampling by two with a strided convolution."""

    fast_version = "reverie.kernels.conv.residual:FastDownsample"

    def __init__(self, channels: int):
        super().__init__()
        self.conv = FrameConv(channels, channels, kernel=2, stride=2)

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        out: Tensor = self.conv(x)
        return out


class Upsample(nn.Module):
    """Nearest-neighbor upsampling by two, then a convolution."""

    fast_version = "reverie.kernels.conv.residual:FastUpsample"

    def __init__(self, channels: int):
        super().__init__()
        self.conv = FrameConv(channels, channels)

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        out: Tensor = self.conv(upsample_nearest(x))
        return out


class FrameEncoder(nn.Module):
    """Frames to small feature maps with `latent` channels."""

    fast_version = "reverie.kernels.conv.residual:FastFrameEncoder"

    def __init__(self, inputs: int, config: FrameConfig):
        super().__init__()
        self.config = config
        width = config.channels
        layers: list[nn.Module] = [FrameConv(inputs, width)]
        for mult, halve in zip(config.mults, config.halve, strict=True):
            layers.append(Residual(width, mult * config.channels))
            width = mult * config.channels
            if halve:
                layers.append(Downsample(width))
        layers += [NormSilu(width), FrameConv(width, config.latent)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 latent"]:
        y: Tensor = self.layers(x)
        return y


class FrameDecoder(nn.Module):
    """Mirror image of `FrameEncoder`; without an output activation."""

    fast_version = "reverie.kernels.conv.residual:FastFrameDecoder"

    def __init__(self, inputs: int, outputs: int, config: FrameConfig):
        super().__init__()
        self.config = config
        widths = [config.channels * mult for mult in (1, *config.mults)]
        layers: list[nn.Module] = [FrameConv(inputs, widths[-1])]
        for i in reversed(range(len(config.mults))):
            if config.halve[i]:
                layers.append(Upsample(widths[i + 1]))
            layers.append(Residual(widths[i + 1], widths[i]))
        layers += [NormSilu(widths[0]), FrameConv(widths[0], outputs)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Float[Tensor, "b h2 w2 f"]) -> Float[Tensor, "b h w c"]:
        y: Tensor = self.layers(x)
        return y


def set_recompute(module: nn.Module, enabled: bool = True) -> None:
    """Enable or disable activation checkpointing in all residual blocks of a module."""
    for layer in module.modules():
        if isinstance(layer, Residual):
            layer.recompute = enabled
