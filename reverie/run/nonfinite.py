"""Stops runs whose losses or gradients are not finite."""

from __future__ import annotations

import torch

from reverie.api import Agent, Metrics, UserError
from reverie.run.checkpoint import Checkpoints


class NonfiniteCheck:
    """Raises an error after too many consecutive skipped updates.

    Agents skip an update whose loss or gradient is not finite, and count consecutive
    skipped updates (metric `opt/consecutive_skips`). On a GPU the count is read only
    every `CHECK_EVERY` updates, because reading it waits for the device.
    """

    CHECK_EVERY = 50
    MAX_NAMES = 4
    """Maximum number of losses and gradients that the error message names."""

    def __init__(self, limit: int, checkpoints: Checkpoints):
        self.limit = limit
        self.checkpoints = checkpoints
        self._updates = 0

    def check(self, agent: Agent, metrics: Metrics) -> None:
        """Check the metrics of an update."""
        skips = metrics.get("opt/consecutive_skips")
        if skips is None:
            return
        self._updates += 1
        on_gpu = isinstance(skips, torch.Tensor) and skips.device.type != "cpu"
        if on_gpu and self._updates % self.CHECK_EVERY:
            return
        if int(skips) >= self.limit:
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
