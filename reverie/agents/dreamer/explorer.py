"""Plan2Explore for Dreamer: ensemble, exploration actor-critic and their update.

An ensemble of MLPs predicts a part of the next latent state from the features of the
current one. Its disagreement is the reward of a second actor-critic, with its own
weights, slow critic and normalizer of returns, which is trained in imagination only.
World model and task policy are trained as without exploration.

A training sequence may contain several episodes. As in dreamerv3-torch, the ensemble is
also trained to predict the first state of an episode from the last state before it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.agents.dreamer.actor_critic import ActorCritic, BehaviourLoss, RewardFn
from reverie.agents.dreamer.config import DreamerConfig
from reverie.agents.dreamer.updates import MakeOptimizer, update_actor_critic
from reverie.agents.explore import (
    ENSEMBLE,
    EXPLORE_PREFIX,
    MIN_DISAGREEMENT,
    ExploreConfig,
    disagreement,
)
from reverie.agents.weights import trainable_parameters
from reverie.api import Batch, Metrics, State, UserError
from reverie.capabilities import HasEnsembleTargets
from reverie.distributed.collective import mean_contribution
from reverie.nets.blocks import initialize
from reverie.nets.ensemble import Ensemble
from reverie.nets.inputs import Concat
from reverie.nets.optim.group import REDUCTIONS, OptimizerGroup
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.spaces import Spaces

if TYPE_CHECKING:
    from reverie.agents.dreamer.agent import Dreamer


class Explorer(nn.Module):
    """The ensemble and the exploration actor-critic."""

    def __init__(
        self,
        world: Any,
        act_space: Spaces,
        config: DreamerConfig,
        settings: ExploreConfig,
        make_actor_critic: type[ActorCritic],
    ):
        super().__init__()
        self.settings = settings
        feat_size = world.width
        if not isinstance(world, HasEnsembleTargets):
            raise UserError(
                f"Plan2Explore does not support the world {config.world!r}, which does "
                "not define `target`.\n  Fix: --dreamer.world rssm"
            )
        if min(config.batch_length, config.report_length) <= settings.offset:
            raise UserError(
                f"explore.offset is {settings.offset}, but sequences have only "
                f"{min(config.batch_length, config.report_length)} steps.\n"
                "  Fix: --explore.offset 1"
            )
        self.concat_actions = Concat(act_space)
        inputs = feat_size + settings.action_conditioned * self.concat_actions.width
        ensemble = settings.ensemble
        self.ensemble = Ensemble(
            inputs,
            world.target_width(settings.target),
            ensemble.models,
            ensemble.layers,
            ensemble.units,
            ensemble.act,
        )
        # trained on imagined returns only, without gradients into the world model
        config = replace(
            config, repval_loss=False, ac_grads=False, retnorm=settings.retnorm
        )
        self.actor_critic = make_actor_critic(feat_size, act_space, config)

    def initialize_weights(self, generator: torch.Generator) -> None:
        """Initialize all networks; the slow critic gets the weights of the critic."""
        for module in (self.ensemble, self.actor_critic.pol, self.actor_critic.val):
            initialize(module, generator)
        self.actor_critic.slowval.load_state_dict(self.actor_critic.val.state_dict())

    def components(self) -> dict[str, nn.Module]:
        """Return all modules with weights or running statistics, by name."""
        children = self.actor_critic.named_children()
        return {ENSEMBLE: self.ensemble} | {EXPLORE_PREFIX + k: m for k, m in children}

    def predict(self, inputs: Float[Tensor, "*b I"]) -> Float[Tensor, "M *b O"]:
        """Return the target of size `O` that each of `M` members predicts."""
        outputs: Tensor = self.ensemble(inputs)
        is_tanh = self.settings.ensemble.output == "tanh"
        return torch.tanh(outputs) if is_tanh else outputs

    @torch.no_grad()
    def embed_target(self, world: Any, batch: Batch) -> Tensor | None:
        """Return the embeddings, if the ensemble predicts them; otherwise None.

        Call this before the world model is updated, so that the embeddings and the
        posterior states come from the same weights.
        """
        if self.settings.target != "embed":
            return None
        embed: Tensor = world.target("embed", None, batch)
        return embed

    def ensemble_loss(
        self, world: Any, states: State, batch: Batch, embed: Tensor | None = None
    ) -> Float[Tensor, "B _"]:
        """Return the negative log-likelihood of the targets, as a mean over members.

        The shape is (B, T - offset): the last steps of a sequence have no target.
        `embed` is the result of `embed_target` before an update.
        """
        settings, offset = self.settings, self.settings.offset
        with torch.no_grad():
            feat = world.features(states)
            target = embed
            if target is None:
                target = world.target(settings.target, states, batch)
            target = target[:, offset:].float()
            feat = feat[:, : feat.shape[1] - offset]
            # prevact[t + 1] is the action that was taken at step t
            prevact = batch["prevact"].items()
            actions = {k: x[:, 1:][:, : feat.shape[1]] for k, x in prevact}
            inputs = self._inputs(feat, actions)
        std = settings.ensemble.std
        errors: Tensor = (self.predict(inputs) - target) / std
        constant = math.log(std) + 0.5 * math.log(2 * math.pi)
        return 0.5 * errors.square().sum(-1).mean(0) + constant * errors.shape[-1]

    def intrinsic_reward(
        self, feat: Float[Tensor, "N H1 F"], actions: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "N H1"], Float[Tensor, "N H1"]]:
        """Return the intrinsic reward on entering each state, and the disagreement.

        `N` imagined trajectories have `H1` = horizon + 1 states each, with `F`
        features. The reward is the disagreement in the state. If the ensemble is
        conditioned on actions, it is the disagreement for the previous state and its
        action.
        """
        spread = disagreement(self.predict(self._inputs(feat, actions)))
        reward = spread
        if self.settings.log:
            reward = torch.log(spread.clamp(min=MIN_DISAGREEMENT))
        if self.settings.action_conditioned:
            first = torch.zeros_like(reward[:, :1])  # not used by the returns
            reward = torch.cat([first, reward[:, :-1]], 1)
        return reward, spread

    def reward_fn(self, world: Any, metrics: Metrics) -> RewardFn:
        """Return the function that computes rewards and continue probabilities.

        When called, the function also writes the mean intrinsic reward and the mean
        disagreement into `metrics`.
        """
        settings = self.settings

        def reward_and_cont(
            feat: Tensor, actions: dict[str, Tensor]
        ) -> tuple[Tensor, Tensor]:
            extrinsic, cont = world.reward_and_cont(feat)
            intrinsic, spread = self.intrinsic_reward(feat, actions)
            metrics["intrinsic_reward"] = intrinsic[:, 1:].mean().detach()
            metrics["disagreement"] = spread.mean().detach()
            return settings.combine_rewards(intrinsic, extrinsic), cont

        return reward_and_cont

    @torch.no_grad()
    def report(self, world: Any, states: State, batch: Batch, rng: Rng) -> Metrics:
        """Return the metrics of a batch without training."""
        metrics: Metrics = {}
        ensemble = self.ensemble_loss(world, states, batch)
        behaviour = self.actor_critic.losses(
            world, states, batch, rng, False, self.reward_fn(world, metrics)
        )
        return explore_metrics(ensemble, behaviour, metrics)

    def _inputs(self, feat: Tensor, actions: dict[str, Tensor]) -> Tensor:
        """Return the inputs of the ensemble: features and, if it uses them, actions."""
        if not self.settings.action_conditioned:
            return feat
        return torch.cat([feat, self.concat_actions(actions, feat.dtype)], -1)


class ExplorerUpdate:
    """Trains ensemble, actor and critic of an explorer after each update of the agent.

    Each has its own optimizer, with the settings of the agent's optimizer: the joint
    one, or those of the world model (for the ensemble), the actor and the critic.
    """

    def __init__(
        self, agent: Dreamer, explorer: Explorer, make_optimizer: MakeOptimizer
    ):
        config, self.explorer = agent.config, explorer
        opt_configs: tuple[Any, ...] = (config.opt,) * 3
        if config.optimizers == "separate":
            opt_configs = (config.world_opt, config.actor_opt, config.critic_opt)
        modules = explorer.components()
        names = (ENSEMBLE, f"{EXPLORE_PREFIX}pol", f"{EXPLORE_PREFIX}val")
        self.opt = OptimizerGroup(
            {
                key: make_optimizer(
                    trainable_parameters({name: modules[name]}), opt_config
                )
                for key, name, opt_config in zip(
                    ("ensemble", "actor", "critic"), names, opt_configs, strict=True
                )
            }
        )

    def __call__(
        self,
        agent: Dreamer,
        states: State,
        batch: Batch,
        rng: Rng,
        agent_stepped: Tensor,
        embed: Tensor | None = None,
    ) -> Metrics:
        """Run one update of ensemble, actor and critic.

        `agent_stepped` is False if the optimizer of the agent has skipped its step
        because of non-finite gradients; this update is then skipped, too. `embed` is
        the result of `embed_target` before the update of the agent.
        """
        explorer, world = self.explorer, agent.world
        actor_critic = explorer.actor_critic
        states = tree_map(lambda x: x.detach(), states)
        running_stats = actor_critic.normalizer_buffers()
        old_stats = [buffer.clone() for buffer in running_stats]
        loss = explorer.ensemble_loss(world, states, batch, embed)
        # a NaN loss makes the optimizer skip its step, so no host sync is needed
        total = torch.where(agent_stepped, mean_contribution(loss), torch.nan)
        ensemble_stepped, ensemble_metrics = self.opt["ensemble"].update(total)
        metrics: Metrics = {}
        behaviour, all_stepped, by_optimizer = update_actor_critic(
            agent,
            actor_critic,
            self.opt,
            # frozen: no gradients of the actor-critic for world model and ensemble
            [*agent.update_step.frozen_params, *self.opt["ensemble"].leaves],
            states,
            batch,
            rng,
            agent_stepped & ensemble_stepped,
            explorer.reward_fn(world, metrics),
        )
        for buffer, old in zip(running_stats, old_stats, strict=True):
            buffer.copy_(torch.where(all_stepped, buffer, old))
        opt_metrics = self.opt.metrics({"ensemble": ensemble_metrics, **by_optimizer})
        # metrics in `REDUCTIONS` keep their name; `join_metrics` combines them
        prefix = f"opt/{EXPLORE_PREFIX}"
        renamed = {
            key if key in REDUCTIONS else key.replace("opt/", prefix, 1): value
            for key, value in opt_metrics.items()
        }
        return {**explore_metrics(loss, behaviour, metrics), **renamed}


def explore_metrics(
    ensemble_loss: Tensor, behaviour: BehaviourLoss, rewards: Metrics
) -> Metrics:
    """Return losses and other metrics of an explorer by their names in the log."""
    losses = {"ensemble": ensemble_loss, **behaviour.losses}
    named = {f"explore/{k}": x for k, x in {**behaviour.metrics, **rewards}.items()}
    named |= {f"loss/{EXPLORE_PREFIX}{k}": x.mean() for k, x in losses.items()}
    return {key: value.detach() for key, value in named.items()}


def join_metrics(metrics: Metrics, explore: Metrics) -> Metrics:
    """Combine the metrics of the agent's and the explorer's update."""
    totals = {
        key: reduce(torch.stack([metrics[key], explore[key]]))
        for key, reduce in REDUCTIONS.items()
        if key in explore
    }
    return {**metrics, **explore, **totals}
