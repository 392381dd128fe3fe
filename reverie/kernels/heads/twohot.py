"""Two-hot distribution: one kernel each for mean, loss and gradient."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import (
    apply_autograd,
    can_launch,
    jit,
    padded_linear,
    tile_shape,
)
from reverie.nets.blocks import Linear
from reverie.nets.distributions import Distribution, TwoHot
from reverie.nets.heads import Head

MAX_BINS = 2048
"""Maximum number of bins that the kernels support."""


class FastHead(Head):
    """`Head` with fused kernels for two-hot distributions."""

    def forward(self, feat: Float[Tensor, "*b F"]) -> Distribution:
        bins = dict(self.named_buffers(recurse=False)).get("bins")
        if (
            bins is None
            or len(bins) > MAX_BINS
            or not can_launch(feat.device, feat.dtype)
        ):
            return super().forward(feat)
        layer: Linear = self.head["logits"]  # type: ignore[assignment]
        return FastTwoHot(padded_linear(layer, self.mlp(feat)), bins)


class FastTwoHot(TwoHot):
    """`TwoHot` whose logits may have columns of padding after the last bin."""

    def __init__(self, logits: Float[Tensor, "*b _"], bins: Float[Tensor, " N"]):
        self.padded_logits, self.bins = logits, bins

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        return self.padded_logits[..., : len(self.bins)].float()

    def pred(self) -> Float[Tensor, "*b"]:
        if self.padded_logits.requires_grad and torch.is_grad_enabled():
            return super().pred()
        *batch, width = self.padded_logits.shape
        rows = self.padded_logits.detach().reshape(-1, width).contiguous()
        mean = torch.empty(len(rows), device=rows.device)
        if len(rows):
            tile = tile_shape(width)
            _mean[(triton.cdiv(len(rows), tile[0]),)](
                rows, self.bins, mean, *rows.shape, len(self.bins), *tile
            )
        return mean.reshape(batch)

    def loss(self, target: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        *batch, width = self.padded_logits.shape
        rows = self.padded_logits.reshape(-1, width)
        flat = target.detach().float().expand(batch).reshape(-1)
        return apply_autograd(_Loss, rows, self.bins, flat).reshape(target.shape)


class _Loss(torch.autograd.Function):
    """Return the cross-entropy between two-hot targets and the distribution."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bins: Tensor, target: Tensor) -> Tensor:
        logits, target = logits.contiguous(), target.contiguous()
        loss = torch.empty_like(target)
        _launch_loss(logits, bins, target, loss, None)
        ctx.save_for_backward(logits, bins, target)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, bins, target = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        _launch_loss(logits, bins, target, grad.contiguous(), dlogits)
        return dlogits, None, None


def _launch_loss(logits: Tensor, bins: Tensor, *tensors: Tensor | None) -> None:
    """Launch `_loss`; `tensors` are its arguments `target`, `loss` and `dlogits`."""
    if len(logits):
        tile = tile_shape(logits.shape[1])
        _loss[(triton.cdiv(len(logits), tile[0]),)](
            logits, bins, *tensors, *logits.shape, len(bins), *tile
        )


@jit
def _mean(logits, bins, mean, rows, stride, count, R: tl.constexpr, C: tl.constexpr):
    """Store the mean of each row's distribution over `count` bins.

    Symmetric bins are added in pairs, and differences of probabilities are computed
    from those of logits, as in `TwoHot.pred`.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)[None, :]
    mask = (row < rows) & (col < count)
    inf = float("inf")
    v = tl.load(logits + row * stride + col, mask, -inf).to(tl.float32)
    max_logit = tl.max(v, 1)[:, None]
    is_positive = mask & (col >= count - count // 2)
    mirrored = logits + row * stride + count - 1 - col
    mirrored_v = tl.load(mirrored, is_positive, -inf).to(tl.float32)
    half_ratio = tl.where(is_positive, (v - mirrored_v) / 2, 0.0)
    v = tl.exp(v - max_logit)
    pair = (v + tl.exp(mirrored_v - max_logit)) / tl.sum(v, 1)[:, None]
    difference = tl.where(is_positive, pair * _tanh(half_ratio), 0.0)
    value = tl.load(bins + col, is_positive, 0.0) * difference
    row = tl.program_id(0) * R + tl.arange(0, R)
    tl.store(mean + row, tl.sum(value, 1), row < rows)


@jit
def _tanh(x):
    """Return tanh with a small relative error also near 0."""
    square = x * x
    near_zero = x * (1 - square * (1 / 3 - square * (2 / 15)))  # Taylor series
    return tl.where(tl.abs(x) < 0.05, near_zero, 2 * tl.sigmoid(2 * x) - 1)


@jit
def _two_hot(bins, target, row, rows, col, count):
    """Return the two bins around each target, and the weight of the lower one."""
    bin = tl.load(bins + col, col < count, float("inf"))
    point = tl.load(target + row, row < rows, 0.0)
    above = tl.sum(((bin <= point) & (col < count)).to(tl.int32), 1)[:, None]
    below = tl.maximum(above - 1, 0)
    above = tl.minimum(above, count - 1)
    bin = tl.where(col < count, bin, 0.0)
    lower = tl.sum(tl.where(col == below, bin, 0.0), 1)[:, None]
    upper = tl.sum(tl.where(col == above, bin, 0.0), 1)[:, None]
    to_lower, to_upper = tl.abs(lower - point), tl.abs(upper - point)  # distances
    weight = tl.where(below == above, 0.5, to_upper / (to_lower + to_upper))
    # a NaN target (not equal to itself) has a NaN weight, so that its loss is NaN
    return below, above, tl.where(point == point, weight, point)


@jit
def _loss(
    logits, bins, target, loss, dlogits, rows, stride, count,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the loss to `loss` if `dlogits` is None.

    Otherwise read the gradient of the loss from `loss`, and write the gradient of the
    logits to `dlogits`.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)[None, :]
    mask = (row < rows) & (col < count)
    below, above, lower_weight = _two_hot(bins, target, row, rows, col, count)
    v = tl.load(logits + row * stride + col, mask, float("-inf")).to(tl.float32)
    v -= tl.max(v, 1)[:, None]
    weight = tl.where(col == below, lower_weight, 0.0)
    weight += tl.where(col == above, 1 - lower_weight, 0.0)
    if dlogits is None:
        log_sum = tl.log(tl.sum(tl.exp(v), 1))
        mean_logit = tl.sum(tl.where(weight != 0, weight * v, 0.0), 1)
        row = tl.program_id(0) * R + tl.arange(0, R)
        tl.store(loss + row, log_sum - mean_logit, row < rows)
    else:
        v = tl.exp(v)
        v /= tl.sum(v, 1)[:, None]
        scale = tl.load(loss + row, row < rows, 0.0)
        value = tl.where(mask, scale * (v - weight), 0.0)
        tl.store(dlogits + row * stride + col, value, (row < rows) & (col < stride))
