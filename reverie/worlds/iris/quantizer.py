"""Continuous features to one of N codes each, and a codebook that follows them.

Codes are points on a sphere. No gradient moves them: with every batch, each code takes
a small step towards the mean of the vectors that chose it. Codes that nobody chooses
any more can be revived at the place of a current vector. All of it stays on the device
and has fixed shapes, whether or not anything is revived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from reverie.api import Metrics
from reverie.nets.rng import Rng
from reverie.nets.transformer import Dense

CODE_RATE = 0.01
"""How far a code moves towards its vectors."""
USE_RATE = 0.02
"""How fast the record of a code's use follows."""
COLLAPSE = 1.0
"""Bits of codebook entropy below which revival is always allowed."""
HEALTHY = 2.0
"""Bits below the most possible at which nothing needs revival."""
EXPIRED = 0.1
"""Use, as a part of an equal share, below which a code may be revived."""


@dataclass(frozen=True)
class QuantizerConfig:
    """The codebook; the defaults are those of Δ-IRIS for Crafter."""

    codes: int = 1024
    """Codes to choose from; a power of two."""
    width: int = 64
    """Size of a code."""
    revive_until: int | None = 0
    """Updates during which unused codes may be revived; none for ever. Near collapse
    they always may."""

    def __post_init__(self) -> None:
        if self.codes < 2 or self.codes & (self.codes - 1):
            raise ValueError("codes must be a power of two")
        if self.width < 1:
            raise ValueError("width must be at least 1")


class Quantized(NamedTuple):
    """What became of features."""

    tokens: Int[Tensor, "*b"]
    vectors: Float[Tensor, "*b W"]  # on the sphere, before a code was chosen
    codes: Float[Tensor, "*b W"]  # the chosen ones, without gradient
    features: Float[Tensor, "*b F"]  # of the codes; gradients pass straight through


class Quantizer(nn.Module):
    """See the top of this file."""

    codebook: Tensor
    usage: Tensor
    updates: Tensor

    def __init__(self, features: int, config: QuantizerConfig):
        super().__init__()
        self.config = config
        self.down, self.up = (
            Dense(features, config.width),
            Dense(config.width, features),
        )
        self.register_buffer("codebook", torch.zeros(config.codes, config.width))
        self.register_buffer("usage", torch.full((config.codes,), 1 / config.codes))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        bound = 1 / self.config.codes
        self.codebook.uniform_(-bound, bound, generator=generator)
        self.usage.fill_(bound)
        self.updates.zero_()

    def forward(self, features: Float[Tensor, "*b F"]) -> Quantized:
        vectors = F.normalize(self.down(features).float(), dim=-1)
        tokens = (vectors.detach() @ self.codebook.T).argmax(-1)
        codes = F.embedding(tokens, self.codebook)
        passed = vectors + (codes - vectors).detach()
        return Quantized(tokens, vectors, codes, self.up(passed.to(features.dtype)))

    def embed(
        self, tokens: Int[Tensor, "*b"], dtype: torch.dtype
    ) -> Float[Tensor, "*b F"]:
        """The features that tokens stand for."""
        codes = F.embedding(tokens.long(), self.codebook)
        features: Tensor = self.up(codes.to(dtype))
        return features

    @torch.no_grad()
    def follow(
        self, vectors: Float[Tensor, "R W"], tokens: Int[Tensor, " R"], rng: Rng
    ) -> Metrics:
        """Move the codebook after one batch; changes nothing if a vector is broken."""
        config, rows = self.config, len(vectors)
        ok = torch.isfinite(vectors).all()
        vectors = torch.where(ok, vectors, 0.0)
        codes = torch.arange(config.codes, device=tokens.device)
        chosen = (tokens[:, None] == codes).float()  # (R, N)
        counts = chosen.sum(0)
        means = chosen.T @ vectors / counts.clamp(min=1)[:, None]
        codebook = self.codebook.lerp(F.normalize(means, dim=-1), CODE_RATE)
        usage = self.usage.lerp(counts / rows, USE_RATE)

        bits = entropy(usage)
        allowed = bits < COLLAPSE
        if config.revive_until is None:
            allowed = torch.ones_like(allowed)
        else:
            allowed = allowed | (self.updates < config.revive_until)
        revive = allowed & (bits < math.log2(config.codes) - HEALTHY)
        expired = usage < EXPIRED / config.codes
        revived = torch.where(revive, expired.sum(), 0)
        # The first of the shuffled vectors replace the first of the shuffled codes;
        # behind the last expired code, codes are written back as they are.
        places = min(config.codes, rows)
        old = rng.shuffle(expired)[:places]
        new = rng.shuffle(torch.ones_like(tokens, dtype=torch.bool))[:places]
        does = torch.arange(places, device=tokens.device) < revived
        codebook[old] = torch.where(does[:, None], vectors[new], codebook[old])
        usage[old] = torch.where(does, 1 / config.codes, usage[old])

        self.codebook.copy_(
            torch.where(ok, F.normalize(codebook, dim=-1), self.codebook)
        )
        self.usage.copy_(torch.where(ok, usage, self.usage))
        self.updates.add_(ok)
        return {
            "codebook_entropy": entropy(usage),
            "codebook_perplexity": torch.exp2(entropy(usage)),
            "codes_revived": revived,
        }


def entropy(usage: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """In bits; the shares need not add up to one."""
    terms = torch.where(usage > 0, usage * torch.log2(usage), 0)
    return -terms.sum()
