"""A policy step as a CUDA graph, with actions returned in host memory.

A policy step is a few dozen small kernels. As a graph on its own high-priority stream,
it neither launches them one by one nor waits for an update that is still running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from reverie.kernels.graphs.runner import CudaGraphRunner, clone_outputs
from reverie.kernels.graphs.weight_copies import WeightCopies
from reverie.nets.tree import tree_map

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
