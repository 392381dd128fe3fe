"""Stops runs whose losses or gradients are not finite."""

from __future__ import annotations

import torch

from reverie.api import Agent, Metrics, UserError


class Health:
    """Raises an error after too many consecutive skipped updates.

    Agents skip an update whose loss or gradient is not finite and count consecutive
    ones (`opt/nonfinite_in_row`). On a GPU the count is read only every `CHECK_EVERY`
    updates, because reading it waits for the device.
    """

    CHECK_EVERY = 50
    MAX_NAMES = 4

    def __init__(self, limit: int):
        self.limit = limit
        self._updates = 0

    def check(self, agent: Agent, metrics: Metrics) -> None:
        in_row = metrics.get("opt/nonfinite_in_row")
        if in_row is None:
            return
        self._updates += 1
        on_gpu = isinstance(in_row, torch.Tensor) and in_row.device.type != "cpu"
        if on_gpu and self._updates % self.CHECK_EVERY:
            return
        if int(in_row) >= self.limit:
            nonfinite = agent.nonfinite() or ["the loss"]
            names = ", ".join(nonfinite[: self.MAX_NAMES])
            others = len(nonfinite) - self.MAX_NAMES
            names += f" and {others} more" if others > 0 else ""
            raise UserError(
                f"{int(in_row)} updates in a row were skipped because {names} was not "
                "finite. The last checkpoint has the weights from before.\n"
                "  Fix: check the environment for NaN or huge values "
                "(`reverie check-env`), or start a new run from that checkpoint "
                "(--run.from_checkpoint) with a lower learning rate or "
                "--precision float32."
            )
