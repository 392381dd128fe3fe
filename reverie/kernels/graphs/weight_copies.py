"""A second set of weights, to act with while the first set is being trained.

An update runs for milliseconds on its stream; a policy step should neither wait for it
nor read half-updated weights. The weights are copied between two updates, so that the
policy is exactly one update behind.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from reverie.nets.blocks import AffineLayer

Module = TypeVar("Module", bound=nn.Module)


class WeightCopies:
    """Copies of modules that compute with copies of their weights."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []

    def of(self, module: Module) -> Module:
        """A copy of the module with its own weights, and everything else shared."""
        shared: list[Tensor] = [*module.parameters(), *module.buffers()]
        for layer in module.modules():
            if isinstance(layer, AffineLayer):
                shared += layer.low_precision or ()
        memo = {id(tensor): tensor for tensor in shared}
        copied = copy.deepcopy(module, memo)
        for layer, own in zip(module.modules(), copied.modules(), strict=True):
            if isinstance(layer, AffineLayer) and isinstance(own, AffineLayer):
                # the float32 weights are not computed with, so they stay shared
                weight, bias = layer.low_precision or (layer.weight, layer.bias)
                own.low_precision = (self._copy(weight), self._copy(bias))
                continue
            for name, parameter in layer.named_parameters(recurse=False):
                setattr(own, name, nn.Parameter(self._copy(parameter), False))
        return copied

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights."""
        torch._foreach_copy_(self.targets, self.sources)

    def _copy(self, source: Tensor) -> Tensor:
        target = source.detach().clone()
        self.sources.append(source.detach())
        self.targets.append(target)
        return target
