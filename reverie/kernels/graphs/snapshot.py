"""A second set of weights, for acting while the first set is being trained.

An update takes milliseconds on its stream, and acting must not wait for it, nor see
half of it. The snapshot is taken between two updates, so whoever acts with it is
exactly one update behind.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from reverie.nets.blocks import Kernel, Norm

Part = TypeVar("Part", bound=nn.Module)


class Snapshot:
    """Twins of modules that compute with weights of their own."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []

    def of(self, module: Part) -> Part:
        """The module with its weights as they are now; the rest is shared."""
        shared = [*module.parameters(), *module.buffers()]
        shadows = [x.shadow for x in module.modules() if isinstance(x, Kernel)]
        memo = {
            id(x): x for x in [*shared, *(s for both in shadows for s in both or ())]
        }
        twin = copy.deepcopy(module, memo)
        for mine, other in zip(module.modules(), twin.modules(), strict=True):
            if isinstance(mine, Kernel) and isinstance(other, Kernel):
                weight, bias = mine.shadow or (mine.weight, mine.bias)
                other.shadow = (self._follow(weight), self._follow(bias))
            elif isinstance(mine, Norm) and isinstance(other, Norm):
                for name, parameter in mine.named_parameters(recurse=False):
                    follower = nn.Parameter(self._follow(parameter), False)
                    setattr(other, name, follower)
        return twin

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the weights as they are now."""
        torch._foreach_copy_(self.targets, self.sources)

    def _follow(self, source: Tensor) -> Tensor:
        target = source.detach().clone()
        self.sources.append(source.detach())
        self.targets.append(target)
        return target
