"""Aborts an update before its optimizer step if the run is asked to stop.

On a CPU, one update of a large model takes minutes. The training loop runs an update in
an `AbortWindow`. The window is open from the time a batch is sampled until the
optimizer changes its first tensor. While it is open, `request_abort`, which a signal
handler calls, raises `UpdateAborted` in the update. The training loop then restores the
state that the forward pass has changed (such as random generators), so that the update
can be repeated with the same result.

Signal handlers run between two Python instructions of the main thread. A backward pass
executes none, unless its graph has Python hooks. `add_abort_hooks` adds them if updates
are slow.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the `reverie` command imports this file before PyTorch
    from torch import Tensor

SLOW_SECONDS = 2.0
"""If an update takes longer than this, the next backward pass gets hooks."""


class UpdateAborted(BaseException):
    """Raised in an update to abort it; not an `Exception`, so that an agent's
    `except Exception` does not catch it."""


class AbortWindow:
    """Context manager of one update, which can be aborted while the window is open."""

    current: AbortWindow | None = None
    """The window of the update that is running in the main thread."""
    last_seconds: float = SLOW_SECONDS
    """Duration of the last update; the initial value adds hooks in the first update."""

    def __init__(self) -> None:
        self.is_open = self.is_requested = self.optimizer_started = False

    def __enter__(self) -> AbortWindow:
        self.start = time.monotonic()
        AbortWindow.current = self
        return self

    def __exit__(self, *exception: Any) -> None:
        self.is_open = False
        AbortWindow.current = None
        AbortWindow.last_seconds = time.monotonic() - self.start

    def open(self) -> None:
        """Allow an abort from now on, unless the optimizer has already started."""
        self.is_open = not self.optimizer_started
        self.check()

    def close(self) -> None:
        self.is_open = False

    def check(self) -> None:
        """Raise if an abort was requested and the window is open."""
        if self.is_requested and self.is_open:
            self.is_open = False
            raise UpdateAborted

    @property
    def needs_hooks(self) -> bool:
        return self.is_open and self.last_seconds >= SLOW_SECONDS


def request_abort() -> None:
    """Abort the running update of the main thread as soon as its window is open."""
    if window := AbortWindow.current:
        window.is_requested = True
        window.check()


def close_abort_window() -> None:
    """Forbid an abort; called before an optimizer changes its first tensor."""
    if window := AbortWindow.current:
        window.is_open, window.optimizer_started = False, True


def add_abort_hooks(loss: Tensor) -> None:
    """Let signals be handled during the backward pass of a slow update.

    Adds a Python hook to every node of the autograd graph.
    """
    window = AbortWindow.current
    if window is None or not window.needs_hooks:
        return

    def check(*_: Any) -> None:
        window.check()

    nodes, seen = [loss.grad_fn], {loss.grad_fn}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        node.register_prehook(check)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                nodes.append(child)
