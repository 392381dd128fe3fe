"""Where randomness comes from: one `Rng` per purpose, owned by the agent.

Networks never draw by themselves; whoever calls them passes the rng down. So a seed
fixes a run, a report does not disturb training, a checkpoint holds the state of every
die, and a test can put recorded draws in place of fresh ones.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from reverie.api import StateDict


class Rng:
    """Draws from one generator, seeded by the run's seed and a purpose."""

    def __init__(self, seed: int, purpose: str, device: torch.device):
        entropy = np.random.SeedSequence([seed, *purpose.encode()])
        self.generator = torch.Generator(device)
        self.generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0]) >> 1)

    def categorical(self, probs: Float[Tensor, "*b K"]) -> Int[Tensor, "*b"]:
        """The index of one class; probabilities need not add up to one exactly.

        An accelerator lets K exponential clocks with these rates race. A CPU makes
        random numbers more slowly, so there it looks up a single one per choice.
        """
        if probs.device.type == "cpu":
            heaps = probs.cumsum(-1)
            point = torch.empty_like(heaps[..., -1:]).uniform_(generator=self.generator)
            index = (heaps <= point * heaps[..., -1:]).sum(-1)
            return index.clamp_(max=probs.shape[-1] - 1)
        clocks = torch.empty_like(probs).exponential_(generator=self.generator)
        return torch.argmax(probs / clocks, -1)

    def clocks(self, like: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Exponential clocks, one per class; the first to ring, at its rate, wins."""
        fresh = torch.empty(like.shape, device=like.device)
        return fresh.exponential_(generator=self.generator)

    def normal(
        self, mean: Float[Tensor, "*b"], std: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        noise = torch.empty_like(mean).normal_(generator=self.generator)
        return mean + std * noise

    def uniform(self, like: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Numbers in [0, 1), as many as `like` has."""
        return torch.empty_like(like).uniform_(generator=self.generator)

    def shuffle(self, marked: Bool[Tensor, " K"]) -> Int[Tensor, " K"]:
        """All indices: first those of the marked entries, in random order."""
        keys = torch.empty(marked.shape, device=marked.device)
        keys.uniform_(generator=self.generator)
        return torch.argsort(torch.where(marked, keys, 2.0))

    def state_dict(self) -> StateDict:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: StateDict) -> None:
        self.generator.set_state(state["state"].cpu())
