"""Where one segment ends and the next begins, as something gradients pass through.

A flag is a choice between two classes, in this order everywhere: READ (a segment begins
with this step, the upper level reads anew) and COPY (the segment goes on, the upper
level is copied). It is drawn with Gumbel noise at a temperature, used as exactly 0 or
1, and differentiated as if it were the soft sample (straight through).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

READ, COPY = 0, 1

CERTAIN = math.log((1 - 1e-3) / 1e-3)
"""The logit, plus for one class and minus for the other, of a flag the prior fixes."""


class Flags(NamedTuple):
    mask: Float[Tensor, "*b 2"]  # exactly 0 or 1, with the gradient of the soft sample
    log_sample: Float[Tensor, "*b 2"]


def draw_flags(
    logits: Float[Tensor, "*b 2"],
    temperature: Float[Tensor, ""] | float,
    uniform: Float[Tensor, "*b 2"] | None,
) -> Flags:
    """Sample flags with the given uniform noise; without it, take the likelier one."""
    if uniform is not None:
        logits = logits - torch.log(-torch.log(uniform))
    log_sample = torch.log_softmax(logits / temperature, -1)
    soft = torch.exp(log_sample)
    read = (log_sample[..., :1] >= log_sample[..., 1:]).to(soft.dtype)
    hard = torch.cat([read, 1 - read], -1)
    # in this order, or else a rounding error makes the mask not quite 0 or 1
    return Flags(hard + (soft - soft.detach()), log_sample)


def log_density(
    logits: Float[Tensor, "*b 2"],
    log_sample: Float[Tensor, "*b 2"],
    temperature: Float[Tensor, ""] | float,
) -> Float[Tensor, "*b"]:
    """Log density of a soft sample, up to a term of the temperature alone."""
    score = logits - temperature * log_sample
    return score.sum(-1) - 2 * torch.logsumexp(score, -1)


def force_flags(
    logits: Float[Tensor, "*b 2"], read: Bool[Tensor, "*b"], copy: Bool[Tensor, "*b"]
) -> Float[Tensor, "*b 2"]:
    """Logits that are certain where a flag is fixed; where both are, READ it is."""
    certain = both_ways(logits, CERTAIN)
    logits = torch.where(copy[..., None], -certain, logits)
    return torch.where(read[..., None], certain, logits)


def both_ways(like: Float[Tensor, "*b 2"], value: float) -> Float[Tensor, "*b 2"]:
    """Plus the value for READ and minus the value for COPY."""
    plus = torch.full_like(like[..., :1], value)
    return torch.cat([plus, -plus], -1)


def reading(like: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 2"]:
    """Masks that all say READ."""
    ones = torch.ones_like(like[..., :1])
    return torch.cat([ones, torch.zeros_like(ones)], -1)


def limit_segments(
    logits: Float[Tensor, "B T 2"],
    mask: Float[Tensor, "B T 2"],
    max_length: int,
    max_count: int,
) -> Float[Tensor, "B T 2"]:
    """The prior's logits for each *next* flag, fixed where a limit has been reached.

    A segment that is long enough must end, and that comes before the other limit: after
    enough segments no further one may begin.
    """
    length, count = segment_counts(mask[..., READ] > 0.5)
    return force_flags(logits, length >= max_length, count >= max_count)


def segment_counts(
    read: Bool[Tensor, "B T"],
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Steps in the current segment, this one included, and segments begun so far."""
    index = torch.arange(read.shape[1], device=read.device)
    start = torch.where(read, index, 0).cummax(1).values
    return index - start + 1, read.long().cumsum(1)


def annealed(
    update: Float[Tensor, ""], highest: float, lowest: float, anneal: float
) -> Float[Tensor, ""]:
    """The temperature of an update, counted from 1; constant where `anneal` is 0."""
    if not anneal:
        return torch.full_like(update, highest)
    rate = math.log(0.999) / anneal
    return (highest - lowest) * torch.exp(update * rate) + lowest


def entropy(probability: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Of a flag, in nats."""
    other = 1 - probability
    return -torch.xlogy(probability, probability) - torch.xlogy(other, other)
