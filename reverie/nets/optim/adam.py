"""Adam with decoupled weight decay (AdamW), and AMSGrad; both clip the global norm.

AMSGrad has the formula of `torch.optim.Adam(amsgrad=True)` after `clip_grad_norm_`. The
bias correction of `mu` is part of `scalars.rate`. In a skipped update, `gate`,
`scalars.rate` and all gradients are 0, so nothing changes (see `optimizer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reverie.nets.optim.optimizer import (
    Optimizer,
    OptimizerConfig,
    PerTensor,
    Scalar,
    StepScalars,
    UpdateRule,
    update_average,
)


@dataclass(frozen=True)
class ClippedConfig(OptimizerConfig):
    """Settings that Adam and AMSGrad share."""

    clip: float = 10.0
    """Maximum global norm of the gradients; 0 disables clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.eps > 0 and self.clip >= 0):
            raise ValueError("eps must be positive and clip at least 0")


@dataclass(frozen=True)
class AdamConfig(ClippedConfig):
    """Adam; the defaults are those of Δ-IRIS for Crafter."""

    wd: float = 0.01
    """Weight decay of the weights of dense layers; multiplied by the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.wd >= 0:
            raise ValueError("wd must be at least 0")

    def rule(self) -> Adam:
        return Adam(self)


@dataclass(frozen=True)
class AMSGradConfig(ClippedConfig):
    """AMSGrad: Adam that divides by the largest running RMS so far."""

    lr: float = 5e-4

    def rule(self) -> AMSGrad:
        return AMSGrad(self)


class ClippedRule(UpdateRule):
    """Clips the global norm of the gradients."""

    config: ClippedConfig

    def clip_factors(
        self, norms: PerTensor, weight_norms: PerTensor, norm: Scalar
    ) -> PerTensor:
        if not self.config.clip:
            return torch.ones_like(norms)
        # the epsilon of `clip_grad_norm_`
        factor = (self.config.clip / (norm + 1e-6)).clamp(max=1)
        return factor.repeat(len(norms))


class Adam(ClippedRule):
    """Adam with decoupled weight decay."""

    NAME = "adam"
    config: AdamConfig

    def weight_decay(self) -> float:
        """Return the fraction by which one update shrinks weights with weight decay."""
        return self.config.lr * self.config.wd

    def update(
        self, opt: Optimizer, grads: list[Tensor], gate: Scalar, scalars: StepScalars
    ) -> None:
        config, (mu, nu) = self.config, opt.moments.values()
        squares = torch._foreach_mul(grads, grads)
        update_average(mu, grads, (1 - config.beta1) * gate)
        update_average(nu, squares, (1 - config.beta2) * gate)
        if config.wd and opt.decayed:
            pairs = zip(opt.names, opt.tensors, strict=True)
            decayed = [tensor for name, tensor in pairs if name in opt.decayed]
            torch._foreach_mul_(decayed, 1 - self.weight_decay() * gate)
        rms = torch._foreach_div(nu, scalars.nu_correction)
        torch._foreach_sqrt_(rms)
        torch._foreach_add_(rms, config.eps)
        updates = torch._foreach_div(mu, rms)
        torch._foreach_mul_(updates, -scalars.rate)
        torch._foreach_add_(opt.tensors, updates)


class AMSGrad(ClippedRule):
    """AMSGrad; `nu_max` is the maximum of `nu` over all updates."""

    NAME = "amsgrad"
    MOMENTS = ("mu", "nu", "nu_max")

    def scalars(self, lr: Scalar | float, gate: Scalar, step: Scalar) -> StepScalars:
        scalars = super().scalars(lr, gate, step)
        # `update` divides the square root of `nu_max` by it, as PyTorch does
        return scalars._replace(nu_correction=torch.sqrt(scalars.nu_correction))

    def update(
        self, opt: Optimizer, grads: list[Tensor], gate: Scalar, scalars: StepScalars
    ) -> None:
        config, (mu, nu, nu_max) = self.config, opt.moments.values()
        torch._foreach_mul_(mu, 1 - (1 - config.beta1) * gate)
        torch._foreach_add_(mu, grads, alpha=1 - config.beta1)
        torch._foreach_mul_(grads, grads)
        torch._foreach_mul_(nu, 1 - (1 - config.beta2) * gate)
        torch._foreach_add_(nu, grads, alpha=1 - config.beta2)
        torch._foreach_maximum_(nu_max, nu)
        rms = torch._foreach_sqrt(nu_max)
        torch._foreach_div_(rms, scalars.nu_correction)
        torch._foreach_add_(rms, config.eps)
        updates = torch._foreach_div(mu, rms)
        torch._foreach_mul_(updates, -scalars.rate)
        torch._foreach_add_(opt.tensors, updates)
