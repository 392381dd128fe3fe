"""Load the kernels of an update before the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from reverie.api import Batch
from reverie.nets.rng import Rng

if TYPE_CHECKING:
    from reverie.agents.dreamer.agent import Dreamer


def compute_gradients(agent: Dreamer, batch: Batch) -> None:
    """Compute the losses of a batch and their gradients, without changing the agent.

    Kernels of the optimizer and of an exploration policy are not run. Does nothing if
    the world model has running statistics, because policy steps, which run at the same
    time in another thread, use them.
    """
    weights = {name for name, _ in agent.world.named_parameters()}
    if agent.world.state_dict().keys() - weights:
        return
    changed, _ = agent.state_changed_by_loss()  # of the normalizers
    before = [buffer.clone() for buffer in changed]
    rng = Rng(0, "warm_up", agent.device)
    try:
        with torch.enable_grad():
            _, state, rows = agent.prepare_batch("train", batch)
            # in training mode, so that modules need not switch modes
            loss = agent.loss(state, rows, rng, training=True)
            total = agent.total_loss(loss.losses)
            torch.autograd.grad(total, agent.opt.leaves, allow_unused=True)
    finally:
        for buffer, old in zip(changed, before, strict=True):
            buffer.copy_(old)
