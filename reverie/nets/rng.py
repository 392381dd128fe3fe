"""Random numbers: one `Rng` per purpose, owned by the agent.

Networks have no generator; the caller passes an `Rng`. So a seed determines a run,
reports do not change the random numbers of training, checkpoints contain the state of
all generators, and tests can replace the samples by recorded ones.

In a data-parallel update, every rank draws random numbers for the global batch and uses
those of its own rows. So the numbers do not depend on the number of ranks, and the
generators of all ranks stay in the same state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from reverie.api import StateDict
from reverie.distributed.collective import global_count, local_sequences


class Rng:
    """Samples from one generator, seeded by the run's seed and a purpose."""

    def __init__(self, seed: int, purpose: str, device: torch.device):
        entropy = np.random.SeedSequence([seed, *purpose.encode()])
        self.generator = torch.Generator(device)
        # 63 bits, because PyTorch stores seeds as signed integers
        self.generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0]) >> 1)

    def reseed(self, seed: int) -> None:
        """Seed the existing generator, which CUDA graphs may refer to."""
        self.generator.manual_seed(seed)

    def categorical(self, probs: Float[Tensor, "*b K"]) -> Int[Tensor, "*b"]:
        """Sample class indices; probabilities need not be exactly normalized.

        On a GPU, this is the Gumbel-max trick, with one exponential sample per class;
        on a CPU, the inverse CDF of one uniform sample, which is faster there.
        """
        if probs.device.type == "cpu":
            cdf = probs.cumsum(-1)
            point = self._draw(cdf[..., -1:], Tensor.uniform_)
            index = (cdf <= point * cdf[..., -1:]).sum(-1)
            return index.clamp_(max=probs.shape[-1] - 1)
        noise = self._draw(probs, Tensor.exponential_)
        return torch.argmax(probs / noise, -1)

    def exponential(self, like: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return standard exponential noise in float32, in the shape of `like`.

        `argmax(probs / noise)` is a sample of the categorical distribution.
        """
        noise = torch.empty(like.shape, device=like.device)
        return self._draw(noise, Tensor.exponential_)

    def normal(
        self, mean: Float[Tensor, "*b"], std: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return a reparameterized sample of a normal distribution."""
        return mean + std * self._draw(mean, Tensor.normal_)

    def uniform(self, like: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return uniform samples from [0, 1), in the shape of `like`."""
        return self._draw(like, Tensor.uniform_)

    def permutation(self, mask: Bool[Tensor, " K"]) -> Int[Tensor, " K"]:
        """Return all indices, starting with those where `mask` is True, shuffled."""
        keys = torch.empty(mask.shape, device=mask.device)
        keys.uniform_(generator=self.generator)
        return torch.argsort(torch.where(mask, keys, 2.0))  # all keys are below 2

    def _draw(self, like: Tensor, fill: Callable[..., Tensor]) -> Tensor:
        """Return random numbers in the shape of `like`; the first axis is the batch."""
        local = local_sequences()
        if local is None or not like.ndim:
            return fill(torch.empty_like(like), generator=self.generator)
        # A generator fills memory in order, so the noise of the global batch needs the
        # memory format (order of axes) that it has in a single process.
        strides = torch.empty_like(like, device="meta").stride()
        order = sorted(range(like.ndim), key=lambda axis: -strides[axis])
        count = len(like)
        shape = (global_count(count), *like.shape[1:])
        noise = torch.empty_permuted(shape, order, dtype=like.dtype, device=like.device)
        rows_per_sequence = count // local.size  # if batch and time are flattened
        start = rows_per_sequence * local.start
        return fill(noise, generator=self.generator)[start : start + count]

    def state_dict(self) -> StateDict:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: StateDict) -> None:
        self.generator.set_state(state["state"].cpu())
