"""Heads: a small network on the features of a state, then one output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError
from reverie.nets.blocks import MLP, ByKey, Linear, symexp, symlog
from reverie.nets.distributions import (
    MSE,
    Action,
    Binary,
    Categorical,
    Normal,
    Output,
    TwoHot,
    symexp_bins,
)
from reverie.spaces import Space, Spaces


@dataclass(frozen=True)
class HeadConfig:
    """A head that predicts one number."""

    layers: int = 1
    """Hidden layers before the output."""
    units: int = 1024
    """Width of the hidden layers."""
    act: str = "silu"
    """Activation."""
    norm: str = "rms"
    """Norm: rms, layer or none."""
    output: str = "symexp_twohot"
    """symexp_twohot, symlog_mse, mse or binary."""
    outscale: float = 0.0
    """Scale of the initial output weights."""
    bins: int = 255
    """Bins of symexp_twohot."""

    def __post_init__(self) -> None:
        if self.layers < 0 or self.units < 1 or self.bins < 2:
            raise ValueError("layers must be at least 0, units 1 and bins 2")


@dataclass(frozen=True)
class PolicyConfig:
    """The head that chooses actions."""

    layers: int = 3
    """Hidden layers before the output."""
    units: int = 1024
    """Width of the hidden layers."""
    act: str = "silu"
    """Activation."""
    norm: str = "rms"
    """Norm: rms, layer or none."""
    minstd: float = 0.1
    """Least deviation of a continuous action."""
    maxstd: float = 1.0
    """Largest deviation of a continuous action."""
    outscale: float = 0.01
    """Scale of the initial output weights."""
    unimix: float = 0.0
    """Uniform part of a discrete choice. The original names 0.01 but never applies it,
    so the policy that earned its scores has none."""

    def __post_init__(self) -> None:
        if self.layers < 0 or self.units < 1 or not 0 < self.minstd <= self.maxstd:
            raise ValueError(
                "layers must be at least 0, units 1, and minstd between 0 and maxstd"
            )
        if not 0 <= self.unimix <= 1:
            raise ValueError("unimix must be from 0 to 1")


class Head(nn.Module):
    """Predicts one number from features."""

    def __init__(self, inputs: int, config: HeadConfig):
        super().__init__()
        self.output = config.output
        self.mlp = MLP(inputs, config.layers, config.units, config.act, config.norm)
        width, scale = self.mlp.width, config.outscale
        if config.output == "symexp_twohot":
            out = {"logits": Linear(width, config.bins, scale)}
            self.register_buffer("bins", symexp_bins(config.bins), persistent=False)
        elif config.output == "binary":
            out = {"logit": Linear(width, (), scale)}
        elif config.output in ("mse", "symlog_mse"):
            out = {"pred": Linear(width, (), scale)}
        else:
            raise UserError(
                f"There is no head output {config.output!r}.\n"
                "  Fix: use symexp_twohot, symlog_mse, mse or binary."
            )
        self.head = nn.ModuleDict(out)

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.heads.twohot import FastHead

        return FastHead

    def forward(self, feat: Float[Tensor, "*b F"]) -> Output:
        x = self.mlp(feat)
        if self.output == "symexp_twohot":
            return TwoHot(self.head["logits"](x), self.get_buffer("bins"))
        if self.output == "binary":
            return Binary(self.head["logit"](x))
        if self.output == "symlog_mse":
            return MSE(self.head["pred"](x), 0, symlog, symexp)
        return MSE(self.head["pred"](x))


class PolicyHead(nn.Module):
    """A distribution over every key of the action space.

    Integers get a categorical, floats a normal with bounded mean and deviation.
    """

    def __init__(self, inputs: int, spaces: Spaces, config: PolicyConfig):
        super().__init__()
        self.spaces, self.config = spaces, config
        self.mlp = MLP(inputs, config.layers, config.units, config.act, config.norm)
        self.head = ByKey(
            {key: self._make(key, space) for key, space in spaces.items()}
        )

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.heads.categorical import FastPolicyHead

        return FastPolicyHead

    def _make(self, key: str, space: Space) -> nn.Module:
        width, scale = self.mlp.width, self.config.outscale
        if space.is_discrete:
            units = (*space.shape, space.classes)
            out = nn.ModuleDict({"logits": Linear(width, units, scale)})
            uneven = None
            if (space.high - space.low != space.classes).any():
                sizes = torch.tensor(space.high - space.low)
                uneven = torch.arange(space.classes) < sizes[..., None]
            out.register_buffer("allowed", uneven, persistent=False)
            return out
        return nn.ModuleDict(
            {
                "mean": Linear(width, space.shape, scale),
                "stddev": Linear(width, space.shape, scale),
            }
        )

    def forward(self, feat: Float[Tensor, "*b F"]) -> dict[str, Action]:
        x = self.mlp(feat)
        return {key: self._out(key, space, x) for key, space in self.spaces.items()}

    def _out(self, key: str, space: Space, x: Tensor) -> Action:
        out, dims = self.head[key], len(space.shape)
        if space.is_discrete:
            logits = out.get_submodule("logits")(x)
            allowed = dict(out.named_buffers(recurse=False)).get("allowed")
            return Categorical(logits, dims, self.config.unimix, allowed)
        low, high = self.config.minstd, self.config.maxstd
        mean = torch.tanh(out.get_submodule("mean")(x).float())
        std = torch.sigmoid(out.get_submodule("stddev")(x).float() + 2.0)
        return Normal(mean, (high - low) * std + low, dims)


def check_actions(spaces: Spaces) -> None:
    """Refuse action spaces that no policy head fits."""
    if not spaces:
        raise UserError(
            "The action space is empty.\n"
            "  Fix: give the environment at least one action."
        )
    for key, space in spaces.items():
        if space.is_image or space.dtype.kind not in "iubf":
            raise UserError(
                f"Action {key!r} is {space.dtype} of shape {space.shape}, a kind no "
                "policy knows.\n"
                "  Fix: use integers (or bools) for choices and floats for continuous "
                "actions."
            )
        if space.is_discrete and not 0 < space.classes <= 2**16:
            raise UserError(
                f"Action {key!r} has {space.classes} choices.\n"
                "  Fix: give its space the real low and high."
            )
