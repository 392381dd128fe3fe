"""The latent's choices, S of K classes: comparing two of them, and drawing from one."""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


class OneHotKL(NamedTuple):
    """How far the prior is from the posterior, and how sure each of them is."""

    dyn: Float[Tensor, "*b"]
    """KL(post, prior), which moves the prior alone."""
    rep: Float[Tensor, "*b"]
    """The same number, but it moves the posterior alone."""
    post_entropy: Float[Tensor, "*b"]
    """Without a gradient."""
    prior_entropy: Float[Tensor, "*b"]
    """Without a gradient."""


def onehot_kl(
    post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"], unimix: float
) -> OneHotKL:
    """What `OneHot.kl` and `OneHot.entropy` say of two sets of logits, in one pass."""
    batch, groups, classes = post.shape[:-2], post.shape[-2], post.shape[-1]
    shape = (-1, groups, classes)
    results: Any = _Agree
    results = results.apply(post.reshape(shape), prior.reshape(shape), unimix)
    return OneHotKL(*(x.reshape(batch) for x in results))


def sample_onehot(
    logits: Float[Tensor, "*b S K"],
    clocks: Float[Tensor, "*b S K"],
    unimix: float,
    out: Float[Tensor, "*b S K"] | None = None,
) -> Float[Tensor, "*b S K"]:
    """One-hots in the dtype of the logits, without a gradient.

    The class whose exponential clock, sped up by its probability, rings first; given
    the same clocks, the one that `Rng.categorical` would draw. `out` may have its
    first axis apart.
    """
    groups, classes = logits.shape[-2:]
    logits, clocks = logits.detach().contiguous(), clocks.contiguous()
    onehot = torch.empty_like(logits) if out is None else out
    apart = groups * classes if out is None else out.stride(0)
    assert onehot.stride()[-2:] == (classes, 1)
    rows = logits.numel() // classes
    wide = max(16, triton.next_power_of_2(classes))
    tall = max(1, 1024 // wide)
    if rows:
        _sample[(triton.cdiv(rows, tall),)](
            *(logits, clocks, onehot, unimix, rows, groups, classes, apart, tall, wide)
        )
    return onehot


class _Agree(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, post: Tensor, prior: Tensor, unimix: float
    ) -> tuple[Tensor, ...]:
        post, prior = post.contiguous(), prior.contiguous()
        results = torch.empty(4, len(post), device=post.device)
        if len(post):
            sizes = _sizes(post)
            _agree[(len(post),)](post, prior, results, unimix, len(post), *sizes)
        ctx.save_for_backward(post, prior)
        ctx.unimix = unimix
        dyn, rep, first, second = results.unbind()
        ctx.mark_non_differentiable(first, second)
        return dyn, rep, first, second

    @staticmethod
    def backward(
        ctx: Any, dyn: Tensor, rep: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        post, prior = ctx.saved_tensors
        dpost, dprior = torch.empty_like(post), torch.empty_like(prior)
        if len(post):
            _agree_backward[(len(post),)](
                *(post, prior, dyn.contiguous(), rep.contiguous(), dpost, dprior),
                *(ctx.unimix, *_sizes(post)),
            )
        return dpost, dprior, None


def _sizes(logits: Tensor) -> tuple[int, ...]:
    _, groups, classes = logits.shape
    powers = [triton.next_power_of_2(size) for size in (groups, classes)]
    return groups, classes, *powers


@triton.jit
@no_type_check
def _softmax(logits, place, inside, unimix, classes):
    """Softmax, and what it is after mixing in the uniform choice."""
    v = tl.load(logits + place, inside, float("-inf")).to(tl.float32)
    # a row of padding has no largest entry
    top = tl.maximum(tl.max(v, 1)[:, None], -1e30)
    v = tl.exp(v - top)
    v /= tl.maximum(tl.sum(v, 1)[:, None], 1e-30)
    return v, (1 - unimix) * v + unimix / classes


@triton.jit
@no_type_check
def _agree(
    post,
    prior,
    results,
    unimix,
    rows,
    groups,
    classes,
    S: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0)
    group, kind = tl.arange(0, S)[:, None], tl.arange(0, K)[None, :]
    inside = (group < groups) & (kind < classes)
    place = (row.to(tl.int64) * groups + group) * classes + kind
    _, p = _softmax(post, place, inside, unimix, classes)
    _, q = _softmax(prior, place, inside, unimix, classes)
    logp = tl.log(tl.where(inside, p, 1.0))
    logq = tl.log(tl.where(inside, q, 1.0))
    apart = tl.sum(p * (logp - logq))
    tl.store(results + row, apart)
    tl.store(results + rows + row, apart)
    tl.store(results + 2 * rows + row, -tl.sum(p * logp))
    tl.store(results + 3 * rows + row, -tl.sum(q * logq))


@triton.jit
@no_type_check
def _agree_backward(
    post,
    prior,
    dyn,
    rep,
    dpost,
    dprior,
    unimix,
    groups,
    classes,
    S: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0)
    group, kind = tl.arange(0, S)[:, None], tl.arange(0, K)[None, :]
    inside = (group < groups) & (kind < classes)
    place = (row.to(tl.int64) * groups + group) * classes + kind
    first, p = _softmax(post, place, inside, unimix, classes)
    second, q = _softmax(prior, place, inside, unimix, classes)
    p, q = tl.where(inside, p, 1.0), tl.where(inside, q, 1.0)
    slope = tl.log(p) - tl.log(q)
    slope = first * (slope - tl.sum(first * slope, 1)[:, None])
    tl.store(dpost + place, tl.load(rep + row) * (1 - unimix) * slope, inside)
    slope = -p / q
    slope = second * (slope - tl.sum(second * slope, 1)[:, None])
    tl.store(dprior + place, tl.load(dyn + row) * (1 - unimix) * slope, inside)


@triton.jit
@no_type_check
def _sample(
    logits,
    clocks,
    onehot,
    unimix,
    rows,
    groups,
    classes,
    apart,
    R: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    kind = tl.arange(0, K)[None, :]
    inside = (row < rows) & (kind < classes)
    place = row * classes + kind
    _, p = _softmax(logits, place, inside, unimix, classes)
    pace = tl.where(inside, p / tl.load(clocks + place, inside, 1.0), -1.0)
    first = tl.argmax(pace, 1)[:, None]
    place = row // groups * apart + row % groups * classes + kind
    tl.store(onehot + place, (kind == first).to(tl.float32), inside)
