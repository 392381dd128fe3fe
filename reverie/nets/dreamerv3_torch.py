"""The encoder of dreamerv3-torch, for checkpoints of that project.

https://github.com/NM512/dreamerv3-torch. Images are downsampled by convolutions of
stride two with layer norm over channels; vectors go through symlog and an MLP. Neither
has biases. Image features come first, in the order (channels, height, width). Images
are stacked along the channels and vectors concatenated in the given order. Checkpoints
contain neither this order nor the preprocessing of images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError
from reverie.nets.blocks import ModulesByKey, symlog
from reverie.nets.standardize import Standardize
from reverie.spaces import Spaces

EPS = 1e-3
MINSTD = 1e-3
"""Lower limit of the standard deviation of pixels (`image_std_min`)."""


@dataclass(frozen=True)
class DreamerV3TorchEncoderConfig:
    """Encoder of a checkpoint; the sizes are set automatically."""

    images: Literal["", "shift", "standardize"] = ""
    """Preprocessing of the images that the checkpoint was trained on: `shift` to
    [-0.5, 0.5] (`image_standardize: False`), or `standardize` by mean and standard
    deviation of `offline.data` or `offline.stats`. Required if it has images."""
    depth: int = 32
    """Channels of the first convolution; each one doubles them."""
    stages: int = 0
    """Number of convolutions; 0 for as many as leave 4 to 7 pixels per side."""
    layers: int = 5
    """Layers of the MLP for vectors."""
    units: int = 1024
    """Width of the MLP for vectors."""


class DreamerV3TorchEncoder(nn.Module):
    """Observations to one embedding per step.

    `order` lists the keys to encode; by default all of them, sorted by name.
    """

    def __init__(
        self,
        spaces: Spaces,
        config: DreamerV3TorchEncoderConfig,
        order: Sequence[str] = (),
    ):
        super().__init__()
        keys = order or sorted(spaces)
        self.imgkeys = [k for k in keys if spaces[k].is_image]
        self.veckeys = [k for k in keys if not spaces[k].is_image]
        images = {key: spaces[key].shape for key in self.imgkeys}
        if len({shape[:2] for shape in images.values()}) > 1:
            raise UserError(
                "The encoder of dreamerv3-torch stacks images of the same size, not of "
                f"{images}.\n  Fix: select images of one size with --bc.keys, or "
                "resize them, as in --offline.read.size 64 64."
            )
        self.standardize: ModulesByKey | None = None
        self.convs, self.cnorms = nn.ModuleList(), nn.ModuleList()
        self.linears, self.norms = nn.ModuleList(), nn.ModuleList()
        self.width = 0
        if images:
            height, width, _ = images[self.imgkeys[0]]
            channels = sum(shape[2] for shape in images.values())
            if config.images == "standardize":
                self.standardize = ModulesByKey(
                    {
                        key: Standardize(key, shape, "dataset", MINSTD)
                        for key, shape in images.items()
                    }
                )
            count = config.stages or int(math.log2(height) - math.log2(4))
            for i in range(count):
                units = config.depth * 2**i
                self.convs.append(nn.Conv2d(channels, units, 4, 2, bias=False))
                self.cnorms.append(nn.LayerNorm(units, EPS))
                channels, height, width = units, -(-height // 2), -(-width // 2)
            self.width += height * width * channels
        if self.veckeys:
            width = sum(math.prod(spaces[key].shape) for key in self.veckeys)
            for _ in range(config.layers):
                self.linears.append(nn.Linear(width, config.units, bias=False))
                self.norms.append(nn.LayerNorm(config.units, EPS))
                width = config.units
            self.width += width

    @property
    def keys(self) -> list[str]:
        """Observation keys in the order in which they enter the network."""
        return [*self.imgkeys, *self.veckeys]

    def initialize(self, generator: torch.Generator) -> None:
        """Initialize all weights; a checkpoint usually replaces them."""
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter, generator=generator)

    def forward(
        self, obs: dict[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "*b E"]:
        parts = [self._images(obs, dtype)] if self.imgkeys else []
        if self.veckeys:
            flat = [obs[key].float().flatten(2) for key in self.veckeys]
            x = symlog(torch.cat(flat, -1)).to(dtype)
            for linear, norm in zip(self.linears, self.norms, strict=True):
                x = F.silu(norm(linear(x)))
            parts.append(x)
        return torch.cat(parts, -1)

    def _images(self, obs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        batch = obs[self.imgkeys[0]].shape[:-3]
        scaled = [
            self._scale(key, obs[key].flatten(0, -4), dtype) for key in self.imgkeys
        ]
        x = torch.cat(scaled, -1).permute(0, 3, 1, 2)
        for conv, norm in zip(self.convs, self.cnorms, strict=True):
            x = conv(_pad(x))
            x = F.silu(norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return x.reshape(*batch, -1)

    def _scale(self, key: str, image: Tensor, dtype: torch.dtype) -> Tensor:
        x = image.to(dtype) / 255
        if self.standardize is None:
            return x - 0.5
        standardized: Tensor = self.standardize[key](x)
        return standardized.to(dtype)


def _pad(x: Tensor) -> Tensor:
    """Pad for a convolution of size 4 and stride 2, as TensorFlow's "same" does."""
    totals = [max(0, 2 * (-(-side // 2) - 1) + 4 - side) for side in x.shape[-2:]]
    (top, left), (height, width) = [total // 2 for total in totals], totals
    return F.pad(x, (left, width - left, top, height - top))
