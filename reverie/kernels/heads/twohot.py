"""Two-hot distribution: mean, loss and gradient as one kernel each."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.jit import jit
from reverie.kernels.launch import apply_autograd, can_launch, padded_linear
from reverie.nets.blocks import Linear
from reverie.nets.distributions import Distribution, TwoHot
from reverie.nets.heads import Head

MAX_BINS = 2048
"""Maximum number of bins of the kernels."""


class FastHead(Head):
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
    """`TwoHot` whose logits may be followed by columns of padding."""

    def __init__(self, logits: Float[Tensor, "*b _"], bins: Float[Tensor, " N"]):
        self.raw, self.bins = logits, bins

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        return self.raw[..., : len(self.bins)].float()

    def pred(self) -> Float[Tensor, "*b"]:
        if self.raw.requires_grad and torch.is_grad_enabled():
            return super().pred()
        rows = self.raw.detach().reshape(-1, self.raw.shape[-1]).contiguous()
        mean = torch.empty(len(rows), device=rows.device)
        if len(rows):
            tall, wide = _tile(rows)
            grid, sizes = (triton.cdiv(len(rows), tall),), _sizes(rows, self.bins)
            _mean[grid](rows, self.bins, mean, *sizes, tall, wide)
        return mean.reshape(self.raw.shape[:-1])

    def loss(self, target: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        rows = self.raw.reshape(-1, self.raw.shape[-1])
        flat = target.detach().float().expand(self.raw.shape[:-1]).reshape(-1)
        return apply_autograd(_Loss, rows, self.bins, flat).reshape(target.shape)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bins: Tensor, target: Tensor) -> Tensor:
        logits, target = logits.contiguous(), target.contiguous()
        loss = torch.empty_like(target)
        if len(target):
            tall, wide = _tile(logits)
            grid, sizes = (triton.cdiv(len(logits), tall),), _sizes(logits, bins)
            _loss[grid](logits, bins, target, loss, *sizes, tall, wide)
        ctx.save_for_backward(logits, bins, target)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, bins, target = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        if len(target):
            tall, wide = _tile(logits)
            _loss_backward[(triton.cdiv(len(logits), tall),)](
                *(logits, bins, target, grad.contiguous(), dlogits),
                *(*_sizes(logits, bins), tall, wide),
            )
        return dlogits, None, None


def _sizes(logits: Tensor, bins: Tensor) -> tuple[int, int, int]:
    """Number of rows, their stride, and number of bins."""
    return *logits.shape, len(bins)


def _tile(logits: Tensor) -> tuple[int, int]:
    """Tile (rows, columns) of one program."""
    wide = max(16, triton.next_power_of_2(logits.shape[-1]))
    return max(1, 1024 // wide), wide


@jit
def _mean(logits, bins, mean, rows, stride, count, R: tl.constexpr, C: tl.constexpr):
    """Mean; adds symmetric bins in pairs, so that uniform gives exactly 0."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)[None, :]
    inside = (row < rows) & (col < count)
    low = float("-inf")
    right = tl.load(logits + row * stride + col, inside, low).to(tl.float32)
    top = tl.max(right, 1)[:, None]
    right = tl.exp(right - top)
    upper = inside & (col >= count - count // 2)
    left = tl.load(logits + row * stride + count - 1 - col, upper, low).to(tl.float32)
    left = tl.exp(left - top)
    difference = (right - left) / tl.sum(right, 1)[:, None]
    value = tl.load(bins + col, upper, 0.0) * tl.where(upper, difference, 0.0)
    row = tl.program_id(0) * R + tl.arange(0, R)
    tl.store(mean + row, tl.sum(value, 1), row < rows)


@jit
def _two_hot(bins, target, row, rows, col, count):
    """The two bins around each target, and the weight of the lower one."""
    bin = tl.load(bins + col, col < count, float("inf"))
    point = tl.load(target + row, row < rows, 0.0)
    above = tl.sum(((bin <= point) & (col < count)).to(tl.int32), 1)[:, None]
    below = tl.maximum(above - 1, 0)
    above = tl.minimum(above, count - 1)
    bin = tl.where(col < count, bin, 0.0)
    to_below = tl.abs(tl.sum(tl.where(col == below, bin, 0.0), 1)[:, None] - point)
    to_above = tl.abs(tl.sum(tl.where(col == above, bin, 0.0), 1)[:, None] - point)
    share = tl.where(below == above, 0.5, to_above / (to_below + to_above))
    # NaN for NaN targets
    return below, above, tl.where(point == point, share, point)


@jit
def _loss(
    logits, bins, target, loss, rows, stride, count, R: tl.constexpr, C: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)[None, :]
    inside = (row < rows) & (col < count)
    below, above, share = _two_hot(bins, target, row, rows, col, count)
    v = tl.load(logits + row * stride + col, inside, float("-inf")).to(tl.float32)
    v -= tl.max(v, 1)[:, None]
    total = tl.log(tl.sum(tl.exp(v), 1))
    weight = tl.where(col == below, share, 0.0) + tl.where(col == above, 1 - share, 0.0)
    chosen = tl.sum(tl.where(weight != 0, weight * v, 0.0), 1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    tl.store(loss + row, total - chosen, row < rows)


@jit
def _loss_backward(
    logits,
    bins,
    target,
    grad,
    dlogits,
    rows,
    stride,
    count,
    R: tl.constexpr,
    C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)[None, :]
    inside = (row < rows) & (col < count)
    below, above, share = _two_hot(bins, target, row, rows, col, count)
    v = tl.load(logits + row * stride + col, inside, float("-inf")).to(tl.float32)
    v = tl.exp(v - tl.max(v, 1)[:, None])
    v /= tl.sum(v, 1)[:, None]
    weight = tl.where(col == below, share, 0.0) + tl.where(col == above, 1 - share, 0.0)
    scale = tl.load(grad + row, row < rows, 0.0)
    value = tl.where(inside, scale * (v - weight), 0.0)
    tl.store(dlogits + row * stride + col, value, (row < rows) & (col < stride))
