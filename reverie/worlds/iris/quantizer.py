"""Vector quantization with a codebook that is updated by moving averages.

Codes are unit vectors and receive no gradient. In every update, each code is moved a
small step towards the mean of the vectors assigned to it. Unused codes can be
re-initialized ("revived") with vectors of the batch. All tensors have fixed shapes and
stay on the device, so that the update can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from reverie.api import Metrics
from reverie.distributed.collective import all_gather
from reverie.nets.rng import Rng
from reverie.nets.transformer import Dense
from reverie.worlds.iris.config import QuantizerConfig

CODE_RATE = 0.01
"""Step size of a code towards the mean of its vectors."""
USAGE_RATE = 0.02
"""Step size of the moving average of code usage."""
COLLAPSE_BITS = 1.0
"""Entropy of code usage in bits below which codes may be revived at any time."""
MAX_ENTROPY_GAP = 2.0
"""Codes are revived only if the entropy is at least this many bits below its
maximum."""
UNUSED_SHARE = 0.1
"""A code is unused if its usage is below this fraction of the mean usage."""


class Quantized(NamedTuple):
    """Result of quantizing features."""

    tokens: Int[Tensor, "*b"]
    vectors: Float[Tensor, "*b W"]  # unit vectors, before quantization
    codes: Float[Tensor, "*b W"]  # nearest codes, without gradient
    features: Float[Tensor, "*b F"]  # of the codes; straight-through gradient


class Quantizer(nn.Module):
    """Projects features to unit vectors, and replaces these by their nearest codes."""

    codebook: Tensor
    usage: Tensor
    updates: Tensor

    def __init__(self, features: int, config: QuantizerConfig):
        super().__init__()
        self.config = config
        self.down = Dense(features, config.width)
        self.up = Dense(config.width, features)
        self.register_buffer("codebook", torch.zeros(config.codes, config.width))
        self.register_buffer("usage", torch.full((config.codes,), 1 / config.codes))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw small random codes, which the first update scales to unit length."""
        bound = 1 / self.config.codes
        self.codebook.uniform_(-bound, bound, generator=generator)
        self.usage.fill_(bound)
        self.updates.zero_()

    def forward(self, features: Float[Tensor, "*b F"]) -> Quantized:
        vectors = F.normalize(self.down(features).float(), dim=-1)
        tokens = (vectors.detach() @ self.codebook.T).argmax(-1)
        codes = F.embedding(tokens, self.codebook)
        straight_through = vectors + (codes - vectors).detach()
        features = self.up(straight_through.to(features.dtype))
        return Quantized(tokens, vectors, codes, features)

    def embed(
        self, tokens: Int[Tensor, "*b"], dtype: torch.dtype
    ) -> Float[Tensor, "*b F"]:
        """Return the features of tokens."""
        codes = F.embedding(tokens.long(), self.codebook)
        features: Tensor = self.up(codes.to(dtype))
        return features

    @torch.no_grad()
    def update_codebook(
        self, vectors: Float[Tensor, "R W"], tokens: Int[Tensor, " R"], rng: Rng
    ) -> Metrics:
        """Update the codebook with `R` vectors, unless one of them is not finite."""
        vectors, tokens = all_gather(vectors), all_gather(tokens)  # of all ranks
        config, rows = self.config, len(vectors)
        is_finite = torch.isfinite(vectors).all()
        vectors = torch.where(is_finite, vectors, 0.0)
        codes = torch.arange(config.codes, device=tokens.device)
        assigned = (tokens[:, None] == codes).float()  # (R, codes)
        counts = assigned.sum(0)
        means = assigned.T @ vectors / counts.clamp(min=1)[:, None]
        codebook = self.codebook.lerp(F.normalize(means, dim=-1), CODE_RATE)
        usage = self.usage.lerp(counts / rows, USAGE_RATE)

        bits = entropy_bits(usage)
        # re-initialize unused codes, if allowed
        limit = math.inf if config.revive_until is None else config.revive_until
        allowed = (bits < COLLAPSE_BITS) | (self.updates < limit)
        revive = allowed & (bits < math.log2(config.codes) - MAX_ENTROPY_GAP)
        unused = usage < UNUSED_SHARE / config.codes
        revived = torch.where(revive, unused.sum(), 0)
        # `rng.permutation` returns the unused codes first, in random order. The first
        # `revived` of them are replaced by random vectors; the others do not change.
        count = min(config.codes, rows)
        old = rng.permutation(unused)[:count]
        new = rng.permutation(torch.ones_like(tokens, dtype=torch.bool))[:count]
        replaced = torch.arange(count, device=tokens.device) < revived
        codebook[old] = torch.where(replaced[:, None], vectors[new], codebook[old])
        usage[old] = torch.where(replaced, 1 / config.codes, usage[old])

        self.codebook.copy_(
            torch.where(is_finite, F.normalize(codebook, dim=-1), self.codebook)
        )
        self.usage.copy_(torch.where(is_finite, usage, self.usage))
        self.updates.add_(is_finite)
        return {
            "codebook_entropy": entropy_bits(usage),
            "codebook_perplexity": torch.exp2(entropy_bits(usage)),
            "codes_revived": revived,
        }


def entropy_bits(usage: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """Return the entropy of code usage in bits; `usage` need not sum to one."""
    terms = torch.where(usage > 0, usage * torch.log2(usage), 0)
    return -terms.sum()
