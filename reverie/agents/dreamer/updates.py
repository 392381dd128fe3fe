"""How the losses of a batch become optimizer steps: all in one, or one after another.

An update is called with the agent, the latent states that sequences start from, a batch
and a random generator. It returns the losses, whether the step was taken (it is skipped
if a loss or gradient is not finite), and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from reverie.agents.dreamer.actor_critic import ActorCritic, BehaviourLoss, RewardFn
from reverie.agents.weights import trainable_parameters
from reverie.api import Batch, Metrics, Rollout, State, WorldLoss
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

    frozen_params: Sequence[Tensor] = ()
    """Weights of the world model that must not get gradients of the actor-critic; none,
    because imagination has no gradients."""

    def __init__(self, agent: Dreamer, make: MakeOptimizer):
        self.opt = make(trainable_parameters(agent.task_components()), agent.config.opt)

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

    @property
    def frozen_params(self) -> Sequence[Tensor]:
        return self.opt["world"].leaves

    def __call__(
        self, agent: Dreamer, state: Any, batch: Batch, rng: Rng
    ) -> tuple[DreamerLoss, Tensor, Metrics]:
        world = agent.world_loss(state, batch, rng, training=True)
        ok, metrics = self.opt["world"].update(agent.total_loss(world.losses))
        by_name, behaviour = {"world": metrics}, None
        if agent.config.behaviour:
            states = tree_map(lambda x: x.detach(), world.states)
            behaviour, ok, metrics_by_name = update_actor_critic(
                agent,
                agent.actor_critic,
                self.opt,
                self.frozen_params,
                states,
                batch,
                rng,
                ok,
            )
            by_name |= metrics_by_name
        return join_losses(world, behaviour), ok, self.opt.metrics(by_name)


def update_actor_critic(
    agent: Dreamer,
    actor_critic: ActorCritic,
    opts: OptimizerGroup,
    frozen: Iterable[Tensor],
    states: State,
    batch: Batch,
    rng: Rng,
    ok: Tensor,
    reward_fn: RewardFn | None = None,
) -> tuple[BehaviourLoss, Tensor, Mapping[str, Metrics]]:
    """Update the slow critic, then actor and critic in imagination.

    `opts` has an optimizer `actor` and one `critic`. The weights `frozen` get no
    gradients. Nothing is updated if `ok` is False: if the world model was not updated,
    neither are actor and critic. Returns the losses, whether all steps were taken, and
    the metrics of both optimizers.
    """
    actor_critic.update_slow(agent.slow_updates, ok)
    agent.fast.refresh_frozen()
    with _without_gradients(list(frozen)):
        loss = actor_critic.losses(agent.world, states, batch, rng, True, reward_fn)
    by_name: dict[str, Metrics] = {}
    for name, keys in (("actor", ("policy",)), ("critic", ("value", "repval"))):
        losses = {key: loss.losses[key] for key in keys if key in loss.losses}
        total = agent.total_loss(losses)
        taken, by_name[name] = opts[name].update(torch.where(ok, total, torch.nan))
        ok = ok & taken
    return loss, ok, by_name


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
