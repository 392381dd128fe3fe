"""Images with the mean and deviation of their pixels taken out.

Each pixel and channel has its own. By `dataset`, they are those of all recordings, told
once (`set_statistics`). By `batch`, training uses those of the batch at hand, and
everything else a slow average of them: a single frame would be its own mean. Both are
buffers, so a checkpoint keeps what the weights were trained with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.capabilities import Statistics
from reverie.nets.distributions import MSE

Mode = Literal["none", "batch", "dataset"]
RATE = 0.01
"""How fast the slow average follows."""


class Standard(nn.Module):
    """Standardises the images of one key, in [0, 1]."""

    def __init__(self, key: str, shape: tuple[int, ...], mode: str, floor: float):
        super().__init__()
        self.key, self.mode, self.floor = key, mode, floor
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Float[Tensor, "n h w c"]) -> Float[Tensor, "n h w c"]:
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        if self.mode == "batch" and self.training:
            mean, std = self._of_batch(x.detach())
        return (x - mean) / std.clamp(min=self.floor)

    def undo(self, x: Float[Tensor, "*b h w c"]) -> Float[Tensor, "*b h w c"]:
        std = self.get_buffer("std").clamp(min=self.floor)
        return x * std + self.get_buffer("mean")

    @torch.no_grad()
    def _of_batch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = x.mean(0), x.std(0, correction=0)
        seen = self.get_buffer("seen")
        rate = torch.where(seen > 0, RATE, 1.0)
        self.get_buffer("mean").lerp_(mean, rate)
        self.get_buffer("std").lerp_(std, rate)
        seen.add_(1)
        return mean, std


class StandardMSE(MSE):
    """A drawing in standardised units; what is shown of it is in [0, 1] again."""

    def __init__(self, mean: Float[Tensor, "*any"], standard: Standard):
        super().__init__(mean, 3)
        self.standard = standard

    def pred(self) -> Tensor:
        return self.standard.undo(self.mean)

    def loss(self, target: Tensor) -> Tensor:
        flat = target.reshape(-1, *target.shape[-3:]).float() / 255
        wanted = self.standard(flat).reshape(self.mean.shape)
        return torch.square(self.mean - wanted.detach()).sum((-3, -2, -1))


@contextlib.contextmanager
def steady(parts: Sequence[Standard]) -> Iterator[None]:
    """Let these use the slow average, and leave it as it is."""
    before = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, training in zip(parts, before, strict=True):
            part.training = training


def by_batch(module: nn.Module) -> list[Standard]:
    """The parts that standardise by batch."""
    parts = module.modules()
    return [p for p in parts if isinstance(p, Standard) and p.mode == "batch"]


def needs_statistics(module: nn.Module) -> bool:
    """Whether some part wants to know the statistics of a dataset."""
    parts = module.modules()
    return any(isinstance(p, Standard) and p.mode == "dataset" for p in parts)


@torch.no_grad()
def set_statistics(module: nn.Module, statistics: Statistics) -> None:
    """Tell every part that standardises by dataset."""
    for part in module.modules():
        if isinstance(part, Standard) and part.mode == "dataset":
            known = statistics[part.key]
            part.get_buffer("mean").copy_(torch.as_tensor(known.mean))
            part.get_buffer("std").copy_(torch.as_tensor(known.std))
