"""Boundary flags of VTA: sampling, density, segment limits and temperature.

The boundary flag of a step has two classes, in this order everywhere: BOUNDARY (a
segment begins with this step and the upper level is updated) and NO_BOUNDARY (the
segment continues and the upper level is copied). Flags are sampled with the
Gumbel-softmax trick and rounded to 0 or 1, with the gradient of the soft sample
(straight-through gradient).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BOUNDARY, NO_BOUNDARY = 0, 1
"""Indices of the two classes of a boundary flag."""

FORCED_LOGIT = math.log((1 - 1e-3) / 1e-3)
"""Logits of a flag that is forced by a segment limit: plus and minus this value."""


class BoundaryFlags(NamedTuple):
    """Sampled boundary flags; the last axis has the two classes."""

    mask: Float[Tensor, "*b 2"]  # exactly 0 or 1, with the gradient of the soft sample
    log_sample: Float[Tensor, "*b 2"]  # logarithm of the soft sample


def sample_flags(
    logits: Float[Tensor, "*b 2"],
    temperature: Float[Tensor, ""] | float,
    uniform: Float[Tensor, "*b 2"] | None,
) -> BoundaryFlags:
    """Sample flags with Gumbel noise that is computed from `uniform`, samples between
    0 and 1. If it is None, return the mode."""
    if uniform is not None:
        logits = logits - torch.log(-torch.log(uniform))
    log_sample = torch.log_softmax(logits / temperature, -1)
    soft = torch.exp(log_sample)
    is_boundary = (log_sample[..., :1] >= log_sample[..., 1:]).to(soft.dtype)
    hard = torch.cat([is_boundary, 1 - is_boundary], -1)
    # this order of operations has no rounding errors: the mask is exactly 0 or 1
    return BoundaryFlags(hard + (soft - soft.detach()), log_sample)


def log_density(
    logits: Float[Tensor, "*b 2"],
    log_sample: Float[Tensor, "*b 2"],
    temperature: Float[Tensor, ""] | float,
) -> Float[Tensor, "*b"]:
    """Return the log density of `log_sample` in the Gumbel-softmax distribution.

    A term that depends only on the temperature is left out; it cancels in the KL.
    """
    score = logits - temperature * log_sample
    return score.sum(-1) - 2 * torch.logsumexp(score, -1)


def signed_logits(like: Float[Tensor, "*b 2"], value: float) -> Float[Tensor, "*b 2"]:
    """Return logits that are `value` for BOUNDARY and `-value` for NO_BOUNDARY."""
    plus = torch.full_like(like[..., :1], value)
    return torch.cat([plus, -plus], -1)


def all_boundaries_mask(like: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 2"]:
    """Return a mask in which all flags are BOUNDARY."""
    ones = torch.ones_like(like[..., :1])
    return torch.cat([ones, torch.zeros_like(ones)], -1)


def limit_segments(
    logits: Float[Tensor, "B T 2"],
    mask: Float[Tensor, "B T 2"],
    max_length: int,
    max_count: int,
) -> Float[Tensor, "B T 2"]:
    """Force the prior's logits of each *next* flag where a segment limit is reached.

    After a segment of `max_length` steps, the next one must begin. Otherwise, after
    `max_count` segments, no further one may begin.
    """
    length, count = segment_counts(mask[..., BOUNDARY] > 0.5)
    forced = signed_logits(logits, FORCED_LOGIT)
    logits = torch.where((count >= max_count)[..., None], -forced, logits)
    return torch.where((length >= max_length)[..., None], forced, logits)


def segment_counts(
    boundary: Bool[Tensor, "B T"],
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return the length of the current segment and the number of segments so far.

    Both include the current step.
    """
    index = torch.arange(boundary.shape[1], device=boundary.device)
    start = torch.where(boundary, index, 0).cummax(1).values
    return index - start + 1, boundary.long().cumsum(1)


def annealed_temperature(
    update: Float[Tensor, ""], initial: float, final: float, anneal: float
) -> Float[Tensor, ""]:
    """Return the temperature of an update (counted from 1); see `VTAConfig.anneal`."""
    if not anneal:
        return torch.full_like(update, initial)
    # log(0.999) is about -1 / 1000, as `anneal` is in thousands of updates
    rate = math.log(0.999) / anneal
    return (initial - final) * torch.exp(update * rate) + final


def bernoulli_entropy(probability: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return the entropy of a binary variable, in nats."""
    other = 1 - probability
    return -torch.xlogy(probability, probability) - torch.xlogy(other, other)
