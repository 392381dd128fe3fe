"""Updates of Dreamer: one optimizer for all losses of a batch, or separate optimizers.

An update is called with the agent, the initial latent states of the sequences, a batch
and a random generator. It returns the losses, `stepped`, and metrics. `stepped` is a
bool tensor: False if the optimizer step was skipped because a loss or gradient is not
finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from reverie.agents.dreamer.actor_critic import ActorCritic, BehaviourLoss, RewardFn
from reverie.agents.dreamer.slow_weights import SLOW_WEIGHTS
from reverie.agents.weights import trainable_parameters
from reverie.api import Batch, Metrics, Rollout, State, WorldLoss
from reverie.nets.optim.group import OptimizerGroup
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.rng import Rng
from reverie.nets.streams import on_stream
from reverie.nets.tree import tree_map

if TYPE_CHECKING:
    from reverie.agents.dreamer.agent import Dreamer

MakeOptimizer = Callable[..., Optimizer]
"""Builds an optimizer from named parameters, an optimizer config, and optionally the
names of the parameters with weight decay (`decayed`)."""


class DreamerLoss(NamedTuple):
    """Losses of one batch, named and unreduced."""

    losses: dict[str, Tensor]
    states: Any
    rollout: Rollout | None
    metrics: Metrics


class JointUpdate:
    """One optimizer for the sum of all losses.

    Moving averages of weights, such as the slow critic, are updated on a side stream.
    Call `wait_for(..., SLOW_WEIGHTS)` before using them.
    """

    frozen_params: Sequence[Tensor] = ()
    """Weights of the world model that must not get gradients of the actor-critic. None
    are listed here, because this update imagines without gradients."""

    def __init__(self, agent: Dreamer, make_optimizer: MakeOptimizer):
        parameters = trainable_parameters(agent.task_components())
        self.opt = make_optimizer(parameters, agent.config.opt)

    def __call__(
        self, agent: Dreamer, state: Any, batch: Batch, rng: Rng
    ) -> tuple[DreamerLoss, Tensor, Metrics]:
        loss = agent.loss(state, batch, rng, training=True)
        stepped, metrics = self.opt.update(agent.total_loss(loss.losses))
        metrics |= agent.update_harmony(loss.losses, stepped)
        with on_stream(stepped, SLOW_WEIGHTS):
            agent.actor_critic.update_slow(agent.updates_taken, stepped)
            if agent.config.representation != "decoder":
                agent.world.update_slow(stepped)
            agent.accelerator.refresh_slow_copies()
        return loss, stepped, metrics


class SeparateUpdates:
    """Separate optimizers, as in dreamerv3-torch.

    The world model is updated first, then the slow critic from the critic of the
    preceding update, then actor and critic, in imagination with the updated world
    model. Losses of actor and critic do not change the world model.
    """

    def __init__(self, agent: Dreamer, make_optimizer: MakeOptimizer):
        config, actor_critic = agent.config, agent.actor_critic
        world = dict(agent.world.named_children())
        networks = {
            "world": (world, config.world_opt),
            "actor": ({"pol": actor_critic.pol}, config.actor_opt),
            "critic": ({"val": actor_critic.val}, config.critic_opt),
        }
        # a detached decoder has its own optimizer, which clips its gradients separately
        if agent.config.has_detached_decoder:
            networks["decoder"] = {"dec": world.pop("dec")}, config.world_opt
        self.opt = OptimizerGroup(
            {
                name: make_optimizer(
                    trainable_parameters(modules), opt_config, decayed=()
                )
                for name, (modules, opt_config) in networks.items()
            }
        )

    @property
    def frozen_params(self) -> Sequence[Tensor]:
        return self.opt["world"].leaves

    def __call__(
        self, agent: Dreamer, state: Any, batch: Batch, rng: Rng
    ) -> tuple[DreamerLoss, Tensor, Metrics]:
        world = agent.world_loss(state, batch, rng, training=True)
        detached = agent.detached_decoder_losses
        decoder_losses = {k: x for k, x in world.losses.items() if k in detached}
        world_losses = {k: x for k, x in world.losses.items() if k not in detached}
        stepped, metrics = self.opt["world"].update(agent.total_loss(world_losses))
        by_optimizer = {"world": metrics}
        if decoder_losses:
            # a NaN loss makes the optimizer skip its step
            total = torch.where(stepped, agent.total_loss(decoder_losses), torch.nan)
            by_optimizer["decoder"] = self.opt["decoder"].update(total)[1]
        harmony_metrics = agent.update_harmony(world.losses, stepped)
        if agent.config.representation != "decoder":
            agent.world.update_slow(stepped)
            agent.accelerator.refresh_slow_copies()
        behaviour = None
        if agent.config.behaviour:
            states = tree_map(lambda x: x.detach(), world.states)
            behaviour, stepped, actor_critic_metrics = update_actor_critic(
                agent,
                agent.actor_critic,
                self.opt,
                self.frozen_params,
                states,
                batch,
                rng,
                stepped,
            )
            by_optimizer |= actor_critic_metrics
        metrics = {**self.opt.metrics(by_optimizer), **harmony_metrics}
        return join_losses(world, behaviour), stepped, metrics


def update_actor_critic(
    agent: Dreamer,
    actor_critic: ActorCritic,
    opts: OptimizerGroup,
    frozen: Iterable[Tensor],
    states: State,
    batch: Batch,
    rng: Rng,
    stepped: Tensor,
    reward_fn: RewardFn | None = None,
) -> tuple[BehaviourLoss, Tensor, Mapping[str, Metrics]]:
    """Update the slow critic, then actor and critic in imagination.

    `opts` has the optimizers `actor` and `critic`. The weights `frozen` get no
    gradients. If `stepped` is False, because an update before this one was skipped,
    this one is skipped, too. Returns the losses, whether all optimizers took their
    step, and the metrics by optimizer.
    """
    actor_critic.update_slow(agent.updates_taken, stepped)
    agent.accelerator.refresh_slow_copies()
    with _without_gradients(list(frozen)):
        loss = actor_critic.losses(agent.world, states, batch, rng, True, reward_fn)
    by_optimizer: dict[str, Metrics] = {}
    for name, keys in (("actor", ("policy",)), ("critic", ("value", "repval"))):
        losses = {key: loss.losses[key] for key in keys if key in loss.losses}
        total = agent.total_loss(losses)
        total = torch.where(stepped, total, torch.nan)  # a NaN loss skips the step
        took_step, by_optimizer[name] = opts[name].update(total)
        stepped = stepped & took_step
    return loss, stepped, by_optimizer


def join_losses(world: WorldLoss, behaviour: BehaviourLoss | None) -> DreamerLoss:
    """Merge the losses and metrics of the world model and of actor and critic."""
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
    """Context in which `requires_grad` of these weights is False."""
    for leaf in leaves:
        leaf.requires_grad_(False)
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.requires_grad_(True)
