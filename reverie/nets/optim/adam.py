"""Adam with decoupled weight decay and one limit on the norm of all gradients.

As in `optim.py`, an update whose loss or gradients are not finite changes nothing, and
nobody asks the device whether it was. Everything it remembers is changed in place, so
that an update can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.api import Metrics, StateDict
from reverie.nets.blocks import Linear

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class AdamConfig:
    """The optimizer of one part; the defaults are those of Δ-IRIS for Crafter."""

    lr: float = 1e-4
    """Learning rate."""
    clip: float = 10.0
    """Largest norm of all gradients together; 0 for no limit."""
    wd: float = 0.01
    """Weight decay, times the learning rate, of the tensors that decay."""
    eps: float = 1e-8
    """Added to the running magnitude."""
    beta1: float = 0.9
    """Momentum."""
    beta2: float = 0.999
    """How slowly the running magnitude follows."""

    def __post_init__(self) -> None:
        if not all(x >= 0 for x in (self.lr, self.clip, self.wd)):
            raise ValueError("lr, clip and wd must not be negative")
        if not self.eps > 0:
            raise ValueError("eps must be above zero")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError("beta1 and beta2 must be at least 0 and below 1")


def decaying(module: nn.Module) -> list[str]:
    """The weights that decay: those of dense layers, and nothing else.

    Neither biases, norms, embeddings nor convolutions do.
    """
    return [
        f"{name}.weight" if name else "weight"
        for name, layer in module.named_modules()
        if isinstance(layer, Linear)
    ]


class Adam:
    """Holds parameters by name, and what it remembers about each.

    `decays` names those that weight decay pulls to zero (`decaying`). For several
    batches per update, add up `gradients` of each loss divided by their number, and
    `apply` the sums.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        config: AdamConfig,
        decays: Iterable[str] = (),
    ):
        self.parameters, self.config = parameters, config
        self.names, self.tensors = list(parameters), list(parameters.values())
        self.leaves = self.tensors  # what the loss is differentiated by
        decays = set(decays)
        assert decays <= set(parameters), decays - set(parameters)
        self.decays = [t for name, t in parameters.items() if name in decays]
        device = self.tensors[0].device
        self.nu = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.mu = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.step = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.in_row = torch.zeros((), device=device)
        self.norms = torch.zeros(len(self.tensors), device=device)

    def update(self, loss: Float[Tensor, ""]) -> tuple[Bool[Tensor, ""], Metrics]:
        """Take one step down the loss; returns whether it was finite."""
        return self.apply(loss.detach(), self.gradients(loss))

    def gradients(self, loss: Float[Tensor, ""]) -> list[Tensor]:
        """The gradient of every parameter; zero where the loss has no say."""
        return list(torch.autograd.grad(loss, self.leaves, materialize_grads=True))

    @torch.no_grad()
    def apply(
        self, loss: Float[Tensor, ""], grads: list[Tensor]
    ) -> tuple[Bool[Tensor, ""], Metrics]:
        self.norms.copy_(self._measure(grads))
        norm = torch.linalg.vector_norm(self.norms)
        ok = torch.isfinite(loss) & torch.isfinite(norm)
        gate = ok.float()
        self.step.add_(gate)
        self.skipped.add_(1 - gate)
        self.in_row.add_(1).mul_(1 - gate)
        factor = torch.ones_like(norm)
        if self.config.clip:
            factor = (self.config.clip / (norm + 1e-6)).clamp(max=1)
        self._move(grads, torch.where(ok, factor, 0), ok)
        return ok, {
            "opt/loss": loss,
            "opt/updates": self.step.clone(),
            "opt/grad_norm": norm,
            "opt/skipped": self.skipped.clone(),
            "opt/nonfinite_in_row": self.in_row.clone(),
        }

    def _measure(self, grads: list[Tensor]) -> Float[Tensor, " P"]:
        """The norm of every gradient."""
        return torch.stack(torch._foreach_norm(grads)).float()

    def _move(
        self, grads: list[Tensor], factor: Float[Tensor, ""], ok: Bool[Tensor, ""]
    ) -> None:
        """Follow the gradients times `factor`."""
        config, gate = self.config, ok.float()
        # nothing times zero is no number, unless it was none before: so, `where`
        grads = [torch.where(ok, grad.float(), 0) for grad in grads]
        torch._foreach_mul_(grads, factor)
        squares = torch._foreach_mul(grads, grads)
        self._average(self.mu, grads, (1 - config.beta1) * gate)
        self._average(self.nu, squares, (1 - config.beta2) * gate)
        if config.wd and self.decays:
            torch._foreach_mul_(self.decays, 1 - config.lr * config.wd * gate)
        magnitude = torch._foreach_div(self.nu, self._debias(config.beta2))
        torch._foreach_sqrt_(magnitude)
        torch._foreach_add_(magnitude, config.eps)
        updates = torch._foreach_div(self.mu, magnitude)
        torch._foreach_mul_(updates, -config.lr * gate / self._debias(config.beta1))
        torch._foreach_add_(self.tensors, updates)

    def nonfinite(self) -> list[str]:
        """The tensors whose gradients were not finite in the last update."""
        bad = (~torch.isfinite(self.norms)).tolist()
        return [name for name, is_bad in zip(self.names, bad, strict=True) if is_bad]

    def state_dict(self) -> StateDict:
        return {
            **{name: getattr(self, name) for name in ("step", "skipped", "in_row")},
            "nu": dict(zip(self.names, self.nu, strict=True)),
            "mu": dict(zip(self.names, self.mu, strict=True)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: StateDict) -> None:
        for name in ("step", "skipped", "in_row"):
            getattr(self, name).copy_(torch.as_tensor(state[name]))
        for moments, saved in ((self.nu, state["nu"]), (self.mu, state["mu"])):
            for name, moment in zip(self.names, moments, strict=True):
                moment.copy_(saved[name])

    def _average(self, average: Tensors, new: Tensors, rate: Tensor) -> None:
        torch._foreach_mul_(average, 1 - rate)
        torch._foreach_add_(average, torch._foreach_mul(new, rate))

    def _debias(self, beta: float) -> Tensor:
        # before the first finite update there is nothing to correct
        return torch.where(self.step > 0, 1 - beta**self.step, 1.0)
