"""Adam with decoupled weight decay (AdamW) and clipping of the global gradient norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reverie.nets.optim.optimizer import (
    Optimizer,
    Scalar,
    StepScalars,
    UpdateRule,
    check_betas,
    update_average,
)


@dataclass(frozen=True)
class AdamConfig:
    """Adam; the defaults are those of Δ-IRIS for Crafter."""

    lr: float = 1e-4
    """Learning rate."""
    clip: float = 10.0
    """Maximum norm of all gradients together; 0 disables clipping."""
    wd: float = 0.01
    """Weight decay of the weights of dense layers; multiplied by the learning rate."""
    eps: float = 1e-8
    """Added to the running RMS of the gradients."""
    beta1: float = 0.9
    """Decay rate of the momentum."""
    beta2: float = 0.999
    """Decay rate of the running average of squared gradients."""

    def __post_init__(self) -> None:
        if not all(x >= 0 for x in (self.lr, self.clip, self.wd)):
            raise ValueError("lr, clip and wd must not be negative")
        if not self.eps > 0:
            raise ValueError("eps must be above zero")
        check_betas(self)

    def rule(self) -> Adam:
        return Adam(self)


class Adam(UpdateRule):
    NAME = "adam"
    config: AdamConfig

    def weight_decay(self) -> float:
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
