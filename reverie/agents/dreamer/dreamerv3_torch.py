"""Actor and critic of dreamerv3-torch, and their losses.

Trajectories are imagined with gradients: sampled actions and states are differentiable.
The actor maximizes the advantages by backpropagation through the world model
(`dynamics`), by REINFORCE, or by a mixture. Only `dynamics` divides the advantages by
the range of the returns. The entropy bonus is not weighted by the probability that the
trajectory continues, and its gradient also reaches earlier actions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reverie.agents.dreamer.actor_critic import (
    ActorCritic,
    ImaginedBatch,
    ImagLoss,
    RewardFn,
)
from reverie.api import Batch, Rollout, State
from reverie.nets.dreamerv3_torch.heads import (
    DreamerV3TorchHead,
    DreamerV3TorchPolicyHead,
)
from reverie.nets.rng import Rng
from reverie.worlds.rssm.sections import Section


class DreamerV3TorchActorCritic(ActorCritic):
    """Same interface as `ActorCritic`; `valnorm` and `advnorm` are not used."""

    @property
    def imag_gradient(self) -> str:
        """Gradient of the actor: dynamics, reinforce or both."""
        setting = self.config.dreamerv3_torch_ac.imag_gradient
        if setting != "auto":
            return setting
        discrete = any(space.is_discrete for space in self.act_space.values())
        return "reinforce" if discrete else "dynamics"

    def _reward_and_cont(
        self, reward_fn: RewardFn, feat: Tensor, actions: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return reward and continue probability of imagined states.

        They are differentiable except with `reinforce`, which needs no gradients of
        the returns.
        """
        if self.imag_gradient == "reinforce":
            feat = feat.detach()
            actions = {key: action.detach() for key, action in actions.items()}
        return reward_fn(feat, actions)

    def imagine(self, world: Any, start: State, rng: Rng) -> Rollout:
        """Imagine rollouts with differentiable actions; discrete ones are one-hot."""

        def policy(state: State) -> dict[str, Tensor]:
            dists: dict[str, Any] = self.pol(world.features(state).detach())
            return {
                key: dist.sample_onehot(rng)
                if self.act_space[key].is_discrete
                else dist.sample(rng)
                for key, dist in dists.items()
            }

        rollout: Rollout = world.imagine(start, policy, self.config.imag_length, rng)
        return rollout

    def imag_loss(self, imagined: ImaginedBatch, training: bool) -> ImagLoss:
        """Return the losses; update the normalizer of returns if `training`."""
        actions, feat, reward, cont = imagined
        config, gradient = self.config.imag_loss, self.imag_gradient
        ac_config, detached_feat = self.config.dreamerv3_torch_ac, feat.detach()
        value = self.val(detached_feat)
        with_gradient = gradient != "reinforce"
        val = self.val(feat).pred() if with_gradient else value.pred().detach()
        disc = 1.0 if self.config.contdisc else ac_config.discount
        ret = self.lambda_return(
            reward, val, torch.zeros_like(cont), 1 - cont, disc, config.lam
        )
        with torch.no_grad():
            first = torch.ones_like(cont[:, :1])  # weight of the first state
            weight = torch.cumprod(torch.cat([first, disc * cont[:, :-1]], 1), 1)
            slow = self.slowval(feat).pred()
            offset, scale = self.retnorm(ret, training)
        adv = ret - val[:, :-1]
        logp = self._logp(self.pol(detached_feat), actions)[:, :-1]
        objective = logp * adv.detach()
        if gradient == "dynamics":
            objective = (ret - offset) / scale - (val[:, :-1] - offset) / scale
        elif gradient == "both":
            mix = ac_config.imag_gradient_mix
            objective = mix * ret + (1 - mix) * objective
        policy = self.pol(feat)
        entropy = {key: dist.entropy()[:, :-1] for key, dist in policy.items()}
        bonus = config.actent * sum(entropy.values())
        value_loss = self._value_loss(value, ret.detach(), slow, config.slowreg)
        losses = {
            "policy": -weight[:, :-1] * objective - bonus,
            "value": weight[:, :-1] * value_loss,
        }
        means = {"rew": reward, "con": cont, "val": val, "tar": ret, "weight": weight}
        means["slowval"] = slow
        metrics = self._metrics(policy, entropy, (ret - offset) / scale, adv, means)
        return ImagLoss(losses, ret, adv, weight, logp, entropy, metrics)

    def sections(
        self, world: Any, states: State, batch: Batch, rng: Rng
    ) -> dict[str, Section]:
        """Return one section: imagination has gradients, so it is not separate."""

        def losses() -> list[Tensor]:
            behaviour = self.losses(world, states, batch, rng, False)
            return [loss.mean() for loss in behaviour.losses.values()]

        weights: list[Tensor] = [*self.pol.parameters(), *self.val.parameters()]
        return {"imagination, actor and critic": Section(losses, [], weights)}

    def _make_policy(self, inputs: int) -> DreamerV3TorchPolicyHead:
        normal = self.config.dreamerv3_torch_ac.normal
        return DreamerV3TorchPolicyHead(
            inputs, self.act_space, self.config.policy, normal
        )

    def _make_critic(self, inputs: int) -> DreamerV3TorchHead:
        return DreamerV3TorchHead(inputs, self.config.value)

    def _to_index(self, key: str, action: Tensor) -> Tensor:
        """Convert one-hot actions to class indices."""
        return action.argmax(-1) if self.act_space[key].is_discrete else action
