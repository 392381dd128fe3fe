"""The encoder of dreamerv3-torch.

Images are downsampled by strided convolutions; vectors are encoded by symlog and an
MLP. Image features come first, flattened in the order (channels, height, width). Keys
are sorted by default. Checkpoints of dreamerv3-torch do not contain the order of their
keys, so `order` can set it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError
from reverie.nets.blocks import symlog
from reverie.nets.dreamerv3_torch.layers import DownConv, HiddenMLP
from reverie.nets.encoder import (
    ConvConfig,
    EncoderConfig,
    ObsEncoderBase,
    check_inputs,
    make_standardizers,
    split_keys,
)
from reverie.nets.inputs import Concat
from reverie.spaces import Space, Spaces


class DreamerV3TorchEncoder(ObsEncoderBase):
    """Observations to one embedding per step.

    `order` is the order of the keys; by default they are sorted. Images whose keys are
    in `unscaled` are not divided by 255.
    """

    def __init__(
        self,
        spaces: Spaces,
        config: EncoderConfig,
        order: Sequence[str] = (),
        unscaled: Sequence[str] = (),
    ):
        super().__init__()
        check_supported(config, "enc")
        spaces = as_floats(spaces)
        images, vectors = split_keys(spaces, config.cnn_keys, config.mlp_keys)
        check_inputs(images, vectors, spaces)
        self.imgkeys = ordered_keys(images, order)
        self.veckeys = ordered_keys(vectors, order)
        self.unscaled = frozenset(unscaled)
        self.width = 0
        self.standardizers = make_standardizers(images, config)
        self.convs = nn.ModuleList()
        if images:
            height, width = image_size(images)
            channels = sum(space.shape[2] for space in images.values())
            for mult in config.mults:
                units = config.depth * mult
                self.convs.append(DownConv(channels, units, config.kernel, config))
                # half the size, rounded up
                channels, height, width = units, -(-height // 2), -(-width // 2)
            self.width += height * width * channels
        if vectors:
            squash = symlog if config.symlog else None
            self.concat = Concat(vectors, squash, self.veckeys)
            self.mlp = HiddenMLP(self.concat.width, config)
            self.width += self.mlp.width

    def forward(
        self, obs: dict[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "*b E"]:
        parts = []
        if self.imgkeys:
            parts.append(self._images(obs, dtype))
        if self.veckeys:
            parts.append(self.mlp(self.concat(obs, dtype)))
        return torch.cat(parts, -1)

    def _images(self, obs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        batch = obs[self.imgkeys[0]].shape[:-3]
        images = {key: obs[key].flatten(0, -4) for key in self.imgkeys}
        x = torch.cat([self._scale(k, x, dtype) for k, x in images.items()], -1)
        for conv in self.convs:
            x = conv(x)
        return x.permute(0, 3, 1, 2).reshape(*batch, -1)

    def _scale(self, key: str, image: Tensor, dtype: torch.dtype) -> Tensor:
        image = image.to(dtype) / (1 if key in self.unscaled else 255)
        if self.standardizers is None:
            return image - 0.5
        standardized: Tensor = self.standardizers[key](image)
        return standardized.to(dtype)


def as_floats(spaces: Spaces) -> Spaces:
    """Return the spaces with discrete ones as floats.

    The networks of dreamerv3-torch take integers as numbers, without one-hot encoding.
    """
    return {
        key: Space(np.float32, space.shape) if space.is_discrete else space
        for key, space in spaces.items()
    }


def ordered_keys(spaces: Spaces, order: Sequence[str]) -> list[str]:
    """Return the keys in the given order; keys that it does not list come last."""
    ranks = {key: rank for rank, key in enumerate(order)}
    return sorted(spaces, key=lambda key: (ranks.get(key, len(ranks)), key))


def image_size(images: Spaces) -> tuple[int, int]:
    """Return height and width of the images, which must have the same size."""
    sizes = {space.shape[:2] for space in images.values()}
    if len(sizes) > 1:
        raise UserError(
            f"The images {', '.join(images)} have different sizes, but the networks of "
            "dreamerv3-torch concatenate them.\n  Fix: --env.resize 64 64 (for "
            "recordings --offline.read.size 64 64)"
        )
    height, width = sizes.pop()
    return height, width


def check_supported(config: ConvConfig, group: str) -> None:
    """Raise if an option is set that these networks do not have."""
    if config.outer:
        raise UserError(
            "The networks of dreamerv3-torch have no option `outer`.\n"
            f"  Fix: leave out --dreamer.{group}.outer, or use --dreamer.world rssm"
        )
