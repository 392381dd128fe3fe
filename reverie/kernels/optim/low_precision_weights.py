"""Low-precision copies of the weights, which layers compute with.

Parameters are float32. Without copies, every layer casts its weights in every call; in
a loop of 64 time steps, the casts are most of the kernel launches. With copies, the
loss is differentiated with respect to the copies, and the optimizer updates parameters
and copies together. Norms compute in float32 and have no copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from reverie.nets.blocks import AffineLayer


class LowPrecisionWeights:
    """Sets `low_precision` of every dense layer and convolution of some modules.

    After a change of parameters by anything but the optimizer, call `refresh`.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype):
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._copies: dict[Tensor, Tensor] = {}
        for module in modules:
            for layer in module.modules():
                if isinstance(layer, AffineLayer) and dtype != layer.weight.dtype:
                    layer.low_precision = (
                        self._copy(layer.weight, dtype),
                        self._copy(layer.bias, dtype),
                    )

    def leaf(self, parameter: Tensor) -> Tensor:
        """Return the tensor that gets the gradient: the copy, or the parameter."""
        return self._copies.get(parameter, parameter)

    @torch.no_grad()
    def refresh(self, frozen: bool = False) -> None:
        """Copy all parameters, or with `frozen` only those without gradients."""
        pairs = [(p, c) for p, c in self.pairs if not (frozen and p.requires_grad)]
        if pairs:
            parameters, copies = zip(*pairs, strict=True)
            torch._foreach_copy_(list(copies), list(parameters))

    def _copy(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        copy = parameter.detach().to(dtype).requires_grad_(parameter.requires_grad)
        self._copies[parameter] = copy
        self.pairs.append((parameter, copy))
        return copy
