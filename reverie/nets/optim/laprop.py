"""LaProp with adaptive gradient clipping and learning rate schedules (DreamerV3).

LaProp (Ziyin et al., 2020) is Adam with the order of its two steps exchanged: each
gradient is first divided by its running RMS, then the momentum averages the normalized
gradients. Before that, adaptive gradient clipping (Brock et al., 2021) limits the
gradient norm of each tensor relative to the norm of the tensor, so that one clipping
threshold fits layers of different scale.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reverie.api import UserError
from reverie.nets.optim.optimizer import (
    LossScaling,
    Optimizer,
    OptimizerConfig,
    PerTensor,
    Scalar,
    StepScalars,
    Tensors,
    UpdateRule,
    bias_correction,
    update_average,
)
from reverie.patterns import check_pattern, select_names


@dataclass(frozen=True)
class LaPropConfig(OptimizerConfig):
    """Optimizer of the world model, the actor and the critic."""

    lr: float = 4e-5
    """Learning rate after warm-up."""
    eps: float = 1e-20
    agc: float = 0.3
    """Adaptive gradient clipping: maximum gradient norm of a tensor, relative to the
    norm of the tensor; 0 disables it."""
    wd: float = 0.0
    """Weight decay of parameters that match `wdregex`; multiplied by the learning
    rate."""
    wdregex: str = r".*\.weight$"
    """Regular expression for the names of decayed parameters, matched from the start
    (`dyn.obs0.weight`)."""
    schedule: Literal["const", "linear", "cosine"] = "const"
    """Learning rate schedule after warm-up."""
    warmup: int = 1000
    """Updates of linear warm-up; the first update has a learning rate of 0."""
    anneal: int = 0
    """Update at which the linear or cosine schedule ends."""
    floor: float = 0.1
    """Final learning rate of the linear and cosine schedules, as a fraction of `lr`.
    The cosine schedule in the code of DreamerV3 ends at 0.1 * lr**2; to reproduce it,
    set this to 0.1 * lr."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not min(self.agc, self.wd, self.warmup) >= 0:
            raise ValueError("agc, wd and warmup must not be negative")
        try:
            check_pattern(self.wdregex)
        except re.error as error:
            raise ValueError(f"wdregex is not a regular expression: {error}") from None
        if self.schedule != "const" and self.anneal <= self.warmup:
            raise UserError(
                f"The {self.schedule} schedule must end after the warm-up of "
                f"{self.warmup} updates, not at {self.anneal}.\n"
                f"  Fix: set `anneal` above {self.warmup}."
            )

    def rule(self) -> LaProp:
        return LaProp(self)


class LaProp(UpdateRule):
    """LaProp; loss scaling and minimum weight norm of clipping are as in DreamerV3."""

    NAME = "laprop"
    CLIPS_PER_TENSOR = True
    LOSS_SCALING = LossScaling(1e4, growth_interval=1000, minimum=1e-4, maximum=1e5)
    config: LaPropConfig

    def default_decayed(self, names: list[str]) -> list[str]:
        return select_names(self.config.wdregex, names, "match")

    def learning_rate(self, step: Scalar) -> Scalar:
        config = self.config
        after = (step - config.warmup).clamp(min=0)
        progress = (after / max(1, config.anneal - config.warmup)).clamp(max=1)
        if config.schedule == "linear":
            fraction = 1 - progress + config.floor * progress
        elif config.schedule == "cosine":
            cosine = 0.5 * (1 + torch.cos(math.pi * progress))
            fraction = (1 - config.floor) * cosine + config.floor
        else:
            fraction = torch.ones_like(step)
        if config.warmup:
            fraction = torch.where(step < config.warmup, step / config.warmup, fraction)
        return config.lr * fraction

    def weight_decay(self) -> float:
        return self.config.wd  # `update` multiplies it by the learning rate

    def clip_factors(
        self, norms: PerTensor, weight_norms: PerTensor, norm: Scalar
    ) -> PerTensor:
        agc = self.config.agc
        if not agc:
            return torch.ones_like(norms)
        # at least 1e-3, so that weights that are initially zero can change
        excess = norms / (agc * weight_norms.clamp(min=1e-3))
        return 1 / excess.clamp(min=1)

    def scalars(self, lr: Scalar | float, gate: Scalar, step: Scalar) -> StepScalars:
        betas = (self.config.beta1, self.config.beta2)
        return StepScalars(lr * gate, *(bias_correction(beta, step) for beta in betas))

    def update(
        self, opt: Optimizer, grads: list[Tensor], gate: Scalar, scalars: StepScalars
    ) -> tuple[Scalar, Scalar]:
        config, (mu, nu) = self.config, opt.moments.values()
        squares = torch._foreach_mul(grads, grads)
        update_average(nu, squares, (1 - config.beta2) * gate)
        rms = torch._foreach_div(nu, scalars.nu_correction)
        torch._foreach_sqrt_(rms)
        torch._foreach_add_(rms, config.eps)
        torch._foreach_div_(grads, rms)
        update_average(mu, grads, (1 - config.beta1) * gate)
        updates = self._debiased_momentum(mu, grads, scalars.mu_correction)
        if config.wd:
            for i, name in enumerate(opt.names):
                if name in opt.decayed:
                    updates[i] = updates[i] + config.wd * opt.tensors[i]
        torch._foreach_mul_(updates, -scalars.rate)
        torch._foreach_add_(opt.tensors, updates)
        return _norm(updates), _norm(opt.tensors)

    def _debiased_momentum(
        self, mu: list[Tensor], grads: list[Tensor], correction: Scalar
    ) -> list[Tensor]:
        """Return the bias-corrected momentum, with a Nesterov step if configured."""
        beta = self.config.beta1
        if not self.config.nesterov:
            return list(torch._foreach_div(mu, correction))
        updates = torch._foreach_mul(mu, beta / correction)
        torch._foreach_add_(updates, torch._foreach_mul(grads, (1 - beta) / correction))
        return list(updates)


def _norm(tensors: Tensors) -> Scalar:
    """Return the L2 norm of all tensors together."""
    norms = torch.stack(torch._foreach_norm(tensors))
    return torch.sqrt(torch.square(norms).sum())
