"""Random numbers: one `Rng` per purpose, owned by the agent.

Networks have no generator; the caller passes an `Rng`. So a seed determines a run, a
report does not change the random numbers of training, a checkpoint contains the state
of all generators, and a test can replace them by recorded samples.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from reverie.api import StateDict


class Rng:
    """Samples from one generator, seeded by the run's seed and a purpose."""

    def __init__(self, seed: int, purpose: str, device: torch.device):
        entropy = np.random.SeedSequence([seed, *purpose.encode()])
        self.generator = torch.Generator(device)
        self.generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0]) >> 1)

    def reseed(self, seed: int) -> None:
        """Continue from this seed, with the same generator."""
        self.generator.manual_seed(seed)

    def categorical(self, probs: Float[Tensor, "*b K"]) -> Int[Tensor, "*b"]:
        """Sample class indices; probabilities need not be exactly normalized.

        On a GPU, the Gumbel-max trick with K exponential samples per class index; on a
        CPU, the inverse CDF of one uniform sample, which is faster there.
        """
        if probs.device.type == "cpu":
            cdf = probs.cumsum(-1)
            point = torch.empty_like(cdf[..., -1:]).uniform_(generator=self.generator)
            index = (cdf <= point * cdf[..., -1:]).sum(-1)
            return index.clamp_(max=probs.shape[-1] - 1)
        noise = torch.empty_like(probs).exponential_(generator=self.generator)
        return torch.argmax(probs / noise, -1)

    def exponential(self, like: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Standard exponential noise in float32, in the shape of `like`.

        `argmax(probs / noise)` is a sample of the categorical distribution.
        """
        noise = torch.empty(like.shape, device=like.device)
        return noise.exponential_(generator=self.generator)

    def normal(
        self, mean: Float[Tensor, "*b"], std: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        noise = torch.empty_like(mean).normal_(generator=self.generator)
        return mean + std * noise

    def uniform(self, like: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Uniform samples from [0, 1) in the shape of `like`."""
        return torch.empty_like(like).uniform_(generator=self.generator)

    def permutation(self, mask: Bool[Tensor, " K"]) -> Int[Tensor, " K"]:
        """All indices: those where `mask` is set in random order, then the others."""
        keys = torch.empty(mask.shape, device=mask.device)
        keys.uniform_(generator=self.generator)
        return torch.argsort(torch.where(mask, keys, 2.0))

    def state_dict(self) -> StateDict:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: StateDict) -> None:
        self.generator.set_state(state["state"].cpu())
