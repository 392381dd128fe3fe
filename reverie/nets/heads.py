"""Prediction heads: an MLP on the features of a state, then a distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError
from reverie.nets.blocks import MLP, Linear, MLPConfig, ModulesByKey, symexp, symlog
from reverie.nets.distributions import (
    MSE,
    ActionDistribution,
    Binary,
    Categorical,
    Distribution,
    Normal,
    SymlogTwoHot,
    TwoHot,
    symexp_bins,
    symlog_bins,
)
from reverie.nets.inputs import MAX_CLASSES
from reverie.spaces import Space, Spaces


@dataclass(frozen=True)
class HeadConfig(MLPConfig):
    """Head that predicts a scalar (reward, continue, value)."""

    output: str = "symexp_twohot"
    """Distribution: symexp_twohot, symlog_twohot, symlog_mse, mse or binary."""
    outscale: float = 0.0
    """Scale of the initial output weights."""
    bins: int = 255
    """Number of bins of symexp_twohot and symlog_twohot."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins < 2:
            raise ValueError("bins must be at least 2")


@dataclass(frozen=True)
class PolicyConfig(MLPConfig):
    """Policy head."""

    layers: int = 3
    minstd: float = 0.1
    """Minimum standard deviation of continuous actions."""
    maxstd: float = 1.0
    """Maximum standard deviation of continuous actions."""
    outscale: float = 0.01
    """Scale of the initial output weights."""
    unimix: float = 0.0
    """Weight of the uniform distribution mixed into discrete actions. DreamerV3 lists
    0.01 in its config but does not use it, so the default is 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.minstd <= self.maxstd:
            raise ValueError("minstd must be positive and at most maxstd")
        if not 0 <= self.unimix <= 1:
            raise ValueError("unimix must be from 0 to 1")


class Head(nn.Module):
    """Predicts a scalar from features."""

    fast_version = "reverie.kernels.heads.twohot:FastHead"

    # classes of layers, which subclasses replace
    HiddenLayers: ClassVar[Callable[..., Any]] = MLP
    OutputLayer: ClassVar[Callable[..., nn.Module]] = Linear

    def __init__(self, inputs: int, config: HeadConfig):
        super().__init__()
        self.output = config.output
        self.mlp = type(self).HiddenLayers(inputs, config)
        make_output, width = type(self).OutputLayer, self.mlp.width
        scale = config.outscale
        if config.output == "symexp_twohot":
            out = {"logits": make_output(width, config.bins, scale)}
            self.register_buffer("bins", symexp_bins(config.bins), persistent=False)
        elif config.output == "symlog_twohot":
            out = {"logits": make_output(width, config.bins, scale)}
            bins = symlog_bins(config.bins)
            self.register_buffer("even_bins", bins, persistent=False)
        elif config.output == "binary":
            out = {"logit": make_output(width, (), scale)}
        elif config.output in ("mse", "symlog_mse"):
            out = {"pred": make_output(width, (), scale)}
        else:
            raise UserError(
                f"Unknown head output {config.output!r}.\n  Fix: use symexp_twohot, "
                "symlog_twohot, symlog_mse, mse or binary."
            )
        self.head = nn.ModuleDict(out)

    def forward(self, feat: Float[Tensor, "*b F"]) -> Distribution:
        x = self.mlp(feat)
        if self.output == "symexp_twohot":
            return TwoHot(self.head["logits"](x), self.get_buffer("bins"))
        if self.output == "symlog_twohot":
            return SymlogTwoHot(self.head["logits"](x), self.get_buffer("even_bins"))
        if self.output == "binary":
            return Binary(self.head["logit"](x))
        if self.output == "symlog_mse":
            return MSE(self.head["pred"](x), 0, symlog, symexp)
        return MSE(self.head["pred"](x))


class PolicyHead(nn.Module):
    """A distribution for every key of the action space.

    Categorical for integers; normal, with bounded mean and standard deviation, for
    floats.
    """

    fast_version = "reverie.kernels.heads.categorical:FastPolicyHead"

    # classes of layers, which subclasses replace
    HiddenLayers: ClassVar[Callable[..., Any]] = MLP
    OutputLayer: ClassVar[Callable[..., nn.Module]] = Linear

    def __init__(self, inputs: int, spaces: Spaces, config: PolicyConfig):
        super().__init__()
        self.spaces, self.config = spaces, config
        self.mlp = type(self).HiddenLayers(inputs, config)
        self.head = ModulesByKey(
            {key: self._output_layers(space) for key, space in spaces.items()}
        )

    def _output_layers(self, space: Space) -> nn.Module:
        make_output, width = type(self).OutputLayer, self.mlp.width
        scale = self.config.outscale
        if space.is_discrete:
            units = (*space.shape, space.classes)
            out = nn.ModuleDict({"logits": make_output(width, units, scale)})
            allowed = None
            if (space.high - space.low != space.classes).any():
                sizes = torch.tensor(space.high - space.low)
                allowed = torch.arange(space.classes) < sizes[..., None]
            out.register_buffer("allowed", allowed, persistent=False)
            return out
        names = ("mean", "stddev")
        return nn.ModuleDict({k: make_output(width, space.shape, scale) for k in names})

    def forward(self, feat: Float[Tensor, "*b F"]) -> dict[str, ActionDistribution]:
        x = self.mlp(feat)
        return {
            key: self._distribution(key, space, x) for key, space in self.spaces.items()
        }

    def _distribution(self, key: str, space: Space, x: Tensor) -> ActionDistribution:
        out, dims = self.head[key], len(space.shape)
        if space.is_discrete:
            logits = out.get_submodule("logits")(x)
            allowed = dict(out.named_buffers(recurse=False)).get("allowed")
            return Categorical(logits, dims, self.config.unimix, allowed)
        low, high = self.config.minstd, self.config.maxstd
        mean = torch.tanh(out.get_submodule("mean")(x).float())
        # + 2, as in DreamerV3: the initial std is near its maximum
        std = torch.sigmoid(out.get_submodule("stddev")(x).float() + 2.0)
        return Normal(mean, (high - low) * std + low, dims)


def check_actions(spaces: Spaces) -> None:
    """Raise if a policy head does not support the action space."""
    if not spaces:
        raise UserError(
            "The action space is empty.\n"
            "  Fix: use an environment with at least one action."
        )
    for key, space in spaces.items():
        if space.is_image or space.dtype.kind not in "iubf":
            raise UserError(
                f"Action {key!r} is {space.dtype} of shape {space.shape}, which no "
                "policy supports.\n"
                "  Fix: use integers (or bools) for discrete and floats for continuous "
                "actions."
            )
        if space.is_discrete and not 0 < space.classes <= MAX_CLASSES:
            raise UserError(
                f"Action {key!r} has {space.classes} classes; the maximum is "
                f"{MAX_CLASSES}.\n  Fix: set `low` and `high` of its space."
            )
