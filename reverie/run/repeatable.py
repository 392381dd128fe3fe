"""Updates that a signal can abort before the optimizer step (`nets/abort.py`).

An aborted update is undone, so that a resumed run repeats it with the same result: the
sampled batches are put back into the feed, and the state that the agent lists in
`state_changed_by_loss` is restored.
"""

from __future__ import annotations

from typing import Any

import torch

from reverie.api import Agent, Batch, Metrics
from reverie.capabilities import CanRepeatUpdate
from reverie.nets.abort import AbortWindow, UpdateAborted
from reverie.rows import MAX_PUT_BACK


@torch.enable_grad()
def train_or_abort(agent: Agent, feed: Any, device: torch.device) -> Metrics | None:
    """Run one update; return None if it was aborted and its changes were undone.

    Updates on a GPU are short, and are never aborted. Gradients are enabled, because an
    environment that uses PyTorch may have disabled them in this process.
    """
    if device.type != "cpu" or not isinstance(agent, CanRepeatUpdate):
        return agent.train(feed)
    tensors, generators = agent.state_changed_by_loss()
    copies = [tensor.detach().clone() for tensor in tensors]
    states = [generator.state_dict() for generator in generators]
    has_grad = torch.is_grad_enabled()
    with AbortWindow() as abort_window:
        guarded_feed = _GuardedFeed(feed, abort_window)
        try:
            return agent.train(guarded_feed)
        except UpdateAborted:
            torch.set_grad_enabled(has_grad)
    for name in reversed(guarded_feed.sampled):
        feed.put_back(name)
    for generator, state in zip(generators, states, strict=True):
        generator.load_state_dict(state)
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
    return None


class _GuardedFeed:
    """Wraps a feed so that the update cannot be aborted while a batch is sampled."""

    def __init__(self, feed: Any, abort_window: AbortWindow):
        self.feed, self.abort_window = feed, abort_window
        self.sampled: list[str] = []  # names of the sampled batches, in order

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        self.abort_window.close()
        batch: Batch = self.feed(name) if out is None else self.feed(name, out)
        self.sampled.append(name)
        if len(self.sampled) <= MAX_PUT_BACK:  # all of them can be put back
            self.abort_window.open()
        return batch
