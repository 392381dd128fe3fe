"""Standardization of images: subtract mean, divide by standard deviation, per pixel.

Mode `dataset` uses the statistics of all recordings (`set_statistics`). In mode
`batch`, training uses the statistics of the batch, and evaluation their moving average,
as batch norm does. Checkpoints contain the statistics, which are buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.capabilities import Statistics
from reverie.distributed.collective import (
    all_reduce_with_grad,
    global_count,
    local_sequences,
)
from reverie.nets.distributions import MSE

RATE = 0.01
"""Rate of the moving average of batch statistics."""


class Standardize(nn.Module):
    """Standardizes the images of one key; their pixels are in [0, 1]."""

    mean: Tensor
    std: Tensor
    seen: Tensor  # number of batches in the moving average

    def __init__(self, key: str, shape: tuple[int, ...], mode: str, minstd: float):
        super().__init__()
        self.key, self.mode, self.minstd = key, mode, minstd
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Float[Tensor, "n h w c"]) -> Float[Tensor, "n h w c"]:
        mean, std = self.mean, self.std
        if self.mode == "batch" and self.training:
            mean, std = self._batch_statistics(x.detach())
        return (x - mean) / std.clamp(min=self.minstd)

    def inverse(self, x: Float[Tensor, "*b h w c"]) -> Float[Tensor, "*b h w c"]:
        return x * self.std.clamp(min=self.minstd) + self.mean

    @torch.no_grad()
    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and std of the global batch, and update the moving averages."""
        if local_sequences() is None:
            mean, std = x.mean(0), x.std(0, correction=0)
        else:
            count = global_count(len(x))
            mean = all_reduce_with_grad(x.sum(0)) / count
            std = (all_reduce_with_grad((x - mean).square().sum(0)) / count).sqrt()
        rate = torch.where(self.seen > 0, RATE, 1.0)  # 1: the first batch is copied
        self.mean.lerp_(mean, rate)
        self.std.lerp_(std, rate)
        self.seen.add_(1)
        return mean, std


class StandardizedMSE(MSE):
    """A prediction of standardized images; `pred` is in the range [0, 1]."""

    def __init__(self, mean: Float[Tensor, "*any"], standardize: Standardize):
        super().__init__(mean, 3)
        self.standardize = standardize

    def pred(self) -> Tensor:
        return self.standardize.inverse(self.mean)

    def loss(self, target: Tensor) -> Tensor:
        flat = target.reshape(-1, *target.shape[-3:]).float() / 255
        standardized = self.standardize(flat).reshape(self.mean.shape)
        return torch.square(self.mean - standardized.detach()).sum((-3, -2, -1))


@contextlib.contextmanager
def frozen_statistics(modules: Sequence[Standardize]) -> Iterator[None]:
    """Context in which modules use their moving averages and do not update them."""
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


def standardizers(module: nn.Module, mode: str) -> list[Standardize]:
    """Return all `Standardize` submodules with this mode."""
    submodules = module.modules()
    return [m for m in submodules if isinstance(m, Standardize) and m.mode == mode]


@torch.no_grad()
def set_statistics(module: nn.Module, statistics: Statistics) -> None:
    """Set the statistics of all submodules in mode `dataset`."""
    for submodule in standardizers(module, "dataset"):
        submodule.mean.copy_(torch.as_tensor(statistics[submodule.key].mean))
        submodule.std.copy_(torch.as_tensor(statistics[submodule.key].std))
