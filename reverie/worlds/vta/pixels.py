"""Images as VTA sees them, draws them, and shows them to people."""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from reverie.nets.quantize import floor_levels, spread_levels, unspread_levels
from reverie.nets.rng import Rng
from reverie.worlds.vta.config import VTAConfig


class Pixels:
    """Which values pixels have, and how a drawn image is compared with a seen one."""

    def __init__(self, config: VTAConfig):
        self.config = config

    def prepare(self, image: Tensor, rng: Rng) -> Float[Tensor, "B T c h w"]:
        """Images as the networks see them; floats pass as they are."""
        if image.is_floating_point():
            return image
        x = image.movedim(-1, -3).float() / 255
        if self.config.levels == "floor":
            return floor_levels(x, self.config.bits)
        if self.config.levels == "spread":
            return spread_levels(x, self.config.bits, rng.uniform(x))
        return x

    def compare(self, raw: Tensor, target: Tensor) -> Tensor:
        """The negative log-likelihood of each frame."""
        if self.config.loss == "bernoulli":
            each = F.binary_cross_entropy_with_logits(raw, target, reduction="none")
            return each.flatten(2).sum(-1)
        std = self.config.obs_std
        constant = math.log(std) + 0.5 * math.log(2 * math.pi)
        apart = (target - self.squash(raw)) / std
        return (0.5 * apart.square() + constant).flatten(2).sum(-1)

    def squash(self, raw: Tensor) -> Tensor:
        return raw.sigmoid() if self.config.loss == "bernoulli" else raw.tanh()

    def shown(self, image: Tensor) -> Tensor:
        """An image as people see it, in [0, 1]."""
        if self.config.levels == "spread":
            return unspread_levels(image, self.config.bits)
        return image.clamp(0, 1)
