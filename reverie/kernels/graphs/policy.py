"""From what was seen to what is done about it, host memory to host carry.

Acting is a few dozen small kernels. On a GPU they are recorded as one graph and run on
a stream of their own, so that a call neither launches them one by one nor waits for an
update that is still running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from reverie.kernels.graphs.graph import Replayed, fresh
from reverie.kernels.graphs.snapshot import Snapshot
from reverie.nets.tree import map1

Act = Callable[[Any, dict[str, Any]], tuple[Any, Any, Any]]
"""Carry and observations to carry, actions and extras."""


class Acting:
    """Wraps an agent's way to act.

    With a `snapshot` whose weights it acts with, it only waits for the update before
    the last one; otherwise for every update that was begun.
    """

    def __init__(
        self,
        act: Act,
        device: torch.device,
        generators: Iterable[torch.Generator],
        snapshot: Snapshot | None = None,
    ):
        self.act = Replayed(act, "policy", device, generators)
        self.snapshot = snapshot
        urgent = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.stream = urgent
        self.taken: Any = None  # the event after which the snapshot is whole

    def __call__(self, carry: Any, seen: dict[str, Any]) -> tuple[Any, Any, Any]:
        if self.snapshot is None or self.taken is None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        else:
            self.stream.wait_event(self.taken)
        with torch.cuda.stream(self.stream):
            carry, action, extras = self.act(carry, seen)
            carry = fresh(carry)
            answer = map1(lambda x: x.to("cpu", non_blocking=True), (action, extras))
        self.stream.synchronize()
        action, extras = map1(lambda x: x.numpy(), answer)
        return carry, action, extras

    def before_update(self) -> None:
        """Say that the weights are about to change."""
        if self.snapshot is not None:
            self.snapshot.refresh()
            self.taken = torch.cuda.current_stream(self.stream.device).record_event()
