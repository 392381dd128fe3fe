"""The decoder of dreamerv3-torch: a linear layer, then transposed convolutions.

The smallest feature map has the size of the encoder's output, rounded up. If the image
size is not a multiple of the upsampling factor, the output is cropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reverie.nets.blocks import symexp, symlog
from reverie.nets.decoder import Decoder, DecoderConfig, to_unit_range
from reverie.nets.distributions import MSE, Distribution, sum_events
from reverie.nets.dreamerv3_torch.encoder import (
    as_floats,
    check_supported,
    image_size,
    ordered_keys,
)
from reverie.nets.dreamerv3_torch.layers import (
    HiddenMLP,
    OutputLinear,
    UpConv,
    UpConvOutput,
)
from reverie.spaces import Spaces


class DreamerV3TorchDecoder(Decoder):
    """Latent states to a distribution over every observation key.

    `order` is the order of the keys, as in the encoder; the targets of images in
    `unscaled` are not divided by 255. With `sigmoid`, image outputs are squashed to
    [0, 1]; otherwise they are shifted by 0.5. `image_dist` selects the loss of images:
    the squared error (`mse`), or the negative log-density of a normal distribution with
    standard deviation 1 (`normal`).
    """

    HiddenLayers = HiddenMLP
    OutputLayer = OutputLinear

    def __init__(
        self,
        spaces: Spaces,
        deter: int,
        stoch: int,
        config: DecoderConfig,
        order: Sequence[str] = (),
        unscaled: Sequence[str] = (),
        sigmoid: bool = False,
        image_dist: str = "mse",
    ):
        check_supported(config, "dec")
        self.order, self.unscaled = tuple(order), frozenset(unscaled)
        self.sigmoid, self.image_dist = sigmoid, image_dist
        super().__init__(as_floats(spaces), deter, stoch, config)

    def _vector_distribution(self, pred: Tensor, dims: int) -> Distribution:
        if self.config.symlog:
            return TolerantMSE(pred, dims, symlog, symexp)
        return MSE(pred, dims)

    def _build_images(self, deter: int, stoch: int) -> None:
        config = self.config
        keys = ordered_keys(self.images, self.order)
        self.images = {key: self.images[key] for key in keys}
        factor = 2 ** len(config.mults)
        height, width = (math.ceil(side / factor) for side in image_size(self.images))
        depths = [config.depth * mult for mult in config.mults]
        smallest = (height, width, depths[-1])
        self.space = OutputLinear(stoch + deter, smallest, config.outscale)
        self.convs = nn.ModuleList(
            UpConv(depths[i + 1], depths[i], config.kernel, config)
            for i in reversed(range(len(depths) - 1))
        )
        channels = sum(space.shape[2] for space in self.images.values())
        out = UpConvOutput(depths[0], channels, config.kernel, config.outscale)
        self.imgout = out  # type: ignore[assignment]

    def _image_outputs(self, deter: Tensor, stoch: Tensor) -> dict[str, Distribution]:
        batch = deter.shape[:-1]
        x = self.space(torch.cat([stoch, deter], -1).flatten(0, -2))
        for conv in self.convs:
            x = conv(x)
        return self._split_images(self.imgout(x).float(), batch)

    def _squash(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) if self.sigmoid else x + 0.5

    def _image_distribution(self, key: str, image: Tensor) -> Distribution:
        dist = UnitNormal if self.image_dist == "normal" else MSE
        if key in self.unscaled:  # the network predicts values from 0 to 255
            return dist(image, 3, unsquash=to_unit_range)
        return dist(image, 3, squash=to_unit_range)


class TolerantMSE(MSE):
    """Squared error that is zero below a tolerance."""

    TOLERANCE = 1e-8

    def loss(self, target: Tensor) -> Tensor:
        error = self.squared_error(target)
        return sum_events(torch.where(error < self.TOLERANCE, 0, error), self.dims)


class UnitNormal(MSE):
    """A normal distribution with standard deviation 1; the loss is its -log-density."""

    def loss(self, target: Tensor) -> Tensor:
        count = math.prod(self.mean.shape[-self.dims :])
        return 0.5 * (super().loss(target) + count * math.log(2 * math.pi))
