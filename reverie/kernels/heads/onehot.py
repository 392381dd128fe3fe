"""One-hot categoricals of the RSSM: KL divergence and sampling.

A latent state has S categorical variables (groups) with K classes each. In the kernels,
S and K are padded to powers of two, and `groups` and `classes` are the actual numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import jit, tile_shape


class OneHotKL(NamedTuple):
    """KL terms between posterior and prior, and entropies."""

    dyn: Float[Tensor, "*b"]
    """KL(post || prior) with a gradient for the prior only."""
    rep: Float[Tensor, "*b"]
    """The same value with a gradient for the posterior only."""
    post_entropy: Float[Tensor, "*b"]
    """Entropy of the posterior, without a gradient."""
    prior_entropy: Float[Tensor, "*b"]
    """Entropy of the prior, without a gradient."""


def onehot_kl(
    post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"], unimix: float
) -> OneHotKL:
    """Compute `OneHot.kl` and `OneHot.entropy` of two sets of logits in one kernel."""
    batch, groups, classes = post.shape[:-2], post.shape[-2], post.shape[-1]
    shape = (-1, groups, classes)
    function: Any = _KL
    results = function.apply(post.reshape(shape), prior.reshape(shape), unimix)
    return OneHotKL(*(x.reshape(batch) for x in results))


def sample_onehot(
    logits: Float[Tensor, "*b S K"],
    noise: Float[Tensor, "*b S K"],
    unimix: float,
    out: Float[Tensor, "*b S K"] | None = None,
) -> Float[Tensor, "*b S K"]:
    """Return one-hot samples in the dtype of the logits, without a gradient.

    `noise` is exponential (`Rng.exponential`); the sample is `argmax(probs / noise)`,
    as in `Rng.categorical`. The first axis of `out` may have any stride.
    """
    groups, classes = logits.shape[-2:]
    logits, noise = logits.detach().contiguous(), noise.contiguous()
    onehot = torch.empty_like(logits) if out is None else out
    stride = groups * classes if out is None else out.stride(0)
    assert onehot.stride()[-2:] == (classes, 1)
    rows, tile = logits.numel() // classes, tile_shape(classes)
    if rows:
        _sample[(triton.cdiv(rows, tile[0]),)](
            *(logits, noise, onehot, unimix, rows, groups, classes, stride, *tile)
        )
    return onehot


class _KL(torch.autograd.Function):
    """Return the four fields of `OneHotKL`."""

    @staticmethod
    def forward(
        ctx: Any, post: Tensor, prior: Tensor, unimix: float
    ) -> tuple[Tensor, ...]:
        post, prior = post.contiguous(), prior.contiguous()
        results = torch.empty(4, len(post), device=post.device)
        if len(post):
            _kl[(len(post),)](
                *(post, prior, results, None, None, None, None),
                *(unimix, len(post), *_sizes(post)),
            )
        ctx.save_for_backward(post, prior)
        ctx.unimix = unimix
        dyn, rep, post_entropy, prior_entropy = results.unbind()
        ctx.mark_non_differentiable(post_entropy, prior_entropy)
        return dyn, rep, post_entropy, prior_entropy

    @staticmethod
    def backward(
        ctx: Any, ddyn: Tensor, drep: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        post, prior = ctx.saved_tensors
        dpost, dprior = torch.empty_like(post), torch.empty_like(prior)
        if len(post):
            grads = (ddyn.contiguous(), drep.contiguous(), dpost, dprior)
            _kl[(len(post),)](
                post, prior, None, *grads, ctx.unimix, len(post), *_sizes(post)
            )
        return dpost, dprior, None


def _sizes(logits: Tensor) -> tuple[int, ...]:
    """Return the size arguments of `_kl`: groups, classes, and both padded."""
    _, groups, classes = logits.shape
    powers = [triton.next_power_of_2(size) for size in (groups, classes)]
    return groups, classes, *powers


@jit
def _tile(row, groups, classes, S: tl.constexpr, K: tl.constexpr):
    """Return offsets of all groups and classes of a row, and a mask of valid ones."""
    group, col = tl.arange(0, S)[:, None], tl.arange(0, K)[None, :]
    mask = (group < groups) & (col < classes)
    return (row.to(tl.int64) * groups + group) * classes + col, mask


@jit
def _softmax(logits, offsets, mask, unimix, classes):
    """Return the softmax, and its mixture with a uniform distribution."""
    v = tl.load(logits + offsets, mask, float("-inf")).to(tl.float32)
    # at least -1e30, because all values of a row of padding are -inf
    max_logit = tl.maximum(tl.max(v, 1)[:, None], -1e30)
    v = tl.exp(v - max_logit)
    v /= tl.maximum(tl.sum(v, 1)[:, None], 1e-30)
    return v, (1 - unimix) * v + unimix / classes


@jit
def _kl(
    post, prior, results, ddyn, drep, dpost, dprior, unimix, rows, groups, classes,
    S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute KL and entropies of one row, summed over its categoricals.

    If `results` is None, compute the gradients of the logits instead, from those of
    the two KL terms.
    """
    row = tl.program_id(0)
    offsets, mask = _tile(row, groups, classes, S, K)
    post_softmax, p = _softmax(post, offsets, mask, unimix, classes)
    prior_softmax, q = _softmax(prior, offsets, mask, unimix, classes)
    logp = tl.log(tl.where(mask, p, 1.0))
    logq = tl.log(tl.where(mask, q, 1.0))
    if results is not None:
        kl = tl.sum(p * (logp - logq))
        tl.store(results + row, kl)
        tl.store(results + rows + row, kl)
        tl.store(results + 2 * rows + row, -tl.sum(p * logp))
        tl.store(results + 3 * rows + row, -tl.sum(q * logq))
    else:
        grad = logp - logq
        grad = post_softmax * (grad - tl.sum(post_softmax * grad, 1)[:, None])
        tl.store(dpost + offsets, tl.load(drep + row) * (1 - unimix) * grad, mask)
        grad = -tl.where(mask, p, 1.0) / tl.where(mask, q, 1.0)
        grad = prior_softmax * (grad - tl.sum(prior_softmax * grad, 1)[:, None])
        tl.store(dprior + offsets, tl.load(ddyn + row) * (1 - unimix) * grad, mask)


@jit
def _sample(
    logits, noise, onehot, unimix, rows, groups, classes, stride,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Store one-hot samples; a row is one categorical variable."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, K)[None, :]
    mask = (row < rows) & (col < classes)
    offsets = row * classes + col
    _, p = _softmax(logits, offsets, mask, unimix, classes)
    score = tl.where(mask, p / tl.load(noise + offsets, mask, 1.0), -1.0)
    index = tl.argmax(score, 1)[:, None]
    offsets = row // groups * stride + row % groups * classes + col
    tl.store(onehot + offsets, (col == index).to(tl.float32), mask)
