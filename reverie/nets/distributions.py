"""Distributions that networks predict, each with its loss. All compute in float32.

`dims` is the number of trailing event axes; losses, log-probabilities and entropies are
summed over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from reverie.nets.blocks import symexp, symlog
from reverie.nets.rng import Rng

TINY = 1e-38
"""Lower bound of probabilities before their logarithm."""


class Distribution(Protocol):
    """A prediction: its mean or mode (`pred`), and its loss for a target."""

    def pred(self) -> Tensor: ...

    def loss(self, target: Tensor) -> Tensor: ...


class ActionDistribution(Distribution, Protocol):
    """A distribution over actions."""

    maxent: float | None  # maximum entropy, to normalize metrics; None if not defined

    def sample(self, rng: Rng) -> Tensor: ...

    def logp(self, event: Tensor) -> Tensor: ...

    def entropy(self) -> Tensor: ...


def sum_events(x: Tensor, dims: int) -> Tensor:
    """Sum over the last `dims` axes."""
    return x.flatten(-dims).sum(-1) if dims else x


def softmax(logits: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Softmax over the last axis; faster than PyTorch's for few classes on a CPU."""
    if logits.requires_grad or logits.device.type != "cpu":
        return torch.softmax(logits, -1)
    exps = torch.exp(logits - logits.amax(-1, keepdim=True))
    return exps.div_(exps.sum(-1, keepdim=True))


class MSE:
    """A point prediction with squared error.

    `squash` (such as symlog) is applied to targets, its inverse `unsquash` to
    predictions.
    """

    def __init__(
        self,
        mean: Float[Tensor, "*any"],
        dims: int = 0,
        squash: Callable[[Tensor], Tensor] | None = None,
        unsquash: Callable[[Tensor], Tensor] | None = None,
    ):
        self.mean, self.dims = mean.float(), dims
        self.squash, self.unsquash = squash, unsquash

    def pred(self) -> Tensor:
        return self.unsquash(self.mean) if self.unsquash else self.mean

    def squared_error(self, target: Tensor) -> Tensor:
        target = target.float()
        target = self.squash(target) if self.squash else target
        return torch.square(self.mean - target.detach())

    def loss(self, target: Tensor) -> Tensor:
        return sum_events(self.squared_error(target), self.dims)


class Binary:
    """A Bernoulli distribution; targets may be soft, in [0, 1]."""

    def __init__(self, logit: Float[Tensor, "*b"]):
        self.logit = logit.float()

    def prob(self) -> Float[Tensor, "*b"]:
        return torch.sigmoid(self.logit)

    def pred(self) -> Tensor:
        return self.logit > 0

    def loss(self, target: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        yes, no = F.logsigmoid(self.logit), F.logsigmoid(-self.logit)
        return -(target * yes + (1 - target) * no)


class Categorical:
    """A categorical over K classes, mixed with a uniform one with weight `unimix`.

    `allowed` is False for classes that do not exist, if entries of a space have
    different numbers of classes.
    """

    def __init__(
        self,
        logits: Float[Tensor, "... K"],
        dims: int = 0,
        unimix: float = 0.0,
        allowed: Tensor | None = None,
    ):
        self.dims, logits = dims, logits.float()
        classes = logits.shape[-1]
        # as in DreamerV3, only defined for a single categorical variable
        self.maxent = None if dims else math.log(classes) if classes > 1 else None
        if allowed is not None:
            logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        if unimix:
            uniform = (
                1 / classes if allowed is None else allowed / allowed.sum(-1, True)
            )
            logits = torch.log((1 - unimix) * logits.softmax(-1) + unimix * uniform)
        self.logits = logits

    @cached_property
    def logprobs(self) -> Tensor:
        return torch.log_softmax(self.logits, -1)

    @cached_property
    def probs(self) -> Tensor:
        return self.logprobs.exp()

    def pred(self) -> Tensor:
        return self.logits.argmax(-1)

    def sample(self, rng: Rng) -> Tensor:
        return rng.categorical(self.probs.detach())

    def logp(self, event: Int[Tensor, "*any"]) -> Tensor:
        chosen = self.logprobs.gather(-1, event.long()[..., None])[..., 0]
        return sum_events(chosen, self.dims)

    def entropy(self) -> Tensor:
        # `where`, because a class of probability 0 contributes 0, not 0 * -inf
        terms = torch.where(self.probs > 0, self.probs * self.logprobs, 0)
        return sum_events(-terms.sum(-1), self.dims)

    def loss(self, target: Int[Tensor, "*any"]) -> Tensor:
        return -self.logp(target)


class OneHot:
    """S independent one-hot categoricals with K classes: `stoch` of the RSSM.

    Mixed with a uniform distribution (`unimix`); samples have straight-through
    gradients.
    """

    def __init__(self, logits: Float[Tensor, "*b S K"], unimix: float):
        logits = logits.float()
        self.probs = (1 - unimix) * softmax(logits) + unimix / logits.shape[-1]
        if not unimix:  # keep logarithms finite
            self.probs = self.probs.clamp(min=TINY)

    @cached_property
    def logprobs(self) -> Tensor:
        return torch.log(self.probs)

    def sample(self, rng: Rng) -> Float[Tensor, "*b S K"]:
        index = rng.categorical(self.probs.detach())
        onehot = torch.zeros_like(self.probs).scatter_(-1, index[..., None], 1.0)
        if not self.probs.requires_grad:
            return onehot
        return onehot + (self.probs - self.probs.detach())

    def mode(self) -> Float[Tensor, "*b S K"]:
        """The most likely classes, with straight-through gradients of `logprobs`.

        This is how dreamerv3-torch differentiates its learned initial state.
        """
        index = self.logprobs.argmax(-1, keepdim=True)
        onehot = torch.zeros_like(self.probs).scatter_(-1, index, 1.0)
        return onehot + (self.logprobs - self.logprobs.detach())

    def entropy(self) -> Float[Tensor, "*b"]:
        return -(self.probs * self.logprobs).sum((-2, -1))

    def kl(self, other: OneHot) -> Float[Tensor, "*b"]:
        return (self.probs * (self.logprobs - other.logprobs)).sum((-2, -1))

    def detach(self) -> OneHot:
        detached = object.__new__(OneHot)  # without `__init__`, which takes logits
        detached.probs = self.probs.detach()
        return detached


class Normal:
    """A diagonal normal distribution; its samples are neither squashed nor clipped."""

    maxent: float | None = None

    def __init__(
        self, mean: Float[Tensor, "*any"], std: Float[Tensor, "*any"], dims: int = 0
    ):
        self.mean, self.std, self.dims = mean.float(), std.float(), dims

    def pred(self) -> Tensor:
        return self.mean

    def sample(self, rng: Rng) -> Tensor:
        return rng.normal(self.mean.detach(), self.std.detach())

    def logp(self, event: Float[Tensor, "*any"]) -> Tensor:
        squared = torch.square((event - self.mean) / self.std)
        logp = -0.5 * squared - torch.log(self.std) - 0.5 * math.log(2 * math.pi)
        return sum_events(logp, self.dims)

    def entropy(self) -> Tensor:
        entropy = 0.5 * torch.log(2 * math.pi * torch.square(self.std)) + 0.5
        return sum_events(entropy, self.dims)

    def loss(self, target: Tensor) -> Tensor:
        return -self.logp(target)


def symexp_bins(count: int) -> Float[Tensor, " N"]:
    """Bins from -e^20 to e^20, densest near zero and exactly symmetric."""
    half = symexp(torch.linspace(-20, 0, (count + 1) // 2, dtype=torch.float32))
    mirrored = half[:-1] if count % 2 else half
    return torch.cat([half, -mirrored.flip(0)])


class BinnedScalar:
    """Predicts a scalar by a categorical distribution over bins."""

    def __init__(self, logits: Float[Tensor, "*b N"], bins: Float[Tensor, " N"]):
        self.logits, self.bins = logits.float(), bins

    @cached_property
    def logprobs(self) -> Tensor:
        return torch.log_softmax(self.logits, -1)


class TwoHot(BinnedScalar):
    """Predicts a scalar by a categorical over bins, trained with two-hot targets.

    The bins are spaced by symexp, so targets and predictions need no transformation.
    """

    def pred(self) -> Float[Tensor, "*b"]:
        # Add symmetric bins in pairs, so that uniform probabilities give exactly 0. A
        # rounding error of a probability times a bin of 5e8 can be larger than the
        # prediction, so compute `a - b` as (a + b) * tanh((log a - log b) / 2).
        probs, half = torch.softmax(self.logits, -1), len(self.bins) // 2
        log_ratio = self.logits[..., -half:] - self.logits[..., :half].flip(-1)
        pair = probs[..., -half:] + probs[..., :half].flip(-1)
        return (pair * torch.tanh(log_ratio / 2)) @ self.bins[-half:]

    def loss(self, target: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Cross-entropy with the two-hot encoding of the target."""
        target, last = target.detach().float().contiguous(), len(self.bins) - 1
        above = torch.searchsorted(self.bins, target, right=True)
        # a NaN target has no bin; its loss is NaN through the distances
        below = torch.where(torch.isnan(target), 0, above - 1).clamp(0, last)
        above = above.clamp(0, last)
        to_below = torch.abs(self.bins[below] - target)
        to_above = torch.abs(self.bins[above] - target)
        # a target outside the bins gets equal weights of the same bin, not 0 / 0
        same = below == above
        to_below = torch.where(same, 1.0, to_below)
        to_above = torch.where(same, 1.0, to_above)
        weight = to_above / (to_below + to_above)
        weights = torch.stack([weight, 1 - weight], -1)
        logprobs = self.logprobs.gather(-1, torch.stack([below, above], -1))
        return -(weights * logprobs).sum(-1)


def symlog_bins(count: int) -> Float[Tensor, " N"]:
    """Evenly spaced bins from -20 to 20, for values in symlog space."""
    limit = DeltaIrisTwoHot.LIMIT
    return torch.linspace(-limit, limit, count, dtype=torch.float32)


class DeltaIrisTwoHot(BinnedScalar):
    """Predicts a scalar by a categorical over bins in symlog space, as in Δ-IRIS.

    Targets are transformed by symlog; the prediction is symexp of the mean.
    """

    LIMIT = 20.0
    """Position of the last bin, in symlog space."""
    MARGIN = 1e-5
    """Targets are clipped to at least this distance below the last bin."""

    def pred(self) -> Float[Tensor, "*b"]:
        return symexp(torch.softmax(self.logits, -1) @ self.bins)

    def two_hot(
        self, target: Float[Tensor, "*b"]
    ) -> tuple[Int[Tensor, "*b"], Float[Tensor, "*b"]]:
        """Return the bin below each target, and the weight of the bin above it."""
        x = symlog(target.detach().float()).contiguous()
        x = x.clamp(-self.LIMIT, self.LIMIT - self.MARGIN)
        below = torch.searchsorted(self.bins, x) - 1
        # a NaN target has no bin; its weight is NaN
        below = torch.where(torch.isnan(x), 0, below).clamp(0, len(self.bins) - 2)
        start, end = self.bins[below], self.bins[below + 1]
        return below, (x - start) / (end - start)

    def loss(self, target: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Cross-entropy with the two-hot encoding of the target."""
        below, weight = self.two_hot(target)
        logprobs = self.logprobs.gather(-1, torch.stack([below, below + 1], -1))
        return -(torch.stack([1 - weight, weight], -1) * logprobs).sum(-1)


class SymlogTwoHot(TwoHot):
    """Predicts a scalar by a categorical over bins in symlog space (dreamerv3-torch).

    A target outside the range of the bins is clipped to the nearest bin.
    """

    def pred(self) -> Float[Tensor, "*b"]:
        return symexp(super().pred())

    def loss(self, target: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return super().loss(symlog(target.detach().float()))
