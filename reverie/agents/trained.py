"""Base class of agents with trained networks: checkpoints and non-finite losses."""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from torch import nn

from reverie.agents.weights import load_components
from reverie.api import Metrics, StateDict
from reverie.kernels.accelerate import Accelerator
from reverie.nets.optim.group import OptimizerGroup
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.rng import Rng


class TrainedAgent:
    """Base class of agents with trained networks.

    Subclasses define `components`, and set the attributes below in `__init__`.
    """

    accelerator: Accelerator
    """Replaces modules by fast versions and captures CUDA graphs."""
    opt: Optimizer | OptimizerGroup
    rng: dict[str, Rng]
    """Random generators by use: some of `train`, `policy`, `eval` and `report`."""
    last_metrics: Metrics
    """Metrics of the last update."""
    not_in_policy: ClassVar[tuple[str, ...]] = ()
    """Components that acting does not need (see `policy_weights`)."""

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

    def policy_weights(self) -> StateDict:
        """Return the weights and running statistics that `policy` uses."""
        return {
            name: dict(module.state_dict())
            for name, module in self.components().items()
            if name not in self.not_in_policy
        }

    def load_policy_weights(self, state: StateDict) -> None:
        """Load what `policy_weights` returned."""
        self.load_weights(state, "|".join(map(re.escape, state)))

    def policy_rng(self) -> Rng:
        """Return the random generator that `policy` uses while data is collected."""
        return self.rng["policy"]

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
        self._complete_weights(names)
        self.accelerator.weights_changed()
        return names

    def _complete_weights(self, loaded: list[str]) -> None:
        """Set the weights that follow from those of the `loaded` components, if any."""
