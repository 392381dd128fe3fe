"""Speed up an agent: fast versions of modules, low-precision weights, a fused optimizer
and CUDA graphs.

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
from reverie.kernels.optim.flat_cpu import FlatOptimizer
from reverie.kernels.optim.low_precision_weights import LowPrecisionWeights
from reverie.nets.optim.optimizer import Optimizer, OptimizerConfig
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map

Policy = Callable[[Carry, dict[str, Any]], PolicyOutput]
"""Maps carry and observations to the new carry, actions and extras."""


def kernels_available(device: torch.device) -> bool:
    """True if Triton kernels can run on the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def use_fast_versions(module: nn.Module, attribute: str = "fast_version") -> None:
    """Replace the class of every submodule by its fast version, if it has one."""
    for part in module.modules():
        # `vars`, not `getattr`: an inherited name is the fast version of a base class,
        # which lacks the methods that the subclass overrides
        if name := vars(type(part)).get(attribute):
            part.__class__ = pkgutil.resolve_name(name)


class Accelerator:
    """Applies the `compile` and `overlap` settings of an agent.

    `compile` is "none" for plain PyTorch, "step" for fast modules and optimizer, or
    "graph" to also capture them in CUDA graphs. With `overlap`, the policy uses a copy
    of the weights that is one update old, so that it does not wait for a running
    update; agents that never act during training do not need it. Without a GPU and
    Triton, all methods return plain versions.
    """

    def __init__(self, compile: str, device: torch.device, overlap: bool = False):
        self.device = device
        self.has_kernels = compile != "none" and kernels_available(device)
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

    def use_fast_modules(self, *modules: nn.Module) -> None:
        """Replace all submodules by their fast versions, in place."""
        for module in modules:
            if self.has_kernels:
                use_fast_versions(module)
            elif self._uses_cpu_versions:
                use_fast_versions(module, "fast_cpu_version")

    def use_low_precision(
        self, modules: Iterable[nn.Module], dtype: torch.dtype
    ) -> None:
        """Make modules compute with low-precision copies of their weights.

        Call it before `make_optimizer` and `make_policy`.
        """
        if self.has_kernels:
            self._low_precision = LowPrecisionWeights(modules, dtype)

    def make_optimizer(
        self,
        parameters: dict[str, Tensor],
        config: OptimizerConfig,
        decayed: Iterable[str] | None = None,
        scaling: bool = False,
        accumulates: bool = False,
    ) -> Optimizer:
        """Return an optimizer, fused if possible.

        `decayed` and `scaling` are those of `Optimizer`: the names of parameters with
        weight decay, and dynamic loss scaling. Set `accumulates` if the caller adds up
        the gradients of several backward passes.
        """
        if not self.has_kernels:
            opt = Optimizer(parameters, config, decayed, scaling)
            if self._uses_cpu_versions and FlatOptimizer.supports(opt):
                return FlatOptimizer(parameters, config, opt.decayed, scaling)
            return opt
        from reverie.kernels.optim.optimizer import FusedOptimizer

        return FusedOptimizer(
            *(parameters, config, decayed, scaling),
            low_precision=self._low_precision,
            float32_grads=accumulates,
        )

    def capture(
        self,
        function: Callable[..., Any],
        name: str,
        rng: Rng,
        static_inputs: bool = False,
    ) -> Callable[..., Any]:
        """Return the function, captured as a CUDA graph if graphs are enabled.

        With several ranks, the graph contains collectives; without NCCL, the function
        then runs without a graph. It must meet the conditions of
        `kernels/graphs/runner.py`, and sample only from `rng`. `CudaGraphRunner`
        explains `static_inputs`.
        """
        if not self.has_graphs:
            return function
        return CudaGraphRunner(
            function, name, self.device, [rng.generator], static_inputs=static_inputs
        )

    def make_policy(
        self,
        act: Callable[..., Any],
        modules: Sequence[nn.Module],
        rng: Rng,
        collects: bool,
    ) -> Policy:
        """Return a policy step that returns actions and extras as NumPy arrays.

        It calls `act(*modules, carry, obs)`, which samples from `rng` only. With
        `overlap`, a policy that collects training data (`collects`) gets copies of the
        modules, because it acts during updates.
        """
        if not self.has_graphs:
            return partial(_act_eager, partial(act, *modules))
        copies = WeightCopies() if self.overlap and collects else None
        if copies:
            modules = [copies.copy_module(module) for module in modules]
        policy = GraphedPolicy(
            partial(act, *modules), self.device, [rng.generator], copies
        )
        self._policies.append(policy)
        return policy

    def before_update(self) -> None:
        """Update the policies' copies of the weights; call it before every update."""
        for policy in self._policies:
            policy.before_update()

    def weights_changed(self) -> None:
        """Update all copies of the weights: in low precision and for the policies.

        Call it after anything but the optimizer has changed parameters.
        """
        if self._low_precision:
            self._low_precision.refresh()
        self.before_update()

    def refresh_slow_copies(self) -> None:
        """Update the low-precision copies of weights without gradients (slow critic).

        Call it in an update that changes these weights.
        """
        if self._low_precision:
            self._low_precision.refresh(frozen=True)


def _act_eager(
    act: Callable[[Carry, Any], Any], carry: Carry, obs: dict[str, Any]
) -> PolicyOutput:
    """Run a policy step without a CUDA graph; copy its outputs to NumPy arrays."""
    carry, action, extras = act(carry, obs)
    action, extras = tree_map(lambda x: x.cpu().numpy(), (action, extras))
    return carry, action, extras
