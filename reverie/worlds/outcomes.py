"""What worlds have in common that draw what is seen and foretell reward and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reverie.api import Batch
from reverie.nets.distributions import Output


def outcome_losses(
    drawn: Mapping[str, Output],
    reward: Output,
    goes_on: Output,
    batch: Batch,
    discount: float,
) -> dict[str, Tensor]:
    """How well rows are drawn, their reward is foretold, and whether they are the last.

    Going on is worth `discount`, so that the chance of it is also how much what comes
    later counts.
    """
    losses = {key: out.loss(batch[key]) for key, out in drawn.items()}
    losses["rew"] = reward.loss(batch["reward"])
    losses["con"] = goes_on.loss((~batch["is_terminal"]).float() * discount)
    return losses


def stack_actions(actions: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Actions of single steps as those of a sequence."""
    return {key: torch.stack([act[key] for act in actions], 1) for key in actions[0]}
