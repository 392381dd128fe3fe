"""Run policy steps as CUDA graphs, which copy the actions to host memory.

A policy step is a few dozen small kernels. A graph launches them all at once, and a
separate high-priority stream lets it run in parallel with an update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from reverie.kernels.graphs.runner import (
    CapturedGraph,
    CudaGraphRunner,
    clone_outputs,
)
from reverie.nets.blocks import AffineLayer
from reverie.nets.tree import tree_leaves, tree_map

Module = TypeVar("Module", bound=nn.Module)

PRIORITY = -5
"""CUDA priority of policy steps: the highest, because environments wait for them."""

Act = Callable[[Any, dict[str, Any]], tuple[Any, Any, Any]]
"""Maps carry and observations to the new carry, actions and extras."""


class GraphedPolicy:
    """Runs `act` as a CUDA graph, which includes the copies from and to host memory.

    With `copies`, `act` must compute with these copies of the weights, which
    `before_update` refreshes. A step then waits for the last refresh, but not for the
    update that runs after it. Without `copies`, it waits for all updates launched so
    far.
    """

    def __init__(
        self,
        act: Act,
        device: torch.device,
        generators: Iterable[torch.Generator],
        copies: WeightCopies | None = None,
    ):
        self.act = act
        self.copies = copies
        stream = torch.cuda.Stream(device, PRIORITY)  # type: ignore[no-untyped-call]
        self.stream = stream
        self.copies_ready: Any = None  # CUDA event that is recorded after a refresh
        self._run = CudaGraphRunner(
            self._step, "policy", device, generators, priority=PRIORITY
        )
        self._pinned: dict[Any, Any] = {}  # actions and extras in host memory, by shape
        self._last: tuple[list[Tensor], CapturedGraph | None] = [], None
        """Tensors of the last returned carry, and the graph that computed them."""

    def __call__(self, carry: Any, obs: dict[str, Any]) -> tuple[Any, Any, Any]:
        if self.copies is None or self.copies_ready is None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        else:
            self.stream.wait_event(self.copies_ready)
        last, graph = self._last
        leaves = tree_leaves(carry)
        with torch.cuda.stream(self.stream):
            if graph and len(leaves) == len(last) and all(map(is_, leaves, last)):
                # the last replay already wrote this carry to the graph's inputs
                graph_carry, _ = graph.inputs
                carry, outputs = graph.replay((graph_carry, obs))
            else:
                carry, outputs = self._run(carry, obs)
                graph = self._run.find_graph(carry, obs)
            carry = clone_outputs(carry)
        self._last = tree_leaves(carry), graph
        self.stream.synchronize()
        # copy the arrays, because the next step overwrites the pinned memory
        action, extras = tree_map(lambda x: x.numpy().copy(), outputs)
        return carry, action, extras

    def _step(self, carry: Any, obs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the next carry, and actions and extras in pinned memory.

        A graph also writes the next carry to its input buffers, so that the next step
        need not copy it there.
        """
        new_carry, *outputs = self.act(carry, obs)
        key = tuple((x.shape, x.dtype) for x in tree_leaves((carry, obs)))
        if key not in self._pinned:  # in the first call, which is not captured
            self._pinned[key] = tree_map(_pinned_like, tuple(outputs))
        tree_map(_copy, self._pinned[key], tuple(outputs))
        if torch.cuda.is_current_stream_capturing():
            tree_map(_copy, carry, new_carry)
        return new_carry, self._pinned[key]

    def before_update(self) -> None:
        """Copy the weights; the caller then launches an update, which changes them."""
        if self.copies is not None:
            self.copies.refresh()
            current = torch.cuda.current_stream(self.stream.device)
            self.copies_ready = current.record_event()


def _pinned_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


class WeightCopies:
    """Copies modules, and updates the weights of the copies when `refresh` is called.

    An update runs for milliseconds on its stream; a policy step should neither wait for
    it nor read half-updated weights. The weights are copied between two updates, so
    that during an update the policy has the weights from before it.
    """

    def __init__(self) -> None:
        self._pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        """Copied weights and their sources, by dtype: `_foreach_copy_` copies many
        tensors per kernel only if they have the same dtype."""

    def copy_module(self, module: Module) -> Module:
        """Return a copy of the module that computes with its own weights.

        `refresh` copies the weights of the module to it. Tensors that the copy does not
        read, and buffers, are shared.
        """
        shared: list[Tensor] = [*module.parameters(), *module.buffers()]
        for layer in module.modules():
            if isinstance(layer, AffineLayer):
                shared += layer.low_precision or ()
        memo = {id(tensor): tensor for tensor in shared}  # not copied by deepcopy
        copied = copy.deepcopy(module, memo)
        for layer, new in zip(module.modules(), copied.modules(), strict=True):
            if isinstance(layer, AffineLayer) and isinstance(new, AffineLayer):
                # The forward pass of the copy reads only `low_precision`, which gets
                # copies of the layer's low-precision weights or, if it has none, of its
                # float32 weights. The parameters are not read and stay shared.
                weight, bias = layer.low_precision or (layer.weight, layer.bias)
                new.low_precision = (self._copy(weight), self._copy(bias))
                continue
            for name, parameter in layer.named_parameters(recurse=False):
                setattr(new, name, nn.Parameter(self._copy(parameter), False))
        return copied

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the modules to their copies."""
        for targets, sources in self._pairs.values():
            torch._foreach_copy_(targets, sources)

    def _copy(self, source: Tensor) -> Tensor:
        """Return a copy of a tensor, which `refresh` updates."""
        target = source.detach().clone()
        targets, sources = self._pairs.setdefault(source.dtype, ([], []))
        targets.append(target)
        sources.append(source.detach())
        return target
