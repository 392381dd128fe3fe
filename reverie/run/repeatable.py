"""Runs an update that can be aborted before its optimizer step (`nets/abort.py`).

If it is aborted, everything that it has changed is restored: the position of the feed,
and what the agent lists in `changed_by_losses`.
"""

from __future__ import annotations

from typing import Any

import torch

from reverie.api import Agent, Batch, Metrics
from reverie.capabilities import CanRepeatUpdate
from reverie.nets.abort import AbortWindow, UpdateAborted
from reverie.rows import MAX_PUT_BACK


def train_or_abort(agent: Agent, feed: Any, device: torch.device) -> Metrics | None:
    """Run one update; None if it was aborted and its changes were restored.

    Updates on a GPU are short, and are never aborted.
    """
    if device.type != "cpu" or not isinstance(agent, CanRepeatUpdate):
        return agent.train(feed)
    tensors, generators = agent.changed_by_losses()
    copies = [tensor.detach().clone() for tensor in tensors]
    states = [generator.state_dict() for generator in generators]
    has_grad = torch.is_grad_enabled()
    with AbortWindow() as window:
        window_feed = _WindowFeed(feed, window)
        try:
            return agent.train(window_feed)
        except UpdateAborted:
            torch.set_grad_enabled(has_grad)
    for name in reversed(window_feed.sampled):
        feed.put_back(name)
    for generator, state in zip(generators, states, strict=True):
        generator.load_state_dict(state)
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
    return None


class _WindowFeed:
    """A feed during whose sampling the update cannot be aborted."""

    def __init__(self, feed: Any, window: AbortWindow):
        self.feed, self.window = feed, window
        self.sampled: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        self.window.close()
        batch: Batch = self.feed(name) if out is None else self.feed(name, out)
        self.sampled.append(name)
        if len(self.sampled) <= MAX_PUT_BACK:
            self.window.open()
        return batch
