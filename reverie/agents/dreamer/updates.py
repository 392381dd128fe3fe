"""How the losses of a batch become optimizer steps: all in one, or one after another.

An update is called with the agent, the latent states that sequences start from, a batch
and a random generator. It returns the losses, whether the step was taken (it is skipped
if a loss or gradient is not finite), and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from reverie.agents.dreamer.actor_critic import BehaviourLoss
from reverie.agents.weights import trainable_parameters
from reverie.api import Batch, Metrics, Rollout, WorldLoss
from reverie.nets.optim.group import OptimizerGroup
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map

if TYPE_CHECKING:
    from reverie.agents.dreamer.agent import Dreamer

MakeOptimizer = Callable[..., Optimizer]
"""Makes an optimizer of named parameters and the config of its rule."""


class DreamerLoss(NamedTuple):
    """Losses of one batch, named and unreduced."""

    losses: dict[str, Tensor]
    states: Any
    rollout: Rollout | None
    metrics: Metrics


class JointUpdate:
    """One optimizer for the sum of all losses."""

    def __init__(self, agent: Dreamer, make: MakeOptimizer):
        self.opt = make(trainable_parameters(agent.components()), agent.config.opt)

    def __call__(
        self, agent: Dreamer, state: Any, batch: Batch, rng: Rng
    ) -> tuple[DreamerLoss, Tensor, Metrics]:
        loss = agent.loss(state, batch, rng, training=True)
        ok, metrics = self.opt.update(agent.total_loss(loss.losses))
        agent.actor_critic.update_slow(agent.slow_updates, ok)
        agent.fast.refresh_frozen()
        return loss, ok, metrics


class SeparateUpdates:
    """Separate optimizers, as in dreamerv3-torch.

    The world model is updated first. Then actor and critic are trained in imagination
    with the updated world model, whose weights do not change there. The slow critic is
    updated before that, so it follows the critic of the preceding update.
    """

    def __init__(self, agent: Dreamer, make: MakeOptimizer):
        config, actor_critic = agent.config, agent.actor_critic
        parts = {
            "world": (dict(agent.world.named_children()), config.world_opt),
            "actor": ({"pol": actor_critic.pol}, config.actor_opt),
            "critic": ({"val": actor_critic.val}, config.critic_opt),
        }
        self.opt = OptimizerGroup(
            {
                name: make(trainable_parameters(modules), settings, ())
                for name, (modules, settings) in parts.items()
            }
        )

    def __call__(
        self, agent: Dreamer, state: Any, batch: Batch, rng: Rng
    ) -> tuple[DreamerLoss, Tensor, Metrics]:
        world = agent.world_loss(state, batch, rng, training=True)
        ok, metrics = self.opt["world"].update(agent.total_loss(world.losses))
        by_name, behaviour = {"world": metrics}, None
        if agent.config.behaviour:
            agent.actor_critic.update_slow(agent.slow_updates, ok)
            agent.fast.refresh_frozen()
            states = tree_map(lambda x: x.detach(), world.states)
            with _without_gradients(self.opt["world"].leaves):
                behaviour = agent.actor_critic.losses(
                    agent.world, states, batch, rng, True
                )
            for name, loss in (("actor", "policy"), ("critic", "value")):
                total = agent.total_loss({loss: behaviour.losses[loss]})
                # if the world model was not updated, neither are actor and critic
                total = torch.where(ok, total, torch.nan)
                taken, by_name[name] = self.opt[name].update(total)
                ok = ok & taken
        return join_losses(world, behaviour), ok, self.opt.metrics(by_name)


def join_losses(world: WorldLoss, behaviour: BehaviourLoss | None) -> DreamerLoss:
    """Return the losses of world model, actor and critic with their metrics."""
    losses, metrics = dict(world.losses), dict(world.metrics)
    if behaviour is not None:
        losses |= behaviour.losses
        metrics |= behaviour.metrics
    metrics.update({f"loss/{k}": x.mean() for k, x in losses.items()})
    metrics = {key: value.detach() for key, value in metrics.items()}
    rollout = None if behaviour is None else behaviour.rollout
    return DreamerLoss(losses, world.states, rollout, metrics)


@contextmanager
def _without_gradients(leaves: list[Tensor]) -> Iterator[None]:
    """Do not record operations for the gradients of these weights."""
    for leaf in leaves:
        leaf.requires_grad_(False)
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.requires_grad_(True)
