"""A policy's choice of one class: draw, log-probability and entropy, a kernel each."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from reverie.kernels.launch import can_launch, padded_linear
from reverie.nets.blocks import Linear
from reverie.nets.distributions import ActionDistribution, Categorical
from reverie.nets.heads import PolicyHead
from reverie.nets.rng import Rng
from reverie.spaces import Space

MOST = 2048
"""The most classes that one program holds."""


class FastPolicyHead(PolicyHead):
    def _out(self, key: str, space: Space, x: Tensor) -> ActionDistribution:
        out = self.head[key]
        uneven = "allowed" in dict(out.named_buffers(recurse=False))
        usual = space.is_discrete and not uneven and space.classes <= MOST
        if not usual or not can_launch(x.device, x.dtype):
            return super()._out(key, space, x)
        layer: Linear = out.get_submodule("logits")  # type: ignore[assignment]
        classes, unimix = space.classes, self.config.unimix
        logits = padded_linear(layer, x) if not space.shape else layer(x)
        return FastCategorical(logits, len(space.shape), unimix, classes)


class FastCategorical(Categorical):
    """A log-probability comes with the entropy, which is then there for the asking."""

    def __init__(
        self,
        logits: Float[Tensor, "... _"],
        dims: int = 0,
        unimix: float = 0.0,
        classes: int | None = None,
    ):
        self.raw, self.dims, self.unimix = logits, dims, unimix
        self.classes = classes = classes or logits.shape[-1]
        self.maxent = None if dims else math.log(classes) if classes > 1 else None
        self._entropy: Tensor | None = None

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        raw = self.raw[..., : self.classes]
        return Categorical(raw, self.dims, self.unimix).logits

    def sample(self, rng: Rng) -> Int[Tensor, "*any"]:
        rows, tile = _rows(self.raw.detach())
        index = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        if len(rows):
            clocks = rng.exponential(rows[:, : self.classes])
            grid, sizes = (
                (triton.cdiv(len(rows), tile[0]),),
                (*rows.shape, self.classes),
            )
            _draw[grid](rows, clocks, index, self.unimix, *sizes, *tile)
        return index.reshape(self.raw.shape[:-1])

    def logp(self, event: Int[Tensor, "*any"]) -> Tensor:
        both: Any = _Both
        logp, entropy = both.apply(
            self.raw.reshape(-1, self.raw.shape[-1]),
            event.reshape(-1),
            self.unimix,
            self.classes,
        )
        self._entropy = self._sum(entropy)
        return self._sum(logp)

    def entropy(self) -> Tensor:
        return super().entropy() if self._entropy is None else self._entropy

    def _sum(self, x: Tensor) -> Tensor:
        x = x.reshape(self.raw.shape[:-1])
        return x.flatten(-self.dims).sum(-1) if self.dims else x


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, event: Tensor, unimix: float, classes: int
    ) -> tuple[Tensor, Tensor]:
        (logits, tile), event = _rows(logits), event.long().contiguous()
        logp, entropy = torch.empty(2, len(logits), device=logits.device)
        if len(logits):
            _both[(triton.cdiv(len(logits), tile[0]),)](
                *(logits, event, logp, entropy, unimix, *logits.shape, classes),
                *(unimix > 0, *tile),
            )
        ctx.save_for_backward(logits, event)
        ctx.unimix, ctx.classes = unimix, classes
        return logp, entropy

    @staticmethod
    def backward(
        ctx: Any, dlogp: Tensor, dentropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits, event = ctx.saved_tensors
        dlogits, (_, tile) = torch.empty_like(logits), _rows(logits)
        if len(logits):
            _both_backward[(triton.cdiv(len(logits), tile[0]),)](
                *(logits, event, dlogp.contiguous(), dentropy.contiguous(), dlogits),
                *(ctx.unimix, *logits.shape, ctx.classes, ctx.unimix > 0, *tile),
            )
        return dlogits, None, None, None


def _rows(logits: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Logits as a matrix, and rows and columns of one program's tile."""
    columns = logits.shape[-1]
    wide = max(16, int(triton.next_power_of_2(columns)))
    return logits.reshape(-1, columns).contiguous(), (max(1, 1024 // wide), wide)


@triton.jit
@no_type_check
def _softmax(logits, row, col, rows, apart, classes, unimix, MIXED: tl.constexpr):
    """The softmax, the probabilities after mixing, and their logarithms."""
    inside = (row < rows) & (col < classes)
    v = tl.load(logits + row * apart + col, inside, float("-inf")).to(tl.float32)
    v = tl.where(row < rows, v, 0.0)
    v -= tl.max(v, 1)[:, None]
    total = tl.sum(tl.exp(v), 1)[:, None]
    s = tl.exp(v) / total
    if MIXED:
        p = (1 - unimix) * s + tl.where(col < classes, unimix / classes, 0.0)
        log = tl.log(tl.where(col < classes, p, 1.0))
    else:
        p = s
        log = tl.where(col < classes, v - tl.log(total), 0.0)
    return s, p, log


@triton.jit
@no_type_check
def _draw(
    logits,
    clocks,
    index,
    unimix,
    rows,
    apart,
    classes,
    R: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, K)[None, :]
    _, p, _ = _softmax(logits, row, col, rows, apart, classes, unimix, True)
    inside = (row < rows) & (col < classes)
    clock = tl.load(clocks + row * classes + col, inside, 1.0)
    first = tl.argmax(tl.where(inside, p / clock, -1.0), 1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    tl.store(index + row, first.to(tl.int64), row < rows)


@triton.jit
@no_type_check
def _both(
    logits,
    event,
    logp,
    entropy,
    unimix,
    rows,
    apart,
    classes,
    MIXED: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, K)[None, :]
    _, p, log = _softmax(logits, row, col, rows, apart, classes, unimix, MIXED)
    chosen = tl.load(event + row, row < rows, 0)
    row = tl.program_id(0) * R + tl.arange(0, R)
    tl.store(logp + row, tl.sum(tl.where(col == chosen, log, 0.0), 1), row < rows)
    tl.store(entropy + row, -tl.sum(tl.where(p > 0, p * log, 0.0), 1), row < rows)


@triton.jit
@no_type_check
def _both_backward(
    logits,
    event,
    dlogp,
    dentropy,
    dlogits,
    unimix,
    rows,
    apart,
    classes,
    MIXED: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, K)[None, :]
    s, p, log = _softmax(logits, row, col, rows, apart, classes, unimix, MIXED)
    chosen = col == tl.load(event + row, row < rows, 0)
    # d log p / d s, times s, is not computed where p may be zero
    if MIXED:
        ratio = (1 - unimix) * s / tl.where(col < classes, p, 1.0)
    else:
        ratio = tl.where(col < classes, 1.0, 0.0)
    picked = tl.where(chosen, ratio, 0.0)
    picked -= s * tl.sum(picked, 1)[:, None]
    slope = -(1 - unimix) * s * log if MIXED else -s * log
    slope -= s * tl.sum(slope, 1)[:, None]
    value = tl.load(dlogp + row, row < rows, 0.0) * picked
    value += tl.load(dentropy + row, row < rows, 0.0) * slope
    value = tl.where(col < classes, value, 0.0)
    tl.store(dlogits + row * apart + col, value, (row < rows) & (col < apart))
