"""Losses that train a world model without reconstructing observations.

The losses of this file compare a linear projection of the features (B, T, F) with the
embedding of the encoder (B, T, E), which gets no gradient: the encoder is trained
through the posterior. The losses of DreamerPro are in `prototypes.py`.

- Barlow (R2-Dreamer, 2026): the correlation matrix of projection and embedding over all
  rows of the batch should be the identity matrix.
- InfoNCE: the projection of a row must identify its embedding among those of all rows.

With these losses, the latent state need not represent details that do not help to
distinguish observations. This is an advantage over a decoder, whose loss is a sum over
pixels, if there is noise in the background, or if important objects are small.

All statistics are computed over the global batch of a data-parallel run.

Batches of the evaluation on episodes have a mask, `batch["mask"]`, which is False for
padding. These rows are not part of the statistics, and their losses are zero. Training
batches have no mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.api import Batch
from reverie.distributed.collective import all_gather_with_grad, local_sequences
from reverie.nets.blocks import TRUNC_NORMAL_STD_CORRECTION
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map

OFF_DIAGONAL_SCALE = 5e-4
"""Scale of the squared correlations between different dimensions in Barlow."""
EPS = 1e-8
"""Added to the standard deviations in Barlow."""


class Projection(nn.Module):
    """A linear layer without bias."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(self.weight, 0, 1, -2, 2, generator=generator)
        inputs = self.weight.shape[1]
        self.weight.mul_(TRUNC_NORMAL_STD_CORRECTION * math.sqrt(1 / inputs))

    def forward(self, x: Float[Tensor, "*b I"]) -> Float[Tensor, "*b O"]:
        return F.linear(x, self.weight.to(x.dtype))


MakeEncoder = Callable[[], Any]
"""Builds another encoder with the architecture of the world model's encoder."""


class RepresentationLoss(nn.Module):
    """Base class of losses that train the latent state without a decoder."""

    loss_names: ClassVar[tuple[str, ...]]
    views: ClassVar[int] = 1
    """Number of augmented views of each sequence."""

    def make_views(self, batch: Batch, rng: Rng) -> Batch:
        """Return a batch with all views of the first sequence, then of the second, etc.

        In a data-parallel run, this order keeps all views of a sequence on one rank.
        """
        return batch

    def forward(
        self, feat: Float[Tensor, "B T F"], embed: Float[Tensor, "B T E"], batch: Batch
    ) -> dict[str, Tensor]:
        """Return the losses by name."""
        raise NotImplementedError

    def initialize_slow(self, encoder: nn.Module) -> None:
        """Copy the initial weights to their moving averages, if there are any."""

    def update_slow(self, encoder: nn.Module, stepped: Tensor) -> None:
        """Update the moving averages, if the optimizer has `stepped`."""


class ProjectionLoss(RepresentationLoss):
    """Compares a projection of the features with the detached embedding."""

    def __init__(self, feature_width: int, embed_width: int, make_encoder: MakeEncoder):
        super().__init__()
        self.projection = Projection(feature_width, embed_width)

    def forward(
        self, feat: Float[Tensor, "B T F"], embed: Float[Tensor, "B T E"], batch: Batch
    ) -> dict[str, Tensor]:
        projected = self.projection(feat).float()
        (name,) = self.loss_names
        return {name: self.loss(projected, embed.detach().float(), batch.get("mask"))}

    def loss(
        self,
        projected: Float[Tensor, "B T E"],
        embed: Float[Tensor, "B T E"],
        mask: Bool[Tensor, "B T"] | None = None,
    ) -> Tensor:
        """Return the loss: a scalar, or one value per step `(B, T)`."""
        raise NotImplementedError


def repeat_sequences(tree: Any, count: int) -> Any:
    """Repeat each sequence `count` times, in adjacent rows (as `repeat_interleave`)."""

    def repeat(x: Tensor) -> Tensor:
        return x[:, None].expand(-1, count, *x.shape[1:]).flatten(0, 1)

    return tree_map(repeat, tree)


class Barlow(ProjectionLoss):
    """Correlation of projection and embedding; the loss is a scalar per batch."""

    loss_names = ("barlow",)

    def loss(
        self,
        projected: Float[Tensor, "B T E"],
        embed: Float[Tensor, "B T E"],
        mask: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, ""]:
        if mask is not None:
            return barlow_loss(projected[mask], embed[mask])
        gathered = [all_gather_with_grad(x.flatten(0, 1)) for x in (projected, embed)]
        return barlow_loss(*gathered)


class InfoNCE(ProjectionLoss):
    """Cross-entropy of identifying the embedding of each step; one loss per step."""

    loss_names = ("infonce",)

    def loss(
        self,
        projected: Float[Tensor, "B T E"],
        embed: Float[Tensor, "B T E"],
        mask: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T"]:
        size, length = projected.shape[:2]
        local = local_sequences()
        first = local.start * length if local else 0
        index = torch.arange(first, first + size * length, device=embed.device)
        logits = projected.flatten(0, 1) @ all_gather_with_grad(embed.flatten(0, 1)).T
        if mask is not None:
            logits = logits.masked_fill(~mask.flatten(), -torch.inf)
        loss = F.cross_entropy(logits, index, reduction="none").view(size, length)
        return loss if mask is None else torch.where(mask, loss, 0.0)


def barlow_loss(
    projected: Float[Tensor, "N E"], embed: Float[Tensor, "N E"]
) -> Float[Tensor, ""]:
    """Return the squared distance of the correlation matrix to the identity matrix.

    Entries that are not on the diagonal are weighted with `OFF_DIAGONAL_SCALE`.
    """
    correlation = _standardized(projected).T @ _standardized(embed) / len(embed)
    diagonal = correlation.diagonal()
    off_diagonal = correlation.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + OFF_DIAGONAL_SCALE * off_diagonal


def _standardized(x: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
    """Return rows with mean 0 and standard deviation 1 in every dimension."""
    # the variance of a single row, an episode of one step, is 0
    variance = x.var(0, correction=min(1, len(x) - 1))
    # clamped, because the gradient of the root is infinite at a variance of 0
    deviation = variance.clamp(min=1e-20).sqrt()
    return (x - x.mean(0)) / (deviation + EPS)
