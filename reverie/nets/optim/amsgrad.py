"""Adam with the largest magnitudes remembered (AMSGrad) and one clip for all gradients.

As `torch.optim.Adam(amsgrad=True)` after `clip_grad_norm_`, but an update whose loss or
gradients are not finite changes nothing, and nothing ever waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from reverie.api import Metrics, StateDict


@dataclass(frozen=True)
class AMSGradConfig:
    """The optimizer."""

    lr: float = 5e-4
    """Learning rate."""
    clip: float = 10.0
    """Norm of all gradients together, at most; 0 for no clip."""
    beta1: float = 0.9
    """Momentum."""
    beta2: float = 0.999
    """How slowly the running magnitude follows."""
    eps: float = 1e-8
    """Added to the running magnitude."""

    def __post_init__(self) -> None:
        if not (0 <= self.lr < math.inf and self.clip >= 0 and self.eps > 0):
            raise ValueError("lr and clip cannot be below 0, and eps must be above it")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError("beta1 and beta2 must be at least 0 and below 1")


class AMSGrad:
    """Holds the parameters by name, and what it remembers about each."""

    SCALE, GOOD_STEPS, LEAST, MOST = 2.0**16, 2000, 1.0, 2.0**24
    """Of the loss scale that float16 needs."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        config: AMSGradConfig,
        scaling: bool = False,
    ):
        self.config, self.scaling = config, scaling
        self.names = list(parameters)
        self.tensors = list(parameters.values())
        device = self.tensors[0].device
        self.moments = {
            key: [torch.zeros_like(tensor) for tensor in self.tensors]
            for key in ("mean", "square", "largest")
        }
        self.counters = {
            key: torch.zeros((), device=device)
            for key in ("step", "skipped", "in_row", "good", "scale")
        }
        self.counters["scale"].fill_(self.SCALE if scaling else 1.0)
        self.norms = torch.zeros(len(self.tensors), device=device)

    def update(self, loss: Float[Tensor, ""]) -> tuple[Bool[Tensor, ""], Metrics]:
        """Take one step down the loss; returns whether it was finite."""
        scale = self.counters["scale"]
        scaled = loss * scale if self.scaling else loss
        grads = list(torch.autograd.grad(scaled, self.tensors, materialize_grads=True))
        if self.scaling:
            grads = list(torch._foreach_div(grads, scale))
        return self.apply(loss.detach(), grads)

    @torch.no_grad()
    def apply(
        self, loss: Float[Tensor, ""], grads: list[Tensor]
    ) -> tuple[Bool[Tensor, ""], Metrics]:
        config, counters = self.config, self.counters
        self.norms.copy_(self._measure(grads))
        norm = torch.linalg.vector_norm(self.norms)
        ok = torch.isfinite(loss) & torch.isfinite(norm)
        self._count(loss, ok)
        factor = torch.ones_like(norm)
        if config.clip:
            factor = (config.clip / (norm + 1e-6)).clamp(max=1)
        self._move(grads, factor, ok)
        metrics: Metrics = {
            "opt/loss": loss,
            "opt/updates": counters["step"].clone(),
            "opt/grad_norm": norm,
            "opt/lr": config.lr,
            "opt/skipped": counters["skipped"].clone(),
            "opt/nonfinite_in_row": counters["in_row"].clone(),
        }
        if self.scaling:
            metrics["opt/grad_scale"] = counters["scale"].clone()
        return ok, metrics

    def _measure(self, grads: list[Tensor]) -> Float[Tensor, " K"]:
        """The norm of every gradient."""
        return torch.stack(torch._foreach_norm(grads))

    def _move(self, grads: list[Tensor], factor: Tensor, ok: Tensor) -> None:
        """Step along gradients times `factor`, unless something was not finite."""
        config, gate = self.config, ok.float()
        grads = [torch.where(ok, grad, 0) for grad in grads]
        torch._foreach_mul_(grads, torch.where(ok, factor, 0))
        mean, square = self.moments["mean"], self.moments["square"]
        largest = self.moments["largest"]
        torch._foreach_mul_(mean, 1 - (1 - config.beta1) * gate)
        torch._foreach_add_(mean, grads, alpha=1 - config.beta1)
        torch._foreach_mul_(grads, grads)
        torch._foreach_mul_(square, 1 - (1 - config.beta2) * gate)
        torch._foreach_add_(square, grads, alpha=1 - config.beta2)
        torch._foreach_maximum_(largest, square)
        magnitude = torch._foreach_sqrt(largest)
        torch._foreach_div_(magnitude, torch.sqrt(self._debias(config.beta2)))
        torch._foreach_add_(magnitude, config.eps)
        change = torch._foreach_div(mean, magnitude)
        torch._foreach_mul_(change, -config.lr * gate / self._debias(config.beta1))
        torch._foreach_add_(self.tensors, change)

    def _debias(self, beta: float) -> Tensor:
        """What is left of a beginning at zero."""
        return 1 - beta ** self.counters["step"].clamp(min=1)

    def nonfinite(self) -> list[str]:
        """The tensors whose gradients were not finite in the last update."""
        bad = (~torch.isfinite(self.norms)).tolist()
        return [name for name, is_bad in zip(self.names, bad, strict=True) if is_bad]

    def state_dict(self) -> StateDict:
        moments = {
            key: dict(zip(self.names, values, strict=True))
            for key, values in self.moments.items()
        }
        return {**moments, "counters": dict(self.counters)}

    @torch.no_grad()
    def load_state_dict(self, state: StateDict) -> None:
        for key, values in self.moments.items():
            for name, value in zip(self.names, values, strict=True):
                value.copy_(state[key][name])
        for key, counter in self.counters.items():
            counter.copy_(torch.as_tensor(state["counters"][key]))

    def _count(self, loss: Tensor, ok: Tensor) -> None:
        """Count updates and skips, and find the largest scale without overflow.

        An overflow that a smaller scale will cure is no sign of a broken run.
        """
        counters, gate = self.counters, ok.float()
        counters["step"] += gate
        counters["skipped"] += 1 - gate
        in_row = (counters["in_row"] + 1) * (1 - gate)
        if self.scaling:
            scale = counters["scale"]
            curable = ~ok & torch.isfinite(loss) & (scale > self.LEAST)
            in_row = torch.where(curable, counters["in_row"], in_row)
            good = (counters["good"] + 1) * gate
            grow = good >= self.GOOD_STEPS
            factor = torch.where(ok, torch.where(grow, 2.0, 1.0), 0.5)
            counters["good"].copy_(torch.where(grow, 0.0, good))
            counters["scale"].copy_((scale * factor).clamp(self.LEAST, self.MOST))
        counters["in_row"].copy_(in_row)
