"""LaProp with adaptive gradient clipping, warm-up and schedules.

LaProp is Adam with its halves swapped: each gradient is first divided by its running
magnitude, and the momentum is of what comes out. Before that, the gradient of a tensor
is clipped to a fraction of the norm of the tensor itself, so no learning rate needs to
know the scale of a layer.

An update whose loss or gradients are not finite is skipped, without asking the device
for the answer: every change is gated by `ok`, which is 1 or 0 on the device.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from reverie.api import Metrics, StateDict, UserError

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class OptConfig:
    """The optimizer of all parts together."""

    lr: float = 4e-5
    """Learning rate after warm-up."""
    agc: float = 0.3
    """Gradient norm of a tensor, at most this part of its own norm; 0 for no clip."""
    eps: float = 1e-20
    """Added to the running magnitude, outside its square root."""
    beta1: float = 0.9
    """Momentum."""
    beta2: float = 0.999
    """How slowly the running magnitude follows."""
    wd: float = 0.0
    """Weight decay, times the learning rate, of tensors that match `wdregex`."""
    wdregex: str = r".*\.weight$"
    """Names of the tensors that decay, matched from the start (`dyn.obs0.weight`)."""
    schedule: Literal["const", "linear", "cosine"] = "const"
    """Learning rate after warm-up: const, or linear or cosine down to a tenth."""
    warmup: int = 1000
    """Updates over which the learning rate rises from zero. The first has none."""
    anneal: int = 0
    """Update at which linear and cosine reach their floor."""
    floor: float = 0.1
    """Where linear and cosine end, as a part of the learning rate. The original's
    cosine really ends at 0.1 * lr of it; set that number to follow it exactly."""
    nesterov: bool = False
    """Look ahead along the momentum."""

    def __post_init__(self) -> None:
        if not (0 <= self.lr < math.inf and self.agc >= 0 and self.wd >= 0):
            raise ValueError("lr, agc and wd must not be negative")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError("beta1 and beta2 must be at least 0 and below 1")
        if self.eps < 0 or self.warmup < 0:
            raise ValueError("eps and warmup must not be negative")
        try:
            re.compile(self.wdregex)
        except re.error as error:
            raise ValueError(f"wdregex is no pattern ({error})") from None
        if self.schedule != "const" and self.anneal <= self.warmup:
            raise UserError(
                f"The {self.schedule} schedule must end after the warm-up of "
                f"{self.warmup} updates, not at {self.anneal}.\n"
                f"  Fix: give an `anneal` above {self.warmup} beside that warm-up."
            )


def learning_rate(config: OptConfig, step: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The rate after `step` updates; so the very first one has rate 0."""
    after = (step - config.warmup).clamp(min=0)
    done = (after / max(1, config.anneal - config.warmup)).clamp(max=1)
    if config.schedule == "linear":
        part = 1 - done + config.floor * done
    elif config.schedule == "cosine":
        wave = 0.5 * (1 + torch.cos(math.pi * done))
        part = (1 - config.floor) * wave + config.floor
    else:
        part = torch.ones_like(step)
    if config.warmup:
        part = torch.where(step < config.warmup, step / config.warmup, part)
    return config.lr * part


class Optimizer:
    """Holds the parameters by name, and what it remembers about each."""

    SCALE, GOOD_STEPS, LEAST, MOST = 1e4, 1000, 1e-4, 1e5
    """Of the loss scale that float16 needs."""

    def __init__(
        self, parameters: dict[str, Tensor], config: OptConfig, scaling: bool = False
    ):
        self.parameters, self.config, self.scaling = parameters, config, scaling
        self.names = list(parameters)
        self.tensors = list(parameters.values())
        self.leaves = self.tensors  # what the loss is differentiated by
        self.decays = [
            i for i, name in enumerate(self.names) if re.match(config.wdregex, name)
        ]
        device = self.tensors[0].device
        self.nu = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.mu = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.step = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.in_row = torch.zeros((), device=device)
        self.scale = torch.full((), self.SCALE if scaling else 1.0, device=device)
        self.good = torch.zeros((), device=device)
        self.size = sum(tensor.numel() for tensor in self.tensors)
        self.norms = torch.zeros(len(self.tensors), device=device)

    def update(self, loss: Float[Tensor, ""]) -> tuple[Bool[Tensor, ""], Metrics]:
        """Take one step down the loss; returns whether it was finite."""
        grads = self.gradients(loss)
        return self.apply(loss.detach(), grads)

    def gradients(self, loss: Float[Tensor, ""]) -> list[Tensor]:
        """The plain gradient of every parameter; zero where the loss has no say."""
        grads = torch.autograd.grad(
            loss * self.scale if self.scaling else loss,
            self.leaves,
            materialize_grads=True,
        )
        if not self.scaling:
            return list(grads)
        return list(torch._foreach_div([grad.float() for grad in grads], self.scale))

    @torch.no_grad()
    def apply(
        self, loss: Float[Tensor, ""], grads: list[Tensor]
    ) -> tuple[Bool[Tensor, ""], Metrics]:
        """Move the parameters; everything remembered changes in place."""
        config, root = self.config, math.sqrt(self.size)
        norms, sizes = self._measure(grads)
        self.norms.copy_(norms)
        norm = torch.linalg.vector_norm(norms)
        ok = torch.isfinite(loss) & torch.isfinite(norm)
        lr = learning_rate(config, self.step)
        self.step.add_(ok)
        self._count(loss, ok)
        clip = torch.ones_like(norms)
        if config.agc:
            excess = torch.where(ok, norms, 0) / (config.agc * sizes.clamp(min=1e-3))
            clip = 1 / excess.clamp(min=1)
        moved, size = self._move(grads, clip, lr, ok)
        metrics: Metrics = {
            "opt/loss": loss,
            "opt/updates": self.step.clone(),
            "opt/grad_norm": norm,
            "opt/grad_rms": norm / root,
            "opt/update_rms": moved / root,
            "opt/param_rms": size / root,
            "opt/param_count": float(self.size),
            "opt/lr": lr,
            "opt/skipped": self.skipped.clone(),
            "opt/nonfinite_in_row": self.in_row.clone(),
        }
        if self.scaling:
            metrics["opt/grad_scale"] = self.scale.clone()
        return ok, metrics

    def _measure(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The norm of every gradient, and of every parameter."""
        norms, sizes = torch._foreach_norm(grads), torch._foreach_norm(self.tensors)
        return torch.stack(norms).float(), torch.stack(sizes)

    def _move(
        self, grads: list[Tensor], clip: Tensor, lr: Tensor, ok: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Follow the clipped gradients; returns the norms of move and parameters."""
        config, gate = self.config, ok.float()
        grads = [torch.where(ok, grad.float(), 0) for grad in grads]
        torch._foreach_mul_(grads, list(clip.unbind()))
        squares = torch._foreach_mul(grads, grads)
        keep2, keep1 = 1 - (1 - config.beta2) * gate, 1 - (1 - config.beta1) * gate
        self._average(self.nu, squares, keep2, (1 - config.beta2) * gate)
        magnitude = torch._foreach_div(self.nu, self._debias(config.beta2))
        torch._foreach_sqrt_(magnitude)
        torch._foreach_add_(magnitude, config.eps)
        torch._foreach_div_(grads, magnitude)
        self._average(self.mu, grads, keep1, (1 - config.beta1) * gate)
        updates = self._momentum(grads)
        if config.wd:
            for i in self.decays:
                updates[i] = updates[i] + config.wd * self.tensors[i]
        torch._foreach_mul_(updates, -lr * gate)
        torch._foreach_add_(self.tensors, updates)
        return _norm(updates), _norm(self.tensors)

    def nonfinite(self) -> list[str]:
        """The tensors whose gradients were not finite in the last update."""
        bad = (~torch.isfinite(self.norms)).tolist()
        return [name for name, is_bad in zip(self.names, bad, strict=True) if is_bad]

    def state_dict(self) -> StateDict:
        counters = ("step", "skipped", "in_row", "scale", "good")
        return {
            **{name: getattr(self, name) for name in counters},
            "nu": dict(zip(self.names, self.nu, strict=True)),
            "mu": dict(zip(self.names, self.mu, strict=True)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: StateDict) -> None:
        for name in ("step", "skipped", "in_row", "scale", "good"):
            getattr(self, name).copy_(torch.as_tensor(state[name]))
        for moments, saved in ((self.nu, state["nu"]), (self.mu, state["mu"])):
            for name, moment in zip(self.names, moments, strict=True):
                moment.copy_(saved[name])

    def _average(
        self, average: Tensors, new: Tensors, keep: Tensor, take: Tensor
    ) -> None:
        torch._foreach_mul_(average, keep)
        torch._foreach_add_(average, torch._foreach_mul(new, take))

    def _debias(self, beta: float) -> Tensor:
        # before the first finite update there is nothing to correct
        return torch.where(self.step > 0, 1 - beta**self.step, 1.0)

    def _momentum(self, grads: list[Tensor]) -> list[Tensor]:
        beta = self.config.beta1
        if not self.config.nesterov:
            return list(torch._foreach_div(self.mu, self._debias(beta)))
        updates = torch._foreach_mul(self.mu, beta / self._debias(beta))
        now = torch._foreach_mul(grads, (1 - beta) / self._debias(beta))
        torch._foreach_add_(updates, now)
        return list(updates)

    def _count(self, loss: Tensor, ok: Tensor) -> None:
        """Count skips, and in float16 find the largest scale that does not overflow.

        An overflow that a smaller scale will cure is no sign of a broken run.
        """
        gate = ok.float()
        self.skipped.add_(1 - gate)
        in_row = (self.in_row + 1) * (1 - gate)
        if not self.scaling:
            self.in_row.copy_(in_row)
            return
        curable = torch.isfinite(loss) & (self.scale > self.LEAST)
        self.in_row.copy_(torch.where(~ok & curable, self.in_row, in_row))
        good = (self.good + 1) * gate
        grow = good >= self.GOOD_STEPS
        self.good.copy_(torch.where(grow, 0.0, good))
        factor = torch.where(ok, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(self.LEAST, self.MOST)


def _norm(tensors: Tensors) -> Tensor:
    norms = torch.stack(torch._foreach_norm(tensors))
    return torch.sqrt(torch.square(norms).sum())
