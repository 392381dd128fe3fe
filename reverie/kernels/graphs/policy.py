"""A policy step as a CUDA graph, with actions returned in host memory.

A policy step is a few dozen small kernels. As a graph on its own high-priority stream,
it neither launches them one by one nor waits for an update that is still running.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from reverie.kernels.graphs.runner import CudaGraphRunner, clone_outputs
from reverie.nets.blocks import AffineLayer
from reverie.nets.tree import tree_map

Module = TypeVar("Module", bound=nn.Module)

Act = Callable[[Any, dict[str, Any]], tuple[Any, Any, Any]]
"""Maps carry and observations to the new carry, actions and extras."""


class GraphedPolicy:
    """Runs `act` as a CUDA graph.

    With `copies`, whose weights `act` must use, a step waits only for the update before
    the last one; otherwise for all updates launched so far.
    """

    def __init__(
        self,
        act: Act,
        device: torch.device,
        generators: Iterable[torch.Generator],
        copies: WeightCopies | None = None,
    ):
        self.act = CudaGraphRunner(act, "policy", device, generators)
        self.copies = copies
        stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.stream = stream
        self.copied: Any = None  # the event after which the copies are complete

    def __call__(self, carry: Any, obs: dict[str, Any]) -> tuple[Any, Any, Any]:
        if self.copies is None or self.copied is None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        else:
            self.stream.wait_event(self.copied)
        with torch.cuda.stream(self.stream):
            carry, action, extras = self.act(carry, obs)
            carry = clone_outputs(carry)
            outputs = tree_map(
                lambda x: x.to("cpu", non_blocking=True), (action, extras)
            )
        self.stream.synchronize()
        action, extras = tree_map(lambda x: x.numpy(), outputs)
        return carry, action, extras

    def before_update(self) -> None:
        """Copy the weights that the next update will change."""
        if self.copies is not None:
            self.copies.refresh()
            self.copied = torch.cuda.current_stream(self.stream.device).record_event()


class WeightCopies:
    """Copies of modules that compute with a second set of weights.

    An update runs for milliseconds on its stream; a policy step should neither wait for
    it nor read half-updated weights. The weights are copied between two updates, so
    that the policy is exactly one update behind.
    """

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
