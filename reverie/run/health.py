"""Notice a run that has stopped making sense."""

from __future__ import annotations

import torch

from reverie.api import Agent, Metrics, UserError


class Health:
    """Stops the run when too many updates in a row had to be skipped.

    Agents skip an update whose loss or gradient is not finite and count how many came
    in a row (`opt/nonfinite_in_row`). On a GPU the count is read now and then only, so
    that no update waits for the one before it.
    """

    LOOK_EVERY = 50
    NAMED = 4

    def __init__(self, limit: int):
        self.limit = limit
        self._seen = 0

    def check(self, agent: Agent, metrics: Metrics) -> None:
        in_row = metrics.get("opt/nonfinite_in_row")
        if in_row is None:
            return
        self._seen += 1
        far = isinstance(in_row, torch.Tensor) and in_row.device.type != "cpu"
        if far and self._seen % self.LOOK_EVERY:
            return
        if int(in_row) >= self.limit:
            found = agent.nonfinite() or ["the loss"]
            names = ", ".join(found[: self.NAMED])
            more = len(found) - self.NAMED
            names += f" and {more} more" if more > 0 else ""
            raise UserError(
                f"{int(in_row)} updates in a row were skipped because {names} was not "
                "finite; the last checkpoint holds the weights from before.\n"
                "  Fix: look for NaN or huge values in the environment "
                "(`reverie check-env`), or begin another run from that checkpoint "
                "(--run.from_checkpoint) with a lower learning rate or "
                "--precision float32."
            )
