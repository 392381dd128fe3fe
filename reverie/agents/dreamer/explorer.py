"""Plan2Explore for Dreamer: ensemble, exploration actor-critic and their update.

An ensemble of MLPs predicts a part of the next latent state from the features of the
current one. Its disagreement rewards an actor-critic of the same kind as that of the
task, with its own weights, slow critic and normalizer of returns, which is trained in
imagination only. World model and task policy are trained as without exploration.

A training sequence may contain the end of an episode. The ensemble is also trained to
predict the first state of the next episode from the last one, as in dreamerv3-torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.agents.dreamer.actor_critic import ActorCritic, BehaviourLoss, Outcome
from reverie.agents.dreamer.config import DreamerConfig
from reverie.agents.dreamer.updates import MakeOptimizer, update_actor_critic
from reverie.agents.explore import (
    ENSEMBLE,
    MIN_DISAGREEMENT,
    PREFIX,
    ExploreConfig,
    disagreement,
)
from reverie.agents.weights import trainable_parameters
from reverie.api import Batch, Metrics, State, UserError
from reverie.capabilities import HasEnsembleTargets
from reverie.nets.blocks import initialize
from reverie.nets.ensemble import Ensemble
from reverie.nets.inputs import Concat
from reverie.nets.optim.group import TOTALS, OptimizerGroup
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
        features = world.width
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
        self.actions = Concat(act_space)
        inputs = features + settings.action_conditioned * self.actions.width
        sizes = settings.ensemble
        self.ensemble = Ensemble(
            inputs,
            world.target_width(settings.target),
            sizes.models,
            sizes.layers,
            sizes.units,
            sizes.act,
        )
        # trained on imagined returns only, without gradients into the world model
        config = replace(
            config, repval_loss=False, ac_grads=False, retnorm=settings.retnorm
        )
        self.actor_critic = make_actor_critic(features, act_space, config)

    def initialize_weights(self, generator: torch.Generator) -> None:
        for module in (self.ensemble, self.actor_critic.pol, self.actor_critic.val):
            initialize(module, generator)
        self.actor_critic.slowval.load_state_dict(self.actor_critic.val.state_dict())

    def components(self) -> dict[str, nn.Module]:
        """Return all modules with weights or running statistics, by name."""
        children = self.actor_critic.named_children()
        return {ENSEMBLE: self.ensemble} | {PREFIX + k: m for k, m in children}

    def predict(self, inputs: Float[Tensor, "*b I"]) -> Float[Tensor, "M *b O"]:
        """Return the target that each member predicts."""
        outputs: Tensor = self.ensemble(inputs)
        is_tanh = self.settings.ensemble.output == "tanh"
        return torch.tanh(outputs) if is_tanh else outputs

    def ensemble_loss(
        self, world: Any, states: State, batch: Batch
    ) -> Float[Tensor, "B T"]:
        """Return the negative log-likelihood of the targets, as a mean over members.

        Steps without a target, at the end of a sequence, are left out.
        """
        settings, offset = self.settings, self.settings.offset
        with torch.no_grad():
            feat = world.features(states)
            target = world.target(settings.target, states, batch)[:, offset:].float()
            feat = feat[:, : feat.shape[1] - offset]
            # the actions that led to a row were chosen in the row before
            prevact = batch["prevact"].items()
            chosen = {k: x[:, 1:][:, : feat.shape[1]] for k, x in prevact}
            inputs = self._inputs(feat, chosen)
        std = settings.ensemble.std
        errors: Tensor = (self.predict(inputs) - target) / std
        constant = math.log(std) + 0.5 * math.log(2 * math.pi)
        return 0.5 * errors.square().sum(-1).mean(0) + constant * errors.shape[-1]

    def intrinsic_reward(
        self, feat: Float[Tensor, "N H1 F"], actions: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "N H1"], Float[Tensor, "N H1"]]:
        """Return the intrinsic reward of arriving in each state, and the disagreement.

        The reward is the disagreement in the state. If the ensemble is conditioned on
        actions, it is the disagreement for the previous state and its action.
        """
        spread = disagreement(self.predict(self._inputs(feat, actions)))
        reward = spread
        if self.settings.log:
            reward = torch.log(spread.clamp(min=MIN_DISAGREEMENT))
        if self.settings.action_conditioned:
            first = torch.zeros_like(reward[:, :1])  # not used by the returns
            reward = torch.cat([first, reward[:, :-1]], 1)
        return reward, spread

    def outcome(self, world: Any, metrics: Metrics) -> Outcome:
        """Return the function that computes rewards and continue probabilities.

        The metrics of the rewards are added to `metrics`.
        """
        settings = self.settings

        def outcome(feat: Tensor, actions: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            extrinsic, cont = world.outcome(feat)
            intrinsic, spread = self.intrinsic_reward(feat, actions)
            metrics["intrinsic_reward"] = intrinsic[:, 1:].mean().detach()
            metrics["disagreement"] = spread.mean().detach()
            return settings.reward(intrinsic, extrinsic), cont

        return outcome

    @torch.no_grad()
    def report(self, world: Any, states: State, batch: Batch, rng: Rng) -> Metrics:
        """Return the metrics of a batch without training."""
        metrics: Metrics = {}
        ensemble = self.ensemble_loss(world, states, batch)
        behaviour = self.actor_critic.losses(
            world, states, batch, rng, False, self.outcome(world, metrics)
        )
        return explore_metrics(ensemble, behaviour, metrics)

    def _inputs(self, feat: Tensor, actions: dict[str, Tensor]) -> Tensor:
        if not self.settings.action_conditioned:
            return feat
        return torch.cat([feat, self.actions(actions, feat.dtype)], -1)


class ExplorerUpdate:
    """Trains an explorer after each update of the agent: ensemble, actor, critic.

    Each has its own optimizer. If the agent has a joint optimizer, all three have its
    settings; if it has separate ones, the ensemble has those of the world model.
    """

    def __init__(self, agent: Dreamer, explorer: Explorer, make: MakeOptimizer):
        config, self.explorer = agent.config, explorer
        opt_configs: tuple[Any, ...] = (config.opt,) * 3
        if config.optimizers == "separate":
            opt_configs = (config.world_opt, config.actor_opt, config.critic_opt)
        modules = explorer.components()
        names = (ENSEMBLE, f"{PREFIX}pol", f"{PREFIX}val")
        self.opt = OptimizerGroup(
            {
                key: make(trainable_parameters({name: modules[name]}), opt_config)
                for key, name, opt_config in zip(
                    ("ensemble", "actor", "critic"), names, opt_configs, strict=True
                )
            }
        )

    def __call__(
        self, agent: Dreamer, states: State, batch: Batch, rng: Rng, ok: Tensor
    ) -> Metrics:
        """Run one update; it is skipped if `ok` is False: the agent's was skipped."""
        explorer, world = self.explorer, agent.world
        actor_critic = explorer.actor_critic
        states = tree_map(lambda x: x.detach(), states)
        running_stats = actor_critic.normalizer_buffers()
        old_stats = [buffer.clone() for buffer in running_stats]
        loss = explorer.ensemble_loss(world, states, batch)
        total = torch.where(ok, loss.mean(), torch.nan)
        has_stepped, ensemble_metrics = self.opt["ensemble"].update(total)
        metrics: Metrics = {}
        behaviour, ok, by_name = update_actor_critic(
            agent,
            actor_critic,
            self.opt,
            [*agent.update_step.world_leaves, *self.opt["ensemble"].leaves],
            states,
            batch,
            rng,
            ok & has_stepped,
            explorer.outcome(world, metrics),
        )
        for buffer, old in zip(running_stats, old_stats, strict=True):
            buffer.copy_(torch.where(ok, buffer, old))
        optimizer_metrics = self.opt.metrics({"ensemble": ensemble_metrics, **by_name})
        renamed = {
            key if key in TOTALS else key.replace("opt/", f"opt/{PREFIX}", 1): value
            for key, value in optimizer_metrics.items()
        }
        return {**explore_metrics(loss, behaviour, metrics), **renamed}


def explore_metrics(
    ensemble_loss: Tensor, behaviour: BehaviourLoss, rewards: Metrics
) -> Metrics:
    """Return losses and other metrics of an explorer by their names in the log."""
    losses = {"ensemble": ensemble_loss, **behaviour.losses}
    named = {f"explore/{k}": x for k, x in {**behaviour.metrics, **rewards}.items()}
    named |= {f"loss/{PREFIX}{k}": x.mean() for k, x in losses.items()}
    return {key: value.detach() for key, value in named.items()}


def join_metrics(metrics: Metrics, explore: Metrics) -> Metrics:
    """Combine the metrics of the agent's and the explorer's update."""
    totals = {
        key: reduce(torch.stack([metrics[key], explore[key]]))
        for key, reduce in TOTALS.items()
        if key in explore
    }
    return {**metrics, **explore, **totals}
