"""Stops runs whose losses or gradients are not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reverie.api import Agent, Metrics, UserError
from reverie.run.checkpoint import Checkpoints


class NonfiniteCheck:
    """Raises an error after too many consecutive skipped updates.

    Agents skip an update whose loss or gradient is not finite, and count consecutive
    skipped updates (metric `opt/consecutive_skips`). On other devices than a CPU, the
    count is read only every `CHECK_EVERY` updates. Reading it would wait for the GPU,
    so it is copied to host memory, and checked in a later update.
    """

    CHECK_EVERY = 50
    MAX_NAMES = 4
    """Maximum number of losses and gradients that the error message names."""

    def __init__(self, limit: int, checkpoints: Checkpoints):
        self.limit = limit
        self.checkpoints = checkpoints
        self._updates = 0
        self._copy: tuple[Tensor, Any] | None = None
        """Count that is being copied from a GPU, and the CUDA event after the copy."""

    def check(self, agent: Agent, metrics: Metrics) -> None:
        """Check the metrics of an update."""
        skips = metrics.get("opt/consecutive_skips")
        if skips is None:
            return
        self._updates += 1
        if isinstance(skips, Tensor) and skips.device.type != "cpu":
            skips = self._read(skips)
        if skips is not None and int(skips) >= self.limit:
            nonfinite = agent.nonfinite() or ["the loss"]
            names = ", ".join(nonfinite[: self.MAX_NAMES])
            others = len(nonfinite) - self.MAX_NAMES
            names += f" and {others} more" if others > 0 else ""
            state, fix = restart_advice(self.checkpoints)
            raise UserError(
                f"{int(skips)} updates in a row were skipped because {names} was not "
                "finite; `reverie check-env` finds NaN and huge values in an "
                f"environment. {state}\n  Fix: {fix}"
            )

    def _read(self, skips: Tensor) -> Tensor | None:
        """Start to read the count every `CHECK_EVERY` updates; return it in a later
        call, when it has been copied. Otherwise, return None."""
        if self._copy is not None:
            count, copied = self._copy
            if not copied.query():
                return None
            self._copy = None
            return count
        if self._updates % self.CHECK_EVERY:
            return None
        if skips.device.type != "cuda":
            return skips  # the caller waits for the device
        self._copy = copy_to_host(skips)
        return None


def copy_to_host(value: Tensor) -> tuple[Tensor, Any]:
    """Start to copy a tensor from a GPU; return the copy, and the event after it."""
    copy = torch.empty_like(value, device="cpu", pin_memory=True)
    copy.copy_(value, non_blocking=True)
    return copy, torch.cuda.current_stream(value.device).record_event()


def restart_advice(checkpoints: Checkpoints) -> tuple[str, str]:
    """Return a sentence about the last checkpoint, and how to restart from it."""
    changes = "a lower learning rate or --precision float32"
    if not checkpoints.paths():
        fix = f"start it in a new --logdir with {changes}."
        return "The run has no checkpoint yet.", fix
    newest = checkpoints.paths()[-1]
    return (
        f"The last checkpoint ({newest.name}) was saved before this error.",
        f"start a new run from it with {changes}: --logdir NEW "
        f"--run.from_checkpoint {newest}",
    )
