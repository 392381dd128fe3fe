"""Categorical actions: one kernel for sampling, one for log-probability and entropy."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from reverie.kernels.heads.sample_layer import MAX_CLASSES as MAX_FUSED_CLASSES
from reverie.kernels.heads.sample_layer import sample_layer
from reverie.kernels.launch import can_launch, jit, padded_linear, tile_shape
from reverie.kernels.norm.norm_linear import is_linear_fusable, norm_silu_linear
from reverie.kernels.norm.rms_norm import FastMLP
from reverie.nets.blocks import MLP, Linear, Norm
from reverie.nets.distributions import ActionDistribution, Categorical, sum_events
from reverie.nets.heads import PolicyHead
from reverie.nets.rng import Rng
from reverie.nets.streams import NOISE, on_stream, wait_for
from reverie.spaces import Space

MAX_CLASSES = 2048
"""Maximum number of classes that the kernels of this file support."""


class FastPolicyHead(PolicyHead):
    """`PolicyHead` with fused kernels for discrete actions."""

    def forward(self, feat: Float[Tensor, "*b F"]) -> dict[str, ActionDistribution]:
        if len(self.spaces) == 1 and not torch.is_grad_enabled():
            ((key, space),) = self.spaces.items()
            if not space.shape and self._can_sample(key, space, feat.dtype):
                return {key: LazyCategorical(self, key, feat)}
        return super().forward(feat)

    def _can_sample(self, key: str, space: Space, dtype: torch.dtype) -> bool:
        """True if `LazyCategorical` supports the head and the action space."""
        mlp = self.mlp
        return (
            type(mlp) is FastMLP
            and mlp.layers > 0
            and self._is_supported(key, space)
            and space.classes <= MAX_FUSED_CLASSES
            and is_linear_fusable(_hidden_layer(mlp, 0)[1], mlp.act, dtype)
        )

    def _is_supported(self, key: str, space: Space) -> bool:
        """True if the kernels support the action space.

        They do not support masks, with which some action dimensions have fewer classes
        than others.
        """
        is_masked = "allowed" in dict(self.head[key].named_buffers(recurse=False))
        return space.is_discrete and not is_masked and space.classes <= MAX_CLASSES

    def _distribution(self, key: str, space: Space, x: Tensor) -> ActionDistribution:
        if not self._is_supported(key, space) or not can_launch(x.device, x.dtype):
            return super()._distribution(key, space, x)
        layer: Linear = self.head[key].get_submodule("logits")  # type: ignore[assignment]
        classes, unimix = space.classes, self.config.unimix
        logits = padded_linear(layer, x) if not space.shape else layer(x)
        return FastCategorical(logits, len(space.shape), unimix, classes)


class FastCategorical(Categorical):
    """`Categorical` with fused kernels; `logp` also computes the entropy.

    `padded_logits` may have columns of padding after the last class.
    """

    def __init__(
        self,
        logits: Float[Tensor, "... _"],
        dims: int = 0,
        unimix: float = 0.0,
        classes: int | None = None,
    ):
        self.padded_logits, self.dims, self.unimix = logits, dims, unimix
        self.classes = classes = classes or logits.shape[-1]
        # entropy of the uniform distribution, for actions of one dimension
        self.maxent = None if dims else math.log(classes) if classes > 1 else None
        self._entropy: Tensor | None = None

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        logits = self.padded_logits[..., : self.classes]
        return Categorical(logits, self.dims, self.unimix).logits

    def sample(self, rng: Rng) -> Int[Tensor, "*any"]:
        rows, tile = _rows_and_tile(self.padded_logits.detach())
        index = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        if len(rows):
            noise = rng.exponential(rows[:, : self.classes])
            _sample[(triton.cdiv(len(rows), tile[0]),)](
                rows, noise, index, self.unimix, *rows.shape, self.classes, *tile
            )
        return index.reshape(self.padded_logits.shape[:-1])

    def logp(self, event: Int[Tensor, "*any"]) -> Tensor:
        function: Any = _LogpEntropy
        *batch, width = self.padded_logits.shape
        logp, entropy = function.apply(
            *(self.padded_logits.reshape(-1, width), event.reshape(-1)),
            *(self.unimix, self.classes),
        )
        self._entropy = sum_events(entropy.reshape(batch), self.dims)
        return sum_events(logp.reshape(batch), self.dims)

    def entropy(self) -> Tensor:
        return super().entropy() if self._entropy is None else self._entropy


class LazyCategorical(FastCategorical):
    """Distribution of one discrete action, whose layers run when it is sampled.

    For use without gradients. After the first matrix product, a sample takes one kernel
    per layer, and the last one also samples. Samples have the dtype of the space.
    """

    def __init__(self, policy: FastPolicyHead, key: str, feat: Float[Tensor, "*b F"]):
        self.policy, self.feat, self.dims = policy, feat, 0
        self.layer: Linear = policy.head[key].get_submodule("logits")  # type: ignore[assignment]
        self.classes = classes = len(self.layer.bias)
        self.unimix = policy.config.unimix
        self.maxent = math.log(classes) if classes > 1 else None
        dtype = policy.spaces[key].dtype.name
        self.dtype = torch.int32 if dtype == "int32" else torch.int64
        self._entropy: Tensor | None = None

    @cached_property
    def padded_logits(self) -> Tensor:  # type: ignore[override]
        return padded_linear(self.layer, self.policy.mlp(self.feat))

    def sample(self, rng: Rng) -> Int[Tensor, "*any"]:
        *batch, width = self.feat.shape
        x, mlp = self.feat.reshape(-1, width), self.policy.mlp
        with on_stream(x, NOISE):  # in parallel with the first layer
            noise = rng.exponential(x.new_empty(len(x), self.classes))
        layer, norm = _hidden_layer(mlp, 0)
        weight, bias = layer.cast(x.dtype)
        x = F.linear(x, weight)
        for i in range(1, mlp.layers):
            layer, next_norm = _hidden_layer(mlp, i)
            x = norm_silu_linear(x, bias, norm, layer)
            bias, norm = layer.cast(x.dtype)[1], next_norm
        wait_for(x, NOISE)
        index = sample_layer(
            *(x, bias, norm, self.layer, noise[:, None], self.unimix, self.dtype)
        )
        return index.reshape(batch)


class _LogpEntropy(torch.autograd.Function):
    """Return the log-probability of the event, and the entropy, of each row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, event: Tensor, unimix: float, classes: int
    ) -> tuple[Tensor, Tensor]:
        (logits, tile), event = _rows_and_tile(logits), event.long().contiguous()
        logp, entropy = torch.empty(2, len(logits), device=logits.device)
        if len(logits):
            _logp_entropy[(triton.cdiv(len(logits), tile[0]),)](
                *(logits, event, logp, entropy, None),
                *(unimix, *logits.shape, classes, unimix > 0, *tile),
            )
        ctx.save_for_backward(logits, event)
        ctx.unimix, ctx.classes = unimix, classes
        return logp, entropy

    @staticmethod
    def backward(
        ctx: Any, dlogp: Tensor, dentropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits, event = ctx.saved_tensors
        dlogits, (_, tile) = torch.empty_like(logits), _rows_and_tile(logits)
        if len(logits):
            _logp_entropy[(triton.cdiv(len(logits), tile[0]),)](
                *(logits, event, dlogp.contiguous(), dentropy.contiguous(), dlogits),
                *(ctx.unimix, *logits.shape, ctx.classes, ctx.unimix > 0, *tile),
            )
        return dlogits, None, None, None


def _hidden_layer(mlp: MLP, i: int) -> tuple[Linear, Norm]:
    """Return hidden layer `i` and the norm after it."""
    return getattr(mlp, f"linear{i}"), getattr(mlp, f"norm{i}")


def _rows_and_tile(logits: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return logits as a matrix, and the tile (rows, columns) of one program."""
    width = logits.shape[-1]
    return logits.reshape(-1, width).contiguous(), tile_shape(width)


@jit
def _softmax(logits, row, col, rows, stride, classes, unimix, MIXED: tl.constexpr):
    """Return the softmax, its mixture with a uniform distribution, and the logarithm of
    the mixture. If MIXED is false, `unimix` must be 0."""
    mask = (row < rows) & (col < classes)
    v = tl.load(logits + row * stride + col, mask, float("-inf")).to(tl.float32)
    v = tl.where(row < rows, v, 0.0)
    v -= tl.max(v, 1)[:, None]
    total = tl.sum(tl.exp(v), 1)[:, None]
    softmax = tl.exp(v) / total
    if MIXED:
        p = (1 - unimix) * softmax + tl.where(col < classes, unimix / classes, 0.0)
        log_p = tl.log(tl.where(col < classes, p, 1.0))
    else:
        p = softmax
        log_p = tl.where(col < classes, v - tl.log(total), 0.0)
    return softmax, p, log_p


@jit
def _sample(
    logits, noise, index, unimix, rows, stride, classes,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Store the index of the sampled class, `argmax(probs / noise)`, of each row.

    With exponential noise, this samples from the distribution. K is the number of
    classes, padded to a power of two.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, K)[None, :]
    _, p, _ = _softmax(logits, row, col, rows, stride, classes, unimix, True)
    mask = (row < rows) & (col < classes)
    score = p / tl.load(noise + row * classes + col, mask, 1.0)
    sample = tl.argmax(tl.where(mask, score, -1.0), 1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    tl.store(index + row, sample.to(tl.int64), row < rows)


@jit
def _logp_entropy(
    logits, event, logp, entropy, dlogits, unimix, rows, stride, classes,
    MIXED: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Without `dlogits`, write `logp` and `entropy`.

    With `dlogits`, read gradients from `logp` and `entropy`, and write the gradient of
    the logits to `dlogits`.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, K)[None, :]
    softmax, p, log_p = _softmax(logits, row, col, rows, stride, classes, unimix, MIXED)
    chosen = col == tl.load(event + row, row < rows, 0)
    if dlogits is None:
        row = tl.program_id(0) * R + tl.arange(0, R)
        tl.store(logp + row, tl.sum(tl.where(chosen, log_p, 0.0), 1), row < rows)
        tl.store(entropy + row, -tl.sum(tl.where(p > 0, p * log_p, 0.0), 1), row < rows)
    else:
        # softmax * d(log_p) / d(softmax). Without mixing this is 1; the quotient would
        # be 0 / 0 where p is zero.
        if MIXED:
            ratio = (1 - unimix) * softmax / tl.where(col < classes, p, 1.0)
        else:
            ratio = tl.where(col < classes, 1.0, 0.0)
        logp_grad = tl.where(chosen, ratio, 0.0)
        logp_grad -= softmax * tl.sum(logp_grad, 1)[:, None]
        entropy_grad = -(1 - unimix) * softmax * log_p if MIXED else -softmax * log_p
        entropy_grad -= softmax * tl.sum(entropy_grad, 1)[:, None]
        grad = tl.load(logp + row, row < rows, 0.0) * logp_grad
        grad += tl.load(entropy + row, row < rows, 0.0) * entropy_grad
        grad = tl.where(col < classes, grad, 0.0)
        tl.store(dlogits + row * stride + col, grad, (row < rows) & (col < stride))
