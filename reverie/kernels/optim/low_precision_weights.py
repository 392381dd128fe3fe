"""Half-precision copies of the weights, which layers compute with.

Parameters are float32. Without shadows every layer casts its weights each time it is
used, which for a scan of 64 steps is most of the kernels. With them, the loss is
differentiated by the copies, and the optimizer writes copies and parameters together.
Norms compute in float32 and have none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from reverie.nets.blocks import Kernel


class Shadows:
    """Gives every dense layer and convolution of some modules a copy to compute with.

    Whoever changes parameters behind the optimizer's back calls `refresh`.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype):
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._copy: dict[Tensor, Tensor] = {}
        for module in modules:
            for layer in module.modules():
                if isinstance(layer, Kernel) and dtype != layer.weight.dtype:
                    both = (layer.weight, layer.bias)
                    layer.shadow = (
                        self._cast(both[0], dtype),
                        self._cast(both[1], dtype),
                    )
                    self.pairs.extend(zip(both, layer.shadow, strict=True))

    def leaf(self, parameter: Tensor) -> Tensor:
        """What the loss is to be differentiated by in place of the parameter."""
        return self._copy.get(parameter, parameter)

    @torch.no_grad()
    def refresh(self, frozen: bool = False) -> None:
        """Copy all parameters again, or only those that no optimizer moves."""
        pairs = [(p, c) for p, c in self.pairs if not (frozen and p.requires_grad)]
        if pairs:
            parameters, copies = zip(*pairs, strict=True)
            torch._foreach_copy_(list(copies), list(parameters))

    def _cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        copy = parameter.detach().to(dtype).requires_grad_(parameter.requires_grad)
        self._copy[parameter] = copy
        return copy
