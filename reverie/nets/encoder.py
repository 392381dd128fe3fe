"""Encoder for observations with any number of images and vectors.

Each entry of `mults` downsamples images by two (in the decoder, upsamples); the
smallest feature map must have 3 to 16 pixels per side. An image whose size is not
divisible by the total factor is padded at the bottom and right with mid-gray. The
decoder outputs the padded size and crops it, so that losses ignore the padding. All
images are padded to the size of the largest one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError
from reverie.nets.blocks import (
    Linear,
    MLPConfig,
    ModulesByKey,
    Norm,
    activation,
    symlog,
)
from reverie.nets.conv import SameConv, max_pool_2x2
from reverie.nets.inputs import Concat
from reverie.nets.standardize import Standardize
from reverie.patterns import check_pattern, matches
from reverie.spaces import Spaces, agent_obs_space

MIN_SIDE, MAX_SIDE = 3, 16
"""Minimum and maximum height and width of the smallest feature map."""

NO_KEYS = "$^"
"""A regular expression that matches no key."""


@dataclass(frozen=True)
class ConvConfig(MLPConfig):
    """Fields that encoder and decoder have in common."""

    depth: int = 64
    """Base number of channels; multiplied by `mults`."""
    mults: tuple[int, ...] = (2, 3, 4, 4)
    """Channel multiplier of each stage, starting at the image; each stage halves the
    resolution (in the decoder: doubles it)."""
    layers: int = 3
    """Layers of the MLP for vectors."""
    units: int = 1024
    """Width of the MLP for vectors."""
    symlog: bool = True
    """Apply symlog to vectors: to inputs of the encoder, to targets of the decoder."""
    standard: Literal["none", "batch", "dataset"] = "none"
    """Standardize each pixel with mean and standard deviation of the batch, or of the
    whole dataset; `none` only shifts pixels to [-0.5, 0.5]. Use the same value in
    encoder and decoder."""
    minstd: float = 1e-3
    """Minimum standard deviation to divide by."""
    outer: bool = False
    """Keep the resolution in the first stage (in the decoder: in the last stage)."""
    kernel: int = 5
    """Kernel size of the convolutions."""
    strided: bool = False
    """Use strided convolutions instead of max-pooling and upsampling."""
    cnn_keys: str = ".*"
    """Regular expression for the image keys to use; must match the whole key."""
    mlp_keys: str = ".*"
    """Regular expression for the other keys to use; must match the whole key."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.depth, self.kernel, len(self.mults), *self.mults) < 1:
            raise ValueError("depth, kernel and mults must be at least 1")
        for pattern in (self.cnn_keys, self.mlp_keys):
            try:
                check_pattern(pattern)
            except re.error as error:
                raise ValueError(
                    f"{pattern!r} is not a regular expression ({error})"
                ) from None


@dataclass(frozen=True)
class EncoderConfig(ConvConfig):
    """Encoder: observations to one embedding per step."""


class ObsEncoderBase(nn.Module):
    """Base class of encoders of images and vectors."""

    imgkeys: list[str]
    veckeys: list[str]

    @property
    def keys(self) -> list[str]:
        """Observation keys that the encoder uses: images, then vectors."""
        return [*self.imgkeys, *self.veckeys]


class Encoder(ObsEncoderBase):
    """Observations to one embedding per step: features of vectors, then of images.

    `order` lists the keys to encode, in the order in which images are stacked and
    vectors concatenated; by default all of them, sorted by name.
    """

    fast_version = "reverie.kernels.conv.encoder:FastEncoder"

    def __init__(
        self, spaces: Spaces, config: EncoderConfig, order: Sequence[str] = ()
    ):
        super().__init__()
        self.config = config
        ordered = {key: spaces[key] for key in order or sorted(spaces)}
        images, vectors = split_keys(ordered, config.cnn_keys, config.mlp_keys)
        check_inputs(images, vectors, spaces)
        self.act = activation(config.act)
        self.imgkeys, self.veckeys = list(images), list(vectors)
        self.width = 0
        if vectors:
            squash = symlog if config.symlog else None
            self.concat = Concat(vectors, squash, self.veckeys)
            width = self.concat.width
            for i in range(config.layers):
                self.add_module(f"mlp{i}", Linear(width, config.units))
                self.add_module(f"mlp{i}norm", Norm(config.norm, config.units))
                width = config.units
            self.width += width
        if images:
            self.padded_size = padded_size(images, config.mults, config.outer)
            h, w = self.padded_size
            channels = sum(space.shape[2] for space in images.values())
            for i, mult in enumerate(config.mults):
                factor = 1 if (config.outer and i == 0) else 2
                stride = factor if config.strided else 1
                units = config.depth * mult
                self.add_module(
                    f"cnn{i}", SameConv(channels, units, config.kernel, stride)
                )
                self.add_module(f"cnn{i}norm", Norm(config.norm, units))
                channels, h, w = units, h // factor, w // factor
            self.width += h * w * channels
            self.standardizers = make_standardizers(images, config)

    def forward(
        self, obs: dict[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "*b E"]:
        parts = []
        if self.veckeys:
            parts.append(self._vectors(obs, dtype))
        if self.imgkeys:
            parts.append(self._images([obs[key] for key in self.imgkeys], dtype))
        return torch.cat(parts, -1)

    def _vectors(self, obs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        x: Tensor = self.concat(obs, dtype)
        for i in range(self.config.layers):
            x = getattr(self, f"mlp{i}")(x)
            x = getattr(self, f"mlp{i}norm").activate(x, self.act)
        return x

    def _images(self, images: list[Tensor], dtype: torch.dtype) -> Tensor:
        batch = images[0].shape[:-3]
        h, w = self.padded_size
        scaled = [
            self._scale(key, image.reshape(-1, *image.shape[-3:]), dtype)
            for key, image in zip(self.imgkeys, images, strict=True)
        ]
        x = torch.cat(
            [F.pad(x, (0, 0, 0, w - x.shape[2], 0, h - x.shape[1])) for x in scaled],
            -1,
        )
        for i in range(len(self.config.mults)):
            x = getattr(self, f"cnn{i}")(x)
            if not self.config.strided and not (self.config.outer and i == 0):
                x = max_pool_2x2(x)
            x = getattr(self, f"cnn{i}norm").activate(x, self.act)
        return x.reshape(*batch, -1)  # flattened in (h, w, c) order

    def _scale(self, key: str, image: Tensor, dtype: torch.dtype) -> Tensor:
        """Shift pixels to [-0.5, 0.5], or standardize them."""
        if self.standardizers is None:
            return image.to(dtype) / 255 - 0.5
        standardized: Tensor = self.standardizers[key](image.float() / 255)
        return standardized.to(dtype)


def split_keys(spaces: Spaces, cnn_keys: str, mlp_keys: str) -> tuple[Spaces, Spaces]:
    """Return the images that match `cnn_keys`, and other keys that match `mlp_keys`."""
    images, vectors = {}, {}
    for key, space in agent_obs_space(spaces).items():
        if space.is_image:
            if matches(cnn_keys, key):
                images[key] = space
        elif matches(mlp_keys, key):
            if len(space.shape) > 2:
                raise UserError(
                    f"Observation {key!r} is {space.dtype} of shape {space.shape}, "
                    "which is neither an image nor a vector.\n"
                    "  Fix: make it a uint8 image (h, w, c), flatten it, or exclude it "
                    "with mlp_keys."
                )
            vectors[key] = space
    return images, vectors


def check_inputs(images: Spaces, vectors: Spaces, spaces: Spaces) -> None:
    """Raise if an encoder has no inputs."""
    if not images and not vectors:
        keys = ", ".join(agent_obs_space(spaces)) or "none"
        raise UserError(
            f"The encoder has no inputs; the observation keys are: {keys}.\n"
            "  Fix: add an observation to the environment, or change "
            "cnn_keys and mlp_keys of the encoder to match one."
        )


def padded_size(images: Spaces, mults: tuple[int, ...], outer: bool) -> tuple[int, int]:
    """Height and width to which all images are padded."""
    factor = 2 ** (len(mults) - int(outer))
    sides = [max(space.shape[axis] for space in images.values()) for axis in (0, 1)]
    padded = [math.ceil(side / factor) * factor for side in sides]
    if all(MIN_SIDE <= side // factor <= MAX_SIDE for side in padded):
        return padded[0], padded[1]
    low, high = (MIN_SIDE - 1) * factor + 1, MAX_SIDE * factor
    height, width = (min(max(side, MIN_SIDE * factor), high) for side in padded)
    raise UserError(
        f"Images of {sides[0]}x{sides[1]} pixels cannot be downsampled by a factor of "
        f"{factor}, which needs sides of {low} to {high}.\n"
        f"  Fix: --env.resize {height} {width} (for recordings --offline.read.size "
        f"{height} {width}), or "
        f"{'more' if max(sides) > high else 'fewer'} mults for encoder and decoder."
    )


def make_standardizers(images: Spaces, config: ConvConfig) -> ModulesByKey | None:
    """Return a `Standardize` per image; None if images are not standardized."""
    if config.standard == "none" or not images:
        return None
    mode, minstd = config.standard, config.minstd
    return ModulesByKey(
        {k: Standardize(k, s.shape, mode, minstd) for k, s in images.items()}
    )
