"""Pixel preprocessing and likelihood of the VTA world."""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from reverie.nets.quantize import dequantize, quantize, requantize
from reverie.nets.rng import Rng
from reverie.worlds.vta.config import VTAConfig


class PixelModel:
    """Converts images to network inputs and back, and computes their likelihood."""

    def __init__(self, config: VTAConfig):
        self.config = config

    def preprocess(self, image: Tensor, rng: Rng) -> Float[Tensor, "B T c h w"]:
        """Convert uint8 images to network inputs; float images are returned as is."""
        if image.is_floating_point():
            return image
        x = image.movedim(-1, -3).float() / 255
        if self.config.levels == "floor":
            return quantize(x, self.config.bits)
        if self.config.levels == "spread":
            return dequantize(x, self.config.bits, rng.uniform(x))
        return x

    def mean(self, raw: Tensor) -> Tensor:
        """Return the mean of the pixel likelihood for decoder outputs."""
        return raw.sigmoid() if self.config.loss == "bernoulli" else raw.tanh()

    def nll(self, raw: Tensor, target: Tensor) -> Tensor:
        """Return the negative log-likelihood of frames `(B, T)` for decoder outputs."""
        if self.config.loss == "bernoulli":
            nll = F.binary_cross_entropy_with_logits(raw, target, reduction="none")
            return nll.flatten(2).sum(-1)
        std = self.config.obs_std
        constant = math.log(std) + 0.5 * math.log(2 * math.pi)
        error = (target - self.mean(raw)) / std
        return (0.5 * error.square() + constant).flatten(2).sum(-1)

    def postprocess(self, image: Tensor) -> Tensor:
        """Convert images from the range of the network inputs to [0, 1]."""
        if self.config.levels == "spread":
            return requantize(image, self.config.bits)
        return image.clamp(0, 1)
