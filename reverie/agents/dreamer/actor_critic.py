"""Actor and critic of DreamerV3, and their losses.

The critic is trained on lambda-returns of imagined trajectories. The actor is trained
with REINFORCE on the advantages over the critic, divided by the range of the returns
(`retnorm`). A slow exponential moving average of the critic regularizes it. The critic
is also trained on replayed trajectories, whose returns are bootstrapped with the
imagined returns that start there (`repval`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.agents.dreamer.config import DreamerConfig
from reverie.agents.returns import lambda_return
from reverie.api import Batch, Metrics, Rollout, State
from reverie.capabilities import StateInspection
from reverie.distributed.collective import all_gather
from reverie.nets.distributions import ActionDistribution, Distribution
from reverie.nets.heads import Head, PolicyHead
from reverie.nets.normalize import Normalize
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.spaces import Spaces
from reverie.worlds.rssm.sections import Section

RETURN_KEYS = ("reward", "is_last", "is_terminal")
"""Batch keys that enter the lambda-returns."""

RewardFn = Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, Tensor]]
"""Maps features and actions of imagined states to the reward received on entering each
state and the probability that the episode continues there."""


class ImagLoss(NamedTuple):
    """Losses on imagined trajectories.

    `N` trajectories, one for each state that imagination starts from, have `H` steps
    (`imag_length`) and `H1` = H + 1 states each. The last state has no loss.
    """

    losses: dict[str, Float[Tensor, "N H"]]
    ret: Float[Tensor, "N H"]  # lambda-returns
    adv: Float[Tensor, "N H"]  # advantages, divided by the scale of the returns
    weight: Float[Tensor, "N H1"]  # discounted probability that a state is reached
    logp: Float[Tensor, "N H"]  # of the imagined actions
    entropy: dict[str, Float[Tensor, "N H"]]
    metrics: Metrics

    def per_start(self, num_starts: int) -> dict[str, Float[Tensor, "B T"]]:
        """Return the mean loss of each trajectory, arranged by start state.

        The shape is `(B, T)`, with `T = num_starts` start states of each sequence.
        """
        return {k: x.mean(1).reshape(-1, num_starts) for k, x in self.losses.items()}


class BehaviourLoss(NamedTuple):
    """Losses of actor and critic, and the rollout they were computed on.

    The losses are `(B, T)`, with T the number of start states of each sequence; the
    loss `repval` has one step less.
    """

    losses: dict[str, Tensor]
    rollout: Rollout
    metrics: Metrics


class ReplLoss(NamedTuple):
    """Critic loss and lambda-returns of replayed steps, except for the last step."""

    loss: Float[Tensor, "B T-1"]
    ret: Float[Tensor, "B T-1"]


class ImaginedBatch(NamedTuple):
    """Imagined trajectories; the reward of a state is received on entering it."""

    actions: dict[str, Tensor]
    feat: Float[Tensor, "N H1 F"]
    reward: Float[Tensor, "N H1"]
    cont: Float[Tensor, "N H1"]


class ActorCritic(nn.Module):
    """Actor `pol`, critic `val`, slow critic `slowval` and three normalizers."""

    fast_version = "reverie.agents.dreamer.fast:FastActorCritic"

    lambda_return = staticmethod(lambda_return)  # the fast version has its own

    def __init__(self, inputs: int, act_space: Spaces, config: DreamerConfig):
        super().__init__()
        self.act_space, self.config = act_space, config
        self.pol = self._make_policy(inputs)
        self.val = self._make_critic(inputs)
        self.slowval = self._make_critic(inputs).requires_grad_(False)
        self.retnorm = Normalize(config.retnorm)
        self.valnorm = Normalize(config.valnorm)
        self.advnorm = Normalize(config.advnorm)
        # names of the buffers with the lowest value of a discrete action, by action
        # key; only for actions whose lowest value is not 0
        self.low_buffers: dict[str, str] = {}
        for i, (key, space) in enumerate(act_space.items()):
            if space.is_discrete and space.low.any():
                self.low_buffers[key] = f"low{i}"
                self.register_buffer(f"low{i}", torch.tensor(space.low), False)

    def act(
        self,
        feat: Float[Tensor, "*b F"],
        rng: Rng,
        pol: PolicyHead | None = None,
        greedy: bool = False,
    ) -> dict[str, Tensor]:
        """Sample actions in the dtype and range of their spaces.

        `pol` replaces the policy head, for example by a copy with older weights. With
        `greedy`, return the most likely actions.
        """
        return {
            key: self._from_index(key, dist.pred() if greedy else dist.sample(rng))
            for key, dist in (pol or self.pol)(feat).items()
        }

    @torch.no_grad()
    def inspect(self, feat: Float[Tensor, "N F"]) -> StateInspection:
        """Return value, policy entropy and action probabilities of the first state."""
        offset, scale = self.valnorm.stats()
        value = self.val(feat[:1]).pred() * scale + offset
        dists = self.pol(feat[:1])
        entropy = sum(float(dist.entropy()[0]) for dist in dists.values())
        probs = {
            key: dists[key].probs[0].cpu().numpy()
            for key, space in self.act_space.items()
            if space.is_discrete
        }
        return StateInspection(float(value[0]), entropy, probs)

    def losses(
        self,
        world: Any,
        states: State,
        batch: Batch,
        rng: Rng,
        training: bool,
        reward_fn: RewardFn | None = None,
    ) -> BehaviourLoss:
        """Imagine rollouts from replay states; compute actor and critic losses.

        `reward_fn` replaces the rewards of the world model, for exploration.
        """
        config = self.config
        num_starts, start_states, start = self.start_states(states)
        rollout = self.imagine(world, start, rng)
        feat = world.features(rollout.states)  # (N, H + 1, F)
        if config.ac_grads:  # the start states are detached in the rollout
            first = world.features(start_states).flatten(0, 1)[:, None]
            feat = torch.cat([first, feat[:, 1:]], 1)
        reward_fn = reward_fn or (lambda feat, actions: world.reward_and_cont(feat))
        reward, cont = self._reward_and_cont(reward_fn, feat, rollout.actions)
        imagined = ImaginedBatch(rollout.actions, feat, reward, cont)
        imag = self.imag_loss(imagined, training)
        losses = imag.per_start(num_starts)
        if config.repval_loss:
            feat = world.features(start_states)  # (B, num_starts, F)
            feat = feat if config.repval_grad else feat.detach()
            losses["repval"] = self._repl_loss_of_batch(
                feat, batch, imag, num_starts, training
            ).loss
        return BehaviourLoss(losses, rollout, imag.metrics)

    def start_states(self, states: State) -> tuple[int, State, State]:
        """Return the states that imagination starts from.

        The result is their number per sequence (`num_starts`), the last `num_starts`
        states of each sequence `(B, num_starts, ...)`, and the same without gradients,
        flattened to one axis `(N, ...)`.
        """
        length = states[0].shape[1]
        num_starts = min(self.config.imag_last or length, length)
        start_states = tree_map(lambda x: x[:, -num_starts:], states)
        start = tree_map(lambda x: x.detach().flatten(0, 1), start_states)
        return num_starts, start_states, start

    @torch.no_grad()
    def imagine(self, world: Any, start: State, rng: Rng) -> Rollout:
        """Imagine rollouts with actions of the policy."""

        def policy(state: State) -> dict[str, Tensor]:
            return self.act(world.features(state), rng)

        rollout: Rollout = world.imagine(start, policy, self.config.imag_length, rng)
        return rollout

    @torch.no_grad()
    def _reward_and_cont(
        self, reward_fn: RewardFn, feat: Tensor, actions: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return reward and continue probability of imagined states."""
        return reward_fn(feat, actions)

    def _repl_loss_of_batch(
        self,
        feat: Tensor,
        batch: Batch,
        imag: ImagLoss,
        num_starts: int,
        training: bool,
    ) -> ReplLoss:
        """Return the critic loss on the replayed steps that imagination starts from."""
        reward, is_last, is_terminal = (
            batch[key][:, -num_starts:].float() for key in RETURN_KEYS
        )
        bootstrap = imag.ret[:, 0].reshape(-1, num_starts)
        return self.repl_loss(feat, reward, is_last, is_terminal, bootstrap, training)

    def imag_loss(self, imagined: ImaginedBatch, training: bool) -> ImagLoss:
        """Return the losses; update the normalizers if `training`."""
        config = self.config.imag_loss
        actions, feat, reward, cont = imagined
        policy, value = self.pol(feat), self.val(feat)
        with torch.no_grad():
            offset, scale = self.valnorm.stats()
            slow = self.slowval(feat).pred()
            val, slowval = value.pred() * scale + offset, slow * scale + offset
            baseline = slowval if config.slowtar else val
            # with `contdisc`, the continue probabilities include the discount
            disc = 1.0 if self.config.contdisc else self.config.discount
            weight = torch.cumprod(disc * cont, 1) / disc
            is_last = torch.zeros_like(cont)
            ret = self.lambda_return(
                reward, baseline, is_last, 1 - cont, disc, config.lam
            )
            ret_offset, ret_scale = self.retnorm(ret, training)
            adv = (ret - baseline[:, :-1]) / ret_scale
            adv_offset, adv_scale = self.advnorm(adv, training)
            adv_normed = (adv - adv_offset) / adv_scale
            offset, scale = self.valnorm(ret, training)
            target = (ret - offset) / scale

        logp = self._logp(policy, actions)[:, :-1]
        entropy = {key: dist.entropy()[:, :-1] for key, dist in policy.items()}
        bonus = config.actent * sum(entropy.values())
        value_loss = self._value_loss(value, target, slow, config.slowreg)
        losses = {
            "policy": -weight[:, :-1] * (logp * adv_normed + bonus),
            "value": weight[:, :-1] * value_loss,
        }
        means = {"rew": reward, "con": cont, "val": val, "tar": target}
        means |= {"weight": weight, "slowval": slowval}
        ret_normed = (ret - ret_offset) / ret_scale
        metrics = self._metrics(policy, entropy, ret_normed, adv, means)
        return ImagLoss(losses, ret, adv, weight, logp, entropy, metrics)

    def repl_loss(
        self,
        feat: Float[Tensor, "B T F"],
        reward: Float[Tensor, "B T"],
        is_last: Float[Tensor, "B T"],
        is_terminal: Float[Tensor, "B T"],
        bootstrap: Float[Tensor, "B T"],
        training: bool,
    ) -> ReplLoss:
        """Return the critic loss; update `valnorm` if `training`.

        `bootstrap` are the imagined returns that start at each step.
        """
        config = self.config.repl_loss
        value = self.val(feat)
        with torch.no_grad():
            slow = self.slowval(feat).pred()
            discount = self.config.discount
            ret = self.lambda_return(
                reward, bootstrap, is_last, is_terminal, discount, config.lam
            )
            offset, scale = self.valnorm(ret, training)
        loss = self._value_loss(value, (ret - offset) / scale, slow, config.slowreg)
        return ReplLoss((1 - is_last[:, :-1]) * loss, ret)

    def sections(
        self, world: Any, states: State, batch: Batch, rng: Rng
    ) -> dict[str, Section]:
        """Return the sections of `losses` that `reverie bench` times separately."""
        num_starts, _, start = self.start_states(states)
        replay_feat = world.features(states).detach().clone().requires_grad_()

        rollout = self.imagine(world, start, rng)
        feat = world.features(rollout.states).detach().clone()

        def actor_critic_losses() -> list[Tensor]:
            with torch.no_grad():
                reward, cont = world.reward_and_cont(feat)
            imagined = ImaginedBatch(rollout.actions, feat, reward, cont)
            imag = self.imag_loss(imagined, False)
            repl = self._repl_loss_of_batch(
                replay_feat[:, -num_starts:], batch, imag, num_starts, False
            )
            return [x.mean() for x in (*imag.losses.values(), repl.loss)]

        def imagination() -> list[Tensor]:
            self.imagine(world, start, rng)
            return []

        return {
            "actor and critic": Section(actor_critic_losses, [replay_feat]),
            "imagination": Section(imagination, []),
        }

    @torch.no_grad()
    def update_slow(self, count: Float[Tensor, ""], stepped: Bool[Tensor, ""]) -> None:
        """Update the slow critic, if this is due after `count` updates.

        Does nothing if the update was skipped (`stepped` is False).
        """
        config = self.config.slowvalue
        mix = torch.where(stepped & (count % config.every == 0), config.rate, 0.0)
        slow: list[Tensor] = list(self.slowval.parameters())
        current: list[Tensor] = list(self.val.parameters())
        torch._foreach_mul_(slow, 1 - mix)
        torch._foreach_add_(slow, torch._foreach_mul(current, mix))

    def normalizer_buffers(self) -> list[Tensor]:
        """Return the running statistics, which a skipped update must not change."""
        normalizers = (self.retnorm, self.valnorm, self.advnorm)
        return [buffer for norm in normalizers for buffer in norm.buffers()]

    def _metrics(
        self,
        policy: dict[str, ActionDistribution],
        entropy: dict[str, Tensor],
        ret_normed: Tensor,
        adv: Tensor,
        means: dict[str, Tensor],
    ) -> Metrics:
        """Return metrics of advantages, returns and policy, and the mean of `means`."""
        adv, ret_normed = all_gather(adv), all_gather(ret_normed)  # of all ranks
        metrics: Metrics = {
            "adv": adv.mean(),
            "adv_std": adv.std(correction=0),
            "adv_mag": adv.abs().mean(),
            "ret": ret_normed.mean(),
            "ret_min": ret_normed.min(),
            "ret_max": ret_normed.max(),
            "ret_rate": (ret_normed.abs() >= 1).float().mean(),
        }
        for key, dist in policy.items():
            metrics[f"ent/{key}"] = entropy[key].mean()
            if dist.maxent is not None:
                metrics[f"rand/{key}"] = entropy[key].mean() / dist.maxent
        return metrics | {name: values.mean() for name, values in means.items()}

    def _make_policy(self, inputs: int) -> PolicyHead:
        return PolicyHead(inputs, self.act_space, self.config.policy)

    def _make_critic(self, inputs: int) -> Head:
        return Head(inputs, self.config.value)

    def _value_loss(
        self, value: Distribution, target: Tensor, slow: Tensor, slowreg: float
    ) -> Tensor:
        """Return the critic loss, regularized towards the slow critic."""
        # the value of the last state has no target; its loss is removed below
        padded = torch.cat([target, torch.zeros_like(target[:, -1:])], 1)
        return (value.loss(padded) + slowreg * value.loss(slow))[:, :-1]

    def _logp(
        self, policy: dict[str, ActionDistribution], actions: dict[str, Tensor]
    ) -> Tensor:
        """Return the log-probability of the actions, summed over action keys."""
        logps = [
            dist.logp(self._to_index(key, actions[key])) for key, dist in policy.items()
        ]
        return torch.stack(logps).sum(0)

    def _from_index(self, key: str, sample: Tensor) -> Tensor:
        """Convert samples of the policy, class indices or continuous values, to actions
        of the space."""
        low = self.low_buffers.get(key)
        sample = sample if low is None else sample + self.get_buffer(low)
        return sample.to(getattr(torch, self.act_space[key].dtype.name))

    def _to_index(self, key: str, action: Tensor) -> Tensor:
        """Convert actions to class indices, if they are discrete."""
        if not self.act_space[key].is_discrete:
            return action
        low = self.low_buffers.get(key)
        return action.long() if low is None else action.long() - self.get_buffer(low)
