"""Make an agent fast: fast module versions, low-precision weights, fused optimizer and
CUDA graphs.

Every agent uses one `Accelerator`, built from its `compile` and `overlap` settings.

A fast version of a module is a subclass with the same parameters and another `forward`.
The plain class names it as "module:class" in the attribute `fast_version` (on a GPU) or
`fast_cpu_version`; the plain class remains the reference. A fast version that does not
support a shape, norm or device falls back to the plain code.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from reverie.api import Carry, PolicyOutput
from reverie.kernels.graphs.policy import GraphedPolicy, WeightCopies
from reverie.kernels.graphs.runner import CudaGraphRunner
from reverie.kernels.optim.low_precision_weights import LowPrecisionWeights
from reverie.nets.optim.optimizer import Optimizer, OptimizerConfig
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map

Policy = Callable[[Carry, dict[str, Any]], PolicyOutput]


def available(device: torch.device) -> bool:
    """True if Triton kernels can run on the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def use_fast_versions(module: nn.Module, attribute: str = "fast_version") -> None:
    """Replace the class of every submodule by its fast version, if it has one."""
    for part in module.modules():
        # not inherited: the fast version of a base class lacks what a subclass changed
        if name := vars(type(part)).get(attribute):
            part.__class__ = pkgutil.resolve_name(name)


class Accelerator:
    """Applies the `compile` and `overlap` settings of an agent.

    `compile` is "none" for plain PyTorch, "step" for fast modules and optimizer, or
    "graph" for those in CUDA graphs. With `overlap`, the policy acts with a copy of the
    weights that is one update old, and does not wait for a running update; agents that
    never act while they train leave it off. Without a GPU and Triton, all methods
    return plain versions.
    """

    def __init__(self, compile: str, device: torch.device, overlap: bool = False):
        self.device = device
        self.has_kernels = compile != "none" and available(device)
        self.has_graphs = compile == "graph" and self.has_kernels
        self.overlap = overlap and self.has_graphs
        self._uses_cpu_versions = compile != "none" and device.type == "cpu"
        self._low_precision: LowPrecisionWeights | None = None
        self._policies: list[GraphedPolicy] = []
        if compile != "none" and device.type == "cuda" and not self.has_kernels:
            warnings.warn(
                "Triton is not installed, so training runs without fused kernels and "
                "CUDA graphs: the same results, but much slower.\n"
                "  Fix: pip install triton",
                stacklevel=3,
            )

    def modules(self, *modules: nn.Module) -> None:
        """Replace all submodules by their fast versions, in place."""
        for module in modules:
            if self.has_kernels:
                use_fast_versions(module)
            elif self._uses_cpu_versions:
                use_fast_versions(module, "fast_cpu_version")

    def low_precision(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """Let modules compute with low-precision copies of their weights.

        Call it before `optimizer` and `policy`.
        """
        if self.has_kernels:
            self._low_precision = LowPrecisionWeights(modules, dtype)

    def optimizer(
        self,
        parameters: dict[str, Tensor],
        config: OptimizerConfig,
        decayed: Iterable[str] | None = None,
        scaling: bool = False,
        accumulates: bool = False,
    ) -> Optimizer:
        """The optimizer, fused if possible; `accumulates` if gradients are added up."""
        if not self.has_kernels:
            return Optimizer(parameters, config, decayed, scaling)
        from reverie.kernels.optim.optimizer import FusedOptimizer

        return FusedOptimizer(
            parameters,
            config,
            decayed,
            scaling,
            low_precision=self._low_precision,
            float32_grads=accumulates,
        )

    def graph(
        self, function: Callable[..., Any], name: str, rng: Rng
    ) -> Callable[..., Any]:
        """The function, captured as a CUDA graph if graphs are on.

        It must meet the conditions of `CudaGraphRunner`; `rng` is all it samples from.
        """
        if not self.has_graphs:
            return function
        return CudaGraphRunner(function, name, self.device, [rng.generator])

    def policy(
        self,
        act: Callable[..., Any],
        modules: Sequence[nn.Module],
        rng: Rng,
        trains: bool,
    ) -> Policy:
        """A policy step that returns actions and extras as NumPy arrays.

        It calls `act(*modules, carry, obs)`, which samples from `rng` only. With
        `overlap`, the policy of a training run (`trains`) gets copies of the modules.
        """
        if not self.has_graphs:
            return partial(_act_eager, partial(act, *modules))
        copies = WeightCopies() if self.overlap and trains else None
        if copies:
            modules = [copies.of(module) for module in modules]
        policy = GraphedPolicy(
            partial(act, *modules), self.device, [rng.generator], copies
        )
        self._policies.append(policy)
        return policy

    def before_update(self) -> None:
        """Call before an update that changes the weights of the policy."""
        for policy in self._policies:
            policy.before_update()

    def weights_changed(self) -> None:
        """Call after parameters were changed by anything but the optimizer."""
        if self._low_precision:
            self._low_precision.refresh()
        self.before_update()

    def refresh_frozen(self) -> None:
        """Call in an update after changing weights without gradients (slow copies)."""
        if self._low_precision:
            self._low_precision.refresh(frozen=True)


def _act_eager(
    act: Callable[[Carry, Any], Any], carry: Carry, obs: dict[str, Any]
) -> PolicyOutput:
    carry, action, extras = act(carry, obs)
    action, extras = tree_map(lambda x: x.cpu().numpy(), (action, extras))
    return carry, action, extras
