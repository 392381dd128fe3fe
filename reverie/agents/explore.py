"""Settings of exploration policies, and intrinsic rewards.

Plan2Explore (Sekar et al., 2020) trains an ensemble to predict the next state, and uses
the disagreement of its members as reward: it is high in states unlike those in the
replay. A separate actor-critic is trained on this reward in imagination and collects
the data; the task policy is trained with the same world model.

The disagreement of continuous predictions is their standard deviation, and that of
predicted tokens is the Jensen-Shannon divergence of their distributions.
"""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from reverie.api import Mode, UserError
from reverie.config import check_minimum
from reverie.nets.ensemble import EnsembleConfig, TokenHeadsConfig
from reverie.nets.normalize import NormalizeConfig

ENSEMBLE, EXPLORE_PREFIX = "ensemble", "explore_"
"""Component name of the ensemble, and prefix of the component names of the exploration
actor-critic."""
MIN_DISAGREEMENT = 1e-8
"""Lower bound of the disagreement before its logarithm."""


@dataclass(frozen=True)
class ExploreConfig:
    """Exploration policy, which collects data instead of the task policy."""

    policy: Literal["none", "random", "plan2explore"] = "none"
    """Exploration policy: none (the task policy acts), random (uniformly random
    actions) or plan2explore."""
    until: int = 0
    """Agent steps from the start of the run, including `run.prefill`, in which the
    exploration policy acts; the task policy acts afterwards. 0 for the whole run.
    Evaluation always uses the task policy."""
    intrinsic: float = 1.0
    """Scale of the intrinsic reward."""
    extrinsic: float = 0.0
    """Scale of the task reward that is added to the intrinsic reward."""
    target: Literal["stoch", "deter", "embed", "feat"] = "stoch"
    """What the ensemble of Dreamer predicts: the stochastic or deterministic part of
    the latent state, the embedded observation, or all features."""
    offset: int = 1
    """Number of steps by which the target is ahead of the ensemble's input."""
    action_conditioned: bool = False
    """Add the action to the input of the ensemble; the intrinsic reward of a step is
    then the disagreement for its state and action."""
    log: bool = True
    """Use the logarithm of the disagreement as intrinsic reward."""
    ensemble: EnsembleConfig = EnsembleConfig()
    """Ensemble of Dreamer."""
    heads: TokenHeadsConfig = TokenHeadsConfig()
    """Token heads of Δ-IRIS, which are its ensemble."""
    retnorm: NormalizeConfig = NormalizeConfig("perc", limit=1.0, debias=False)
    """Normalization of the exploration policy's returns, for advantages."""

    def __post_init__(self) -> None:
        check_minimum(self, "explore.", until=0, offset=0)
        if self.action_conditioned and not self.offset:
            raise ValueError("action_conditioned needs an offset of at least 1")
        if not self.intrinsic and not self.extrinsic:
            raise ValueError("intrinsic and extrinsic must not both be zero")

    def is_active(self, step: int) -> bool:
        """True if the exploration policy acts at an agent step."""
        return self.policy != "none" and (not self.until or step < self.until)

    def combine_rewards(
        self, intrinsic: Float[Tensor, "*b"], extrinsic: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return the reward of the exploration policy: a weighted sum."""
        reward = self.intrinsic * intrinsic
        return reward + self.extrinsic * extrinsic if self.extrinsic else reward


def check_mode(mode: Mode, has_exploration_policy: bool) -> None:
    """Raise if the mode is `explore` and the agent has no exploration policy."""
    if mode == "explore" and not has_exploration_policy:
        raise UserError(
            "The agent has no exploration policy.\n  Fix: --configs plan2explore"
        )


def disagreement(predictions: Float[Tensor, "M *b O"]) -> Float[Tensor, "*b"]:
    """Return the standard deviation over `M` members, averaged over `O` outputs.

    The estimate of the variance is unbiased, with the divisor M - 1.
    """
    return predictions.std(0).mean(-1)


def token_disagreement(logits: Float[Tensor, "M *b K C"]) -> Float[Tensor, "*b"]:
    """Return the Jensen-Shannon divergence over members, averaged over K tokens.

    `M` members predict each of K tokens as one of C codes. The divergence is the
    entropy of the mean distribution minus the mean entropy of all members, in nats. It
    is 0 if all members predict the same, and log(M) if no two of them assign a
    probability above 0 to the same code.
    """
    probs = logits.float().softmax(-1)
    entropies: Tensor = torch.special.entr(probs).sum(-1)
    mixture_entropy: Tensor = torch.special.entr(probs.mean(0)).sum(-1)
    divergence = mixture_entropy - entropies.mean(0)
    return divergence.clamp(min=0).mean(-1)  # rounding errors may be negative
