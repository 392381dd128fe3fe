"""The optimizer that all agents train with; its config selects the update rule.

`Optimizer` computes gradients, scales the loss for float16, skips updates that are not
finite, and returns metrics. An update rule (`laprop.py`, `adam.py`) defines how
gradients are clipped and how parameters change.

In a data-parallel update, loss and gradients of all ranks are first added up. So all
ranks clip by the same norm, skip the same updates, and keep equal weights.

An update whose loss or gradients are not finite is skipped without a host sync: every
change is multiplied by `gate`, a scalar tensor that is 0 in a skipped update and
otherwise 1. All state is changed in place, so that an update can be captured in a CUDA
graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.api import Metrics, StateDict
from reverie.distributed.collective import all_reduce_coalesced
from reverie.nets.abort import add_abort_hooks, close_abort_window
from reverie.nets.blocks import Linear

Tensors = list[Tensor] | tuple[Tensor, ...]
Scalar = Float[Tensor, ""]
PerTensor = Float[Tensor, " P"]
"""One number for each of the P parameter tensors, such as its norm."""


class LossScaling(NamedTuple):
    """Settings of dynamic loss scaling in float16; an overflow halves the scale."""

    initial: float = 2.0**16
    growth_interval: int = 2000  # finite updates before the scale is doubled
    minimum: float = 1.0
    maximum: float = 2.0**24


class StepScalars(NamedTuple):
    """Scalars of one update, on the device."""

    rate: Scalar  # factor of the parameter change; 0 to skip the update
    mu_correction: Scalar  # divisors that correct the bias of the running averages
    nu_correction: Scalar


class Step(NamedTuple):
    """Intermediate results of one update, before parameters change."""

    ok: Bool[Tensor, ""]  # loss and gradients are finite
    gate: Scalar  # `ok` as a float
    norm: Scalar  # of all gradients
    lr: Scalar | float
    clip: PerTensor  # clipping factor of each gradient
    scalars: StepScalars


class UpdateRule:
    """How one optimizer clips gradients and updates parameters.

    A rule has no state: `Optimizer` stores the running averages.
    """

    NAME: ClassVar[str]
    MOMENTS: ClassVar[tuple[str, ...]] = ("mu", "nu")
    """Running averages kept for each parameter, in the naming of optax: `mu` of the
    gradients, `nu` of their squares."""
    CLIPS_PER_TENSOR: ClassVar[bool] = False
    """True if clipping needs the norm of every parameter tensor."""
    LOSS_SCALING: ClassVar[LossScaling] = LossScaling()

    def __init__(self, config: OptimizerConfig):
        self.config = config

    def default_decayed(self, names: list[str]) -> list[str]:
        """Return the names of parameters that have weight decay by default."""
        return []

    def learning_rate(self, step: Scalar) -> Scalar | float:
        """Return the learning rate after `step` updates."""
        return self.config.lr

    def weight_decay(self) -> float:
        """Return the factor of the weight decay term in the formula of `update`."""
        return 0.0

    def clip_factors(
        self, norms: PerTensor, weight_norms: PerTensor, norm: Scalar
    ) -> PerTensor:
        """Return the clipping factor of each gradient.

        `norms` and `weight_norms` are the norms of each gradient and each parameter;
        `norm` is the norm of all gradients together.
        """
        raise NotImplementedError

    def scalars(self, lr: Scalar | float, gate: Scalar, step: Scalar) -> StepScalars:
        """Return the scalars; `rate` is the learning rate over `mu_correction`."""
        mu_correction = bias_correction(self.config.beta1, step)
        nu_correction = bias_correction(self.config.beta2, step)
        return StepScalars(lr * gate / mu_correction, mu_correction, nu_correction)

    def update(
        self, opt: Optimizer, grads: list[Tensor], gate: Scalar, scalars: StepScalars
    ) -> tuple[Scalar, Scalar] | None:
        """Change moments and parameters in place by the clipped gradients.

        Returns the norms of the change and of the parameters if the rule reports them.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class OptimizerConfig:
    """Fields that the configs of all update rules have."""

    lr: float = 1e-4
    """Learning rate."""
    eps: float = 1e-8
    """Added to the running RMS of the gradients."""
    beta1: float = 0.9
    """Decay rate of the momentum."""
    beta2: float = 0.999
    """Decay rate of the running average of squared gradients."""

    def __post_init__(self) -> None:
        if not (0 <= self.lr < math.inf and self.eps >= 0):
            raise ValueError("lr and eps must not be negative")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError("beta1 and beta2 must be at least 0 and below 1")

    def rule(self) -> UpdateRule:
        """Return the update rule with these settings."""
        raise NotImplementedError


class Optimizer:
    """Updates parameters, given by name, with the rule of its config.

    Args:
        parameters: The parameters to train.
        config: Config of the update rule (LaProp, Adam or AMSGrad).
        decayed: Names of the parameters with weight decay; None for the rule's default.
        scaling: Use dynamic loss scaling, for float16.

    To accumulate gradients over n batches, call `gradients(loss / n)` for each, add
    them up, and `apply` the sums.
    """

    SCALARS = ("step", "skipped", "consecutive_skips", "loss_scale", "finite_steps")
    """Scalars of the state dict. `step` and `skipped` count all updates that were and
    were not applied, `finite_steps` those since the last change of the loss scale."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        config: OptimizerConfig,
        decayed: Iterable[str] | None = None,
        scaling: bool = False,
    ):
        self.config, self.rule, self.scaling = config, config.rule(), scaling
        self.names, self.tensors = list(parameters), list(parameters.values())
        # tensors to compute gradients for; kernels replace them by low-precision copies
        self.leaves = self.tensors
        if decayed is None:
            decayed = self.rule.default_decayed(self.names)
        self.decayed = set(decayed)
        assert self.decayed <= set(parameters), self.decayed - set(parameters)
        device = self.tensors[0].device
        self.moments = {
            key: [torch.zeros_like(tensor) for tensor in self.tensors]
            for key in self.rule.MOMENTS
        }
        self.step, self.skipped, self.consecutive_skips, self.finite_steps = (
            torch.zeros((), device=device) for _ in range(4)
        )
        scale = self.rule.LOSS_SCALING.initial if scaling else 1.0
        self.loss_scale = torch.full((), scale, device=device)
        # gradient norms of the last update; number of trained parameters
        self.norms = torch.zeros(len(self.tensors), device=device)
        self.size = sum(tensor.numel() for tensor in self.tensors)

    def update(self, loss: Scalar) -> tuple[Bool[Tensor, ""], Metrics]:
        """Take a gradient step; return (loss and gradients were finite, metrics)."""
        return self.apply(loss.detach(), self.gradients(loss))

    def gradients(self, loss: Scalar) -> list[Tensor]:
        """Return unscaled gradients, zero for parameters without effect on the loss."""
        scaled = loss * self.loss_scale if self.scaling else loss
        add_abort_hooks(scaled)  # a signal can abort the backward pass
        grads = torch.autograd.grad(scaled, self.leaves, materialize_grads=True)
        if not self.scaling:
            return list(grads)
        grads = tuple(grad.float() for grad in grads)
        return list(torch._foreach_div(grads, self.loss_scale))

    @torch.no_grad()
    def apply(
        self, loss: Scalar, grads: list[Tensor]
    ) -> tuple[Bool[Tensor, ""], Metrics]:
        """Clip the gradients and update the parameters; returns as `update` does."""
        close_abort_window()  # the update must be completed from here on
        loss, grads = self._add_up(loss, grads)
        step = self._prepare(loss, *self._norms(grads))
        update_norms = self._update(grads, step)
        metrics: Metrics = {
            "opt/loss": loss,
            "opt/updates": self.step.clone(),
            "opt/grad_norm": step.norm,
            "opt/lr": step.lr,
            "opt/skipped": self.skipped.clone(),
            "opt/consecutive_skips": self.consecutive_skips.clone(),
        }
        if update_norms is not None:
            root = math.sqrt(self.size)
            metrics["opt/grad_rms"] = step.norm / root
            metrics["opt/update_rms"], metrics["opt/param_rms"] = (
                x / root for x in update_norms
            )
            metrics["opt/param_count"] = float(self.size)
        if self.scaling:
            metrics["opt/grad_scale"] = self.loss_scale.clone()
        return step.ok, metrics

    def nonfinite(self) -> list[str]:
        """Return names of parameters with nonfinite gradients in the last update."""
        bad = (~torch.isfinite(self.norms)).tolist()
        return [name for name, is_bad in zip(self.names, bad, strict=True) if is_bad]

    def state_dict(self) -> StateDict:
        moments = {
            key: dict(zip(self.names, values, strict=True))
            for key, values in self.moments.items()
        }
        return {**{key: getattr(self, key) for key in self.SCALARS}, **moments}

    @torch.no_grad()
    def load_state_dict(self, state: StateDict) -> None:
        for key in self.SCALARS:
            getattr(self, key).copy_(torch.as_tensor(state[key]))
        for key, values in self.moments.items():
            for name, value in zip(self.names, values, strict=True):
                value.copy_(state[key][name])

    # Replaced by kernels in `kernels/optim/optimizer.py`.

    def _add_up(self, loss: Scalar, grads: list[Tensor]) -> tuple[Scalar, list[Tensor]]:
        """Return the sums of loss and gradients over all ranks, in one all-reduce."""
        loss, *grads = all_reduce_coalesced([loss, *grads])
        return loss, grads

    def _norms(self, grads: list[Tensor]) -> tuple[PerTensor, PerTensor]:
        """Return the norm of each gradient, and of each parameter if needed."""
        norms = torch.stack(torch._foreach_norm(grads)).float()
        if not self.rule.CLIPS_PER_TENSOR:
            return norms, norms
        return norms, torch.stack(torch._foreach_norm(self.tensors))

    def _prepare(self, loss: Scalar, norms: PerTensor, weight_norms: PerTensor) -> Step:
        """Count the update, and compute its clipping factors and scalars."""
        self.norms.copy_(norms)
        norm = torch.linalg.vector_norm(norms)
        ok = torch.isfinite(loss) & torch.isfinite(norm)
        gate, lr = ok.float(), self.rule.learning_rate(self.step)
        self.step.add_(ok)
        self._update_counters(loss, ok)
        clip = self.rule.clip_factors(
            torch.where(ok, norms, 0), weight_norms, torch.where(ok, norm, 0)
        )
        scalars = self.rule.scalars(lr, gate, self.step)
        return Step(ok, gate, norm, lr, clip, scalars)

    def _update(self, grads: list[Tensor], step: Step) -> tuple[Scalar, Scalar] | None:
        """Clip the gradients and apply the rule; return what `rule.update` returns."""
        # `where`, because 0 * inf is not 0
        grads = [torch.where(step.ok, grad.float(), 0) for grad in grads]
        torch._foreach_mul_(grads, list(step.clip.unbind()))
        return self.rule.update(self, grads, step.gate, step.scalars)

    def _update_counters(self, loss: Scalar, ok: Bool[Tensor, ""]) -> None:
        """Count skipped updates, and adjust the loss scale.

        `consecutive_skips` does not count overflows that a smaller scale can avoid.
        """
        gate = ok.float()
        self.skipped.add_(1 - gate)
        skips = (self.consecutive_skips + 1) * (1 - gate)
        if not self.scaling:
            self.consecutive_skips.copy_(skips)
            return
        settings, scale = self.rule.LOSS_SCALING, self.loss_scale
        avoidable = ~ok & torch.isfinite(loss) & (scale > settings.minimum)
        self.consecutive_skips.copy_(
            torch.where(avoidable, self.consecutive_skips, skips)
        )
        finite = (self.finite_steps + 1) * gate
        grow = finite >= settings.growth_interval
        self.finite_steps.copy_(torch.where(grow, 0.0, finite))
        factor = torch.where(ok, torch.where(grow, 2.0, 1.0), 0.5)
        scale.mul_(factor).clamp_(settings.minimum, settings.maximum)


def bias_correction(beta: float, step: Scalar) -> Scalar:
    """Return the sum of the weights of a running average that started at zero (Adam).

    A step of 0 counts as 1, to avoid a division by zero.
    """
    return 1 - beta ** step.clamp(min=1)


def update_average(average: Tensors, new: Tensors, rate: Scalar) -> None:
    """Update exponential moving averages in place."""
    torch._foreach_mul_(average, 1 - rate)
    torch._foreach_add_(average, torch._foreach_mul(new, rate))


def dense_weights(module: nn.Module) -> list[str]:
    """Return names of the weights of dense layers: the parameters with weight decay.

    Biases, norms, embeddings and convolutions have none.
    """
    return [
        f"{name}.weight" if name else "weight"
        for name, layer in module.named_modules()
        if isinstance(layer, Linear)
    ]
