"""Heads of dreamerv3-torch, and the distributions of its actor.

Samples of actions have gradients: one-hot actions by straight-through estimation,
continuous actions, which are limited to [-1, 1], by reparameterization.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.nets.distributions import ActionDistribution, Categorical, Normal
from reverie.nets.dreamerv3_torch.layers import HiddenMLP, OutputLinear
from reverie.nets.heads import Head, PolicyConfig, PolicyHead
from reverie.nets.rng import Rng
from reverie.spaces import Space, Spaces


@dataclass(frozen=True)
class NormalActionConfig:
    """Distribution of continuous actions."""

    dist: Literal["normal", "normal_std_fixed", "trunc_normal"] = "normal"
    """`normal`: tanh mean and bounded standard deviation; `normal_std_fixed`: unbounded
    mean and the standard deviation `std`; `trunc_normal`: tanh mean and a standard
    deviation of at most 2 + minstd."""
    std: float | None = None
    """Constant that replaces the network's output for the standard deviation, before
    the bounds are applied; for `normal_std_fixed`, the standard deviation."""

    def __post_init__(self) -> None:
        if self.dist == "normal_std_fixed" and not (self.std and self.std > 0):
            raise ValueError("normal_std_fixed needs a positive std")


class DreamerV3TorchHead(Head):
    """Predicts a scalar from features."""

    HiddenLayers = HiddenMLP
    OutputLayer = OutputLinear


class DreamerV3TorchPolicyHead(PolicyHead):
    """A distribution for every action key; its samples have gradients."""

    HiddenLayers = HiddenMLP
    OutputLayer = OutputLinear

    def __init__(
        self,
        inputs: int,
        spaces: Spaces,
        config: PolicyConfig,
        normal: NormalActionConfig = NormalActionConfig(),
    ):
        self.normal = normal
        super().__init__(inputs, spaces, config)

    def _output_layers(self, space: Space) -> nn.Module:
        out = super()._output_layers(space)
        if self.normal.std is not None and not space.is_discrete:
            assert isinstance(out, nn.ModuleDict)
            del out["stddev"]
        return out

    def _distribution(self, key: str, space: Space, x: Tensor) -> ActionDistribution:
        out = self.head[key]
        if space.is_discrete:
            logits = out.get_submodule("logits")(x)
            allowed = dict(out.named_buffers(recurse=False)).get("allowed")
            dims, unimix = len(space.shape), self.config.unimix
            return DifferentiableCategorical(logits, dims, unimix, allowed)
        mean = out.get_submodule("mean")(x).float()
        if self.normal.std is None:
            std = out.get_submodule("stddev")(x).float()
        else:
            std = torch.full_like(mean, self.normal.std)
        low, high = self.config.minstd, self.config.maxstd
        if self.normal.dist == "trunc_normal":
            mean, std = torch.tanh(mean), 2 * torch.sigmoid(std / 2) + low
        elif self.normal.dist == "normal":
            mean = torch.tanh(mean)
            std = (high - low) * torch.sigmoid(std + 2.0) + low
        return LimitedNormal(mean, std, len(space.shape))


class DifferentiableCategorical(Categorical):
    """A categorical whose samples can be one-hot vectors with gradients."""

    def sample_onehot(self, rng: Rng) -> Float[Tensor, "... K"]:
        """Sample one-hot vectors with straight-through gradients."""
        onehot = F.one_hot(self.sample(rng), self.probs.shape[-1]).to(self.probs.dtype)
        return onehot + (self.probs - self.probs.detach())


class LimitedNormal(Normal):
    """A normal distribution whose samples are reparameterized and limited to [-1, 1].

    Log-probabilities and entropy are those of the unlimited distribution.
    """

    def pred(self) -> Tensor:
        return _limit(self.mean)

    def sample(self, rng: Rng) -> Tensor:
        return _limit(rng.normal(self.mean, self.std))


def _limit(x: Tensor) -> Tensor:
    """Divide entries outside [-1, 1] by their magnitude, which gets no gradient."""
    return x * (1 / x.abs().clamp(min=1)).detach()
