"""Several optimizers with the interface of one, for separately trained components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from reverie.api import Metrics, StateDict
from reverie.nets.optim.optimizer import Optimizer, Scalar

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "opt/loss": torch.sum,
    "opt/skipped": torch.amax,
    "opt/consecutive_skips": torch.amax,
}
"""Metrics that are reduced over all optimizers, and the function that reduces them."""


class OptimizerGroup:
    """Optimizers by name; each trains its own parameters."""

    def __init__(self, optimizers: Mapping[str, Optimizer]):
        self.optimizers = dict(optimizers)

    def __getitem__(self, name: str) -> Optimizer:
        return self.optimizers[name]

    @property
    def names(self) -> list[str]:
        return self._all("names")

    @property
    def tensors(self) -> list[Tensor]:
        return self._all("tensors")

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors to compute gradients for: parameters or low-precision copies."""
        return self._all("leaves")

    @property
    def size(self) -> int:
        return sum(opt.size for opt in self.optimizers.values())

    def apply(self, loss: Scalar, grads: list[Tensor]) -> tuple[Tensor, Metrics]:
        """Update all parameters with gradients in the order of `leaves`."""
        outputs, rest = {}, list(grads)
        for name, opt in self.optimizers.items():
            count = len(opt.leaves)
            outputs[name], rest = opt.apply(loss, rest[:count]), rest[count:]
        ok = torch.stack([output[0] for output in outputs.values()]).all()
        return ok, self.metrics({name: output[1] for name, output in outputs.items()})

    @staticmethod
    def metrics(by_name: Mapping[str, Metrics]) -> Metrics:
        """Prefix metrics with the optimizer's name, and add those in `REDUCTIONS`."""
        metrics: Metrics = {}
        for name, values in by_name.items():
            for key, value in values.items():
                metrics[key.replace("opt/", f"opt/{name}/", 1)] = value
        for key, reduce in REDUCTIONS.items():
            metrics[key] = reduce(torch.stack([x[key] for x in by_name.values()]))
        return metrics

    def nonfinite(self) -> list[str]:
        """Return names of parameters with nonfinite gradients in the last update."""
        return [name for opt in self.optimizers.values() for name in opt.nonfinite()]

    def state_dict(self) -> StateDict:
        return {name: opt.state_dict() for name, opt in self.optimizers.items()}

    def load_state_dict(self, state: StateDict) -> None:
        for name, opt in self.optimizers.items():
            opt.load_state_dict(state[name])

    def _all(self, attribute: str) -> list[Any]:
        """Concatenate an attribute of all optimizers."""
        opts = self.optimizers.values()
        return [item for opt in opts for item in getattr(opt, attribute)]
