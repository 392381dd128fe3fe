"""Prototypes: a representation without a decoder, after DreamerPro (Deng et al., 2022).

Every sequence is augmented twice (two views): its images are shifted by up to three
pixels, by the same offset in all steps. Prototypes are learned unit vectors. Targets
are soft assignments of the embeddings of a slow encoder to prototypes, balanced over
the batch with the Sinkhorn algorithm, so that all prototypes are used. Two losses
predict them by a softmax over inner products with the prototypes:

- `proto_swav`: from the embedding of the other view;
- `proto_temp`: from the features of the latent state of the same view.

Embeddings and features are projected to the dimension of the prototypes and normalized.
The third loss, `proto_norm`, is the squared difference between 1 and the norms of these
projections before they are normalized.

The first step of every sequence is skipped, because its latent state is computed from a
state stored in the replay buffer, which may be outdated: it is not assigned to
prototypes, and its losses are zero. The losses of the T - 1 other steps are multiplied
by T / (T - 1), so that the mean over all T steps is equal to the mean of the original
losses over these T - 1 steps. In the evaluation on episodes, whose batches have a mask,
T is the number of rows of each episode without padding, and padding has no assignments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn

from reverie.api import Batch, UserError
from reverie.distributed.collective import all_gather_with_grad, local_sequences
from reverie.nets.rng import Rng
from reverie.worlds.representation import (
    MakeEncoder,
    Projection,
    RepresentationLoss,
    repeat_sequences,
)

PROTOTYPES, PROTOTYPE_DIM = 2500, 32
"""Number and dimension of the prototypes."""
TEMPERATURE, SINKHORN_TEMPERATURE = 0.1, 0.05
"""Softmax temperatures of the predictions and of the targets."""
SINKHORN_ITERATIONS = 3
"""Iterations that balance the assignments over the batch."""
SLOW_RATE = 0.05
"""Rate of the moving average of weights (EMA) in the slow encoder."""
FROZEN_UPDATES = 10_000
"""Updates before prototypes are trained."""
MAX_SHIFT = 3
"""Largest shift of a view in pixels."""
SHIFT = "prototypes/shift"
"""Batch key with the random shift of each sequence, which `make_views` adds."""


class Prototypes(RepresentationLoss):
    """Losses of DreamerPro, on a batch with both views of every sequence.

    `feature_width` is the size of the features of a latent state, `embed_width` that of
    the embedding, the output of the encoder. `make_encoder` builds the slow encoder.
    """

    loss_names = ("proto_swav", "proto_temp", "proto_norm")
    views = 2

    def __init__(self, feature_width: int, embed_width: int, make_encoder: MakeEncoder):
        super().__init__()
        self.slow_encoder = make_encoder()
        self.image_keys: list[str] = self.slow_encoder.imgkeys
        if not self.image_keys:
            raise UserError(
                "The representation prototypes shifts images, but the task has none.\n"
                "  Fix: --dreamer.representation barlow, infonce or decoder"
            )
        # Embeddings and features are projected to vectors of the same dimension as the
        # prototypes. Each row of `prototypes.weight` is a prototype.
        self.from_embed = Projection(embed_width, PROTOTYPE_DIM)
        self.from_features = Projection(feature_width, PROTOTYPE_DIM)
        self.prototypes = Projection(PROTOTYPE_DIM, PROTOTYPES)
        self.slow_from_embed = Projection(embed_width, PROTOTYPE_DIM)
        for module in (self.slow_encoder, self.slow_from_embed):
            module.requires_grad_(False)
        # A parameter without gradients, not a buffer: after a skipped update, the agent
        # restores buffers while `update_slow` changes this number on another stream.
        self.updates = nn.Parameter(torch.zeros(()), requires_grad=False)

    def make_views(self, batch: Batch, rng: Rng) -> Batch:
        """Return a batch with two views of each sequence, shifted at random."""
        views: Batch = repeat_sequences(batch, self.views)
        size = len(views["is_first"])
        zeros = torch.zeros(size, 2, device=views["is_first"].device)
        offset = MAX_SHIFT * (2 * rng.uniform(zeros) - 1)  # (x, y) in pixels
        for key in self.image_keys:
            views[key] = shift_images(views[key], offset)
        views[SHIFT] = offset
        return views

    def forward(
        self, feat: Float[Tensor, "B T F"], embed: Float[Tensor, "B T E"], batch: Batch
    ) -> dict[str, Tensor]:
        if SHIFT not in batch:
            raise UserError(
                "The world computes the losses of the representation 'prototypes' on a "
                "batch without the two views of each sequence.\n"
                "  Fix: call super().loss in the world, or "
                "self.with_augmented_views(state, batch, rng) at the start of its loss "
                "and self.average_views(loss) at its end, or use "
                "--dreamer.representation decoder."
            )
        mask = batch.get("mask")
        masks = [None if mask is None else mask[i :: self.views, 1:] for i in (0, 1)]
        with torch.no_grad():
            slow = self.slow_encoder(batch, embed.dtype)[:, 1:]
            slow_scores = self._scores(self.slow_from_embed(slow).float())[0]
            by_view = [
                self._assign(slow_scores[i :: self.views], masks[i]) for i in (0, 1)
            ]
            targets = torch.stack(by_view, 1).flatten(0, 1)
            other_targets = torch.stack(by_view[::-1], 1).flatten(0, 1)
        embed, feat = embed[:, 1:], feat[:, 1:]
        embed_scores, embed_norm = self._scores(self.from_embed(embed).float())
        feat_scores, feat_norm = self._scores(self.from_features(feat).float())
        losses = {
            "proto_swav": _cross_entropy(other_targets, embed_scores),
            "proto_temp": _cross_entropy(targets, feat_scores),
            "proto_norm": (embed_norm - 1).square() + (feat_norm - 1).square(),
        }
        return {name: _prepend_zero_loss(loss, mask) for name, loss in losses.items()}

    @torch.no_grad()
    def initialize_slow(self, encoder: nn.Module) -> None:
        """Set the slow weights to those of the encoder."""
        self.slow_encoder.load_state_dict(encoder.state_dict())
        self.slow_from_embed.load_state_dict(self.from_embed.state_dict())

    @torch.no_grad()
    def update_slow(self, encoder: nn.Module, stepped: Tensor) -> None:
        """Update the moving average of weights, if the optimizer has `stepped`."""
        mix = torch.where(stepped, SLOW_RATE, 0.0)
        pairs = (
            (self.slow_encoder, encoder),
            (self.slow_from_embed, self.from_embed),
        )
        for slow, current in pairs:
            old: list[Tensor] = list(slow.parameters())
            new: list[Tensor] = list(current.parameters())
            torch._foreach_mul_(old, 1 - mix)
            torch._foreach_add_(old, torch._foreach_mul(new, mix))
        self.updates.add_(stepped)

    def _scores(
        self, x: Float[Tensor, "B T W"]
    ) -> tuple[Float[Tensor, "B T P"], Float[Tensor, "B T"]]:
        """Return inner products of normalized vectors with all prototypes, and the
        norms of the vectors."""
        weight = F.normalize(self.prototypes.weight, dim=-1)
        # gradients are zero until `FROZEN_UPDATES`, without a host sync
        trained = self.updates >= FROZEN_UPDATES
        weight = torch.where(trained, weight, weight.detach())
        return F.linear(F.normalize(x, dim=-1), weight), x.norm(dim=-1)

    def _assign(
        self, scores: Float[Tensor, "B T P"], mask: Bool[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T P"]:
        """Return assignments of the steps of one view, balanced over all ranks.

        Called without gradients, so `all_gather_with_grad` only gathers the scores.
        """
        if mask is not None:
            masked = torch.zeros_like(scores)
            masked[mask] = sinkhorn(scores[mask])
            return masked
        size, length = scores.shape[:2]
        local = local_sequences()
        first = local.start * length if local else 0
        assigned = sinkhorn(all_gather_with_grad(scores.flatten(0, 1)))
        return assigned[first : first + size * length].view(size, length, -1)


def sinkhorn(scores: Float[Tensor, "N P"]) -> Float[Tensor, "N P"]:
    """Return assignments of rows to prototypes, about equally many to each prototype.

    Each iteration divides by the sums over rows, then by the sums over prototypes.
    """
    logits = scores / SINKHORN_TEMPERATURE
    for _ in range(SINKHORN_ITERATIONS):
        logits = logits - logits.logsumexp(0, keepdim=True)
        logits = logits - logits.logsumexp(1, keepdim=True)
    return logits.exp()


def shift_images(
    images: UInt8[Tensor, "B T h w c"], offset: Float[Tensor, "B 2"]
) -> UInt8[Tensor, "B T h w c"]:
    """Sample each image at positions moved by `offset` (x, y) pixels, with bilinear
    interpolation: the content moves in the opposite direction.

    All images of a sequence have the same offset. Pixels outside of an image have the
    value of the nearest border pixel.
    """
    length, height, width = images.shape[1:4]
    x = images.float().permute(0, 1, 4, 2, 3).flatten(1, 2)  # (B, T c, h, w)
    # centers of the pixels, in the coordinates of `grid_sample`: from -1 to 1
    axes = [
        (torch.arange(n, device=images.device) + 0.5) * 2 / n - 1
        for n in (width, height)
    ]
    columns, rows = torch.meshgrid(axes[0], axes[1], indexing="xy")
    dx, dy = (shift[:, None, None] for shift in offset.unbind(1))
    grid = torch.stack([columns + dx * 2 / width, rows + dy * 2 / height], -1)
    x = F.grid_sample(x, grid, "bilinear", "border", align_corners=False)
    x = x.reshape(len(x), length, -1, height, width).permute(0, 1, 3, 4, 2)
    return x.round().clamp(0, 255).to(torch.uint8)


def _cross_entropy(target: Tensor, scores: Tensor) -> Float[Tensor, "B T"]:
    """Return the cross-entropy of soft assignments, predicted from scores."""
    return -(target * F.log_softmax(scores / TEMPERATURE, -1)).sum(-1)


def _prepend_zero_loss(
    loss: Float[Tensor, "B _"], mask: Bool[Tensor, "B T"] | None
) -> Float[Tensor, "B T"]:
    """Prepend a loss of zero, and scale the others so that the mean does not change.

    With a mask, this is the mean of each sequence over the rows in the mask. The losses
    of other rows are zero.
    """
    if mask is not None:
        rows = mask.sum(1, keepdim=True)
        scaled = loss * (rows / (rows - 1).clamp(min=1))
        return F.pad(torch.where(mask[:, 1:], scaled, 0.0), (1, 0))
    steps = loss.shape[1]
    return F.pad(loss * ((steps + 1) / max(1, steps)), (1, 0))
