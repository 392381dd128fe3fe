"""Running statistics that normalize returns, values or advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.distributed.collective import all_gather


@dataclass(frozen=True)
class NormalizeConfig:
    """Normalization by a running offset and scale."""

    impl: Literal["none", "perc", "meanstd"] = "none"
    """Statistics: none, perc (lower percentile, and the range up to the upper one) or
    meanstd (mean and standard deviation)."""
    rate: float = 0.01
    """Rate of the exponential moving averages."""
    limit: float = 1e-8
    """Minimum scale."""
    perclo: float = 5.0
    """Lower percentile."""
    perchi: float = 95.0
    """Upper percentile."""
    debias: bool = True
    """Correct the bias of averages that start at zero, as Adam does."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1 or not 0 <= self.perclo <= self.perchi <= 100:
            raise ValueError(
                "rate must be from 0 to 1, perclo and perchi from 0 to 100, and perclo "
                "not above perchi"
            )


class Normalize(nn.Module):
    """Tracks running statistics of values; callers compute `(x - offset) / scale`."""

    corr: Tensor  # total weight of the values in an average; `stats` divides by it

    def __init__(self, config: NormalizeConfig):
        super().__init__()
        self.config = config
        # `sqrs` is the mean of the squares
        names = {"none": (), "perc": ("lo", "hi"), "meanstd": ("mean", "sqrs")}
        self.averages = names[config.impl]
        for name in self.averages:
            self.register_buffer(name, torch.zeros(()))
        if self.averages and config.debias:
            self.register_buffer("corr", torch.zeros(()))

    @torch.no_grad()
    def update(self, x: Float[Tensor, "*any"]) -> None:
        """Update the moving averages with the values of all ranks."""
        config = self.config
        if config.impl == "none":
            return
        x = all_gather(x.detach().float()).flatten()
        if config.impl == "perc":
            points = [x.new_full((), p / 100) for p in (config.perclo, config.perchi)]
            stats = torch.quantile(x, torch.stack(points))
        else:
            stats = torch.stack([x.mean(), torch.square(x).mean()])
        rate = config.rate
        for name, stat in zip(self.averages, stats, strict=True):
            average = self.get_buffer(name)
            average.copy_((1 - rate) * average + rate * stat)
        if config.debias:
            self.corr.copy_((1 - rate) * self.corr + rate)

    def stats(self) -> tuple[Tensor | float, Tensor | float]:
        """Return offset and scale."""
        if not self.averages:
            return 0.0, 1.0
        first, second = (self.get_buffer(name).clone() for name in self.averages)
        if self.config.debias:
            correction = 1 / self.corr.clamp(min=self.config.rate)
            first, second = first * correction, second * correction
        if self.config.impl == "perc":
            return first, (second - first).clamp(min=self.config.limit)
        std = torch.sqrt(torch.relu(second - torch.square(first)))
        return first, std.clamp(min=self.config.limit)

    def forward(
        self, x: Float[Tensor, "*any"], update: bool
    ) -> tuple[Tensor | float, Tensor | float]:
        """Return offset and scale, after an update with `x` if `update` is True."""
        if update:
            self.update(x)
        return self.stats()
