"""Load and tune the kernels of an update before the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from reverie.api import Batch
from reverie.nets.rng import Rng

if TYPE_CHECKING:
    from reverie.agents.dreamer.agent import Dreamer


def compute_gradients(agent: Dreamer, batch: Batch) -> None:
    """Compute the losses of a batch and their gradients, without changing the agent."""
    rng = Rng(0, "warm_up", agent.device)
    with torch.enable_grad():
        _, state, rows = agent.prepare_batch("train", batch)
        loss = agent.loss(state, rows, rng, training=False)
        total = agent.total_loss(loss.losses)
        torch.autograd.grad(total, agent.opt.leaves, allow_unused=True)
