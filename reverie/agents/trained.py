"""What agents with an optimizer share: checkpoints, and the check of an update."""

from __future__ import annotations

import torch
from torch import nn

from reverie.agents.weights import load_components
from reverie.api import Metrics, StateDict
from reverie.kernels.accelerate import Accelerator
from reverie.nets.optim.group import OptimizerGroup
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.rng import Rng


class TrainedAgent:
    """Base class; a subclass defines `components` and sets the attributes below."""

    fast: Accelerator
    opt: Optimizer | OptimizerGroup
    rng: dict[str, Rng]
    last_metrics: Metrics
    """Metrics of the last update."""

    def components(self) -> dict[str, nn.Module]:
        """Return all modules with weights or running statistics, by name."""
        raise NotImplementedError

    def nonfinite(self) -> list[str]:
        losses = {k: x for k, x in self.last_metrics.items() if k.startswith("loss/")}
        names = [key for key, loss in losses.items() if not torch.isfinite(loss)]
        return names + [f"grad/{name}" for name in self.opt.nonfinite()]

    def parameter_count(self) -> int:
        return sum(tensor.numel() for tensor in self.opt.tensors)

    def seed_policy(self, seed: int) -> None:
        """Reset the random generator that `policy` uses in evaluation."""
        self.rng["eval"].reseed(seed)

    def state_dict(self) -> StateDict:
        weights = {k: dict(m.state_dict()) for k, m in self.components().items()}
        return {
            **weights,
            "opt": self.opt.state_dict(),
            "rng": {name: rng.state_dict() for name, rng in self.rng.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.load_weights(state)
        self.opt.load_state_dict(state["opt"])
        for name, rng in self.rng.items():
            rng.load_state_dict(state["rng"][name])

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        names = load_components(self.components(), state, components)
        self.fast.weights_changed()
        return names
