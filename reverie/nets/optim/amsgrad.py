"""AMSGrad with clipping of the global gradient norm.

The formula of `torch.optim.Adam(amsgrad=True)` after `clip_grad_norm_`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reverie.nets.optim.optimizer import (
    Optimizer,
    Scalar,
    StepScalars,
    UpdateRule,
    check_betas,
)


@dataclass(frozen=True)
class AMSGradConfig:
    """AMSGrad: Adam that divides by the largest running RMS so far."""

    lr: float = 5e-4
    """Learning rate."""
    clip: float = 10.0
    """Maximum norm of all gradients together; 0 disables clipping."""
    beta1: float = 0.9
    """Decay rate of the momentum."""
    beta2: float = 0.999
    """Decay rate of the running average of squared gradients."""
    eps: float = 1e-8
    """Added to the running RMS of the gradients."""

    def __post_init__(self) -> None:
        if not (0 <= self.lr < math.inf and self.clip >= 0):
            raise ValueError("lr and clip must not be negative")
        if not self.eps > 0:
            raise ValueError("eps must be above zero")
        check_betas(self)

    def rule(self) -> AMSGrad:
        return AMSGrad(self)


class AMSGrad(UpdateRule):
    NAME = "amsgrad"
    MOMENTS = ("mu", "nu", "nu_max")
    config: AMSGradConfig

    def scalars(self, lr: Scalar | float, gate: Scalar, step: Scalar) -> StepScalars:
        scalars = super().scalars(lr, gate, step)
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
