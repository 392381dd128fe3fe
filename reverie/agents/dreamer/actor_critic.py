"""The policy and the critic, and how both learn from dreams.

The critic foresees the lambda-return of a dream; the policy is reinforced where a dream
did better than that, measured in the range that returns usually have. A slow copy of
the critic keeps it steady. The critic also learns from recorded steps, whose returns
are bootstrapped from the dreams that begin there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.agents.returns import lambda_return
from reverie.api import Metrics
from reverie.nets.distributions import ActionDistribution, Distribution
from reverie.nets.heads import Head, HeadConfig, PolicyConfig, PolicyHead
from reverie.nets.normalize import Normalize, NormalizeConfig
from reverie.nets.rng import Rng
from reverie.spaces import Spaces


@dataclass(frozen=True)
class ImagLossConfig:
    """Learning from dreams."""

    slowtar: bool = False
    """Bootstrap from the slow critic instead of the fast one."""
    lam: float = 0.95
    """Lambda of the returns."""
    actent: float = 3e-4
    """What a nat of policy entropy is worth."""
    slowreg: float = 1.0
    """How much the critic is held to its slow copy."""

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ValueError("lam must be from 0 to 1")


@dataclass(frozen=True)
class ReplLossConfig:
    """Learning values from recorded steps."""

    slowtar: bool = False
    """Accepted for the original's sake; the bootstrap here is the dreamt return."""
    lam: float = 0.95
    """Lambda of the returns."""
    slowreg: float = 1.0
    """How much the critic is held to its slow copy."""


@dataclass(frozen=True)
class SlowConfig:
    """The slow copy of the critic."""

    rate: float = 0.02
    """How much of the critic flows into it at a time."""
    every: int = 1
    """Updates between those times."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1 or self.every < 1:
            raise ValueError("rate must be from 0 to 1, and every at least 1")


class Imagined(NamedTuple):
    """What dreams taught; the losses are those of every step but the last."""

    losses: dict[str, Float[Tensor, "N H"]]
    ret: Float[Tensor, "N H"]
    adv: Float[Tensor, "N H"]
    weight: Float[Tensor, "N H1"]
    logp: Float[Tensor, "N H"]
    entropy: dict[str, Float[Tensor, "N H"]]
    metrics: Metrics


class Replayed(NamedTuple):
    """What recorded steps taught the critic."""

    loss: Float[Tensor, "B T"]
    ret: Float[Tensor, "B T"]


class ActorCritic(nn.Module):
    """`pol`, `val`, `slowval` and the statistics that normalize their targets."""

    returns = staticmethod(lambda_return)

    def __init__(
        self,
        inputs: int,
        act_space: Spaces,
        *,
        policy: PolicyConfig,
        value: HeadConfig,
        slowvalue: SlowConfig,
        imag_loss: ImagLossConfig,
        repl_loss: ReplLossConfig,
        retnorm: NormalizeConfig,
        valnorm: NormalizeConfig,
        advnorm: NormalizeConfig,
        discount: float,
        contdisc: bool,
    ):
        super().__init__()
        self.act_space, self.discount, self.contdisc = act_space, discount, contdisc
        self.slowvalue, self.imag, self.repl = slowvalue, imag_loss, repl_loss
        self.pol = PolicyHead(inputs, act_space, policy)
        self.val = Head(inputs, value)
        self.slowval = Head(inputs, value).requires_grad_(False)
        self.retnorm = Normalize(retnorm)
        self.valnorm = Normalize(valnorm)
        self.advnorm = Normalize(advnorm)
        self.lows: dict[str, str] = {}  # of choices that do not count from zero
        for i, (key, space) in enumerate(act_space.items()):
            if space.is_discrete and space.low.any():
                self.lows[key] = f"low{i}"
                self.register_buffer(f"low{i}", torch.tensor(space.low), False)

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.agents.dreamer.fast import FastActorCritic

        return FastActorCritic

    def act(
        self, feat: Float[Tensor, "*b F"], rng: Rng, pol: PolicyHead | None = None
    ) -> dict[str, Tensor]:
        """Sample an action, in the dtype and counting of its space.

        With `pol`, by another copy of the policy.
        """
        return {
            key: self._from_index(key, out.sample(rng))
            for key, out in (pol or self.pol)(feat).items()
        }

    def imag_loss(
        self,
        feat: Float[Tensor, "N H1 F"],
        actions: dict[str, Tensor],
        reward: Float[Tensor, "N H1"],
        cont: Float[Tensor, "N H1"],
        update: bool,
    ) -> Imagined:
        """Losses of dreams; `update` lets the statistics follow them."""
        config = self.imag
        policy, value = self.pol(feat), self.val(feat)
        with torch.no_grad():
            offset, scale = self.valnorm.stats()
            slow = self.slowval(feat).pred()
            val, slowval = value.pred() * scale + offset, slow * scale + offset
            baseline = slowval if config.slowtar else val
            # the continue head may have learned the discount already
            disc = 1.0 if self.contdisc else self.discount
            weight = torch.cumprod(disc * cont, 1) / disc
            never = torch.zeros_like(cont)
            ret = self.returns(reward, baseline, never, 1 - cont, disc, config.lam)
            ret_offset, ret_scale = self.retnorm(ret, update)
            adv = (ret - baseline[:, :-1]) / ret_scale
            adv_offset, adv_scale = self.advnorm(adv, update)
            adv_normed = (adv - adv_offset) / adv_scale
            offset, scale = self.valnorm(ret, update)
            target = (ret - offset) / scale

        logp = self._logp(policy, actions)[:, :-1]
        entropy = {key: out.entropy()[:, :-1] for key, out in policy.items()}
        bonus = config.actent * sum(entropy.values())
        value_loss = self._value_loss(value, target, slow, config.slowreg)
        losses = {
            "policy": -weight[:, :-1] * (logp * adv_normed + bonus),
            "value": weight[:, :-1] * value_loss,
        }
        ret_normed = (ret - ret_offset) / ret_scale
        metrics: Metrics = {
            "adv": adv.mean(),
            "adv_std": adv.std(correction=0),
            "adv_mag": adv.abs().mean(),
            "rew": reward.mean(),
            "con": cont.mean(),
            "ret": ret_normed.mean(),
            "val": val.mean(),
            "tar": target.mean(),
            "weight": weight.mean(),
            "slowval": slowval.mean(),
            "ret_min": ret_normed.min(),
            "ret_max": ret_normed.max(),
            "ret_rate": (ret_normed.abs() >= 1).float().mean(),
        }
        for key, out in policy.items():
            metrics[f"ent/{key}"] = entropy[key].mean()
            if out.maxent is not None:
                metrics[f"rand/{key}"] = entropy[key].mean() / out.maxent
        return Imagined(losses, ret, adv, weight, logp, entropy, metrics)

    def repl_loss(
        self,
        feat: Float[Tensor, "B T F"],
        reward: Float[Tensor, "B T"],
        is_last: Float[Tensor, "B T"],
        is_terminal: Float[Tensor, "B T"],
        boot: Float[Tensor, "B T"],
        update: bool,
    ) -> Replayed:
        """Critic loss on recorded steps; `boot` are the dreamt returns from there."""
        config = self.repl
        value = self.val(feat)
        with torch.no_grad():
            slow = self.slowval(feat).pred()
            ret = self.returns(
                reward, boot, is_last, is_terminal, self.discount, config.lam
            )
            offset, scale = self.valnorm(ret, update)
        loss = self._value_loss(value, (ret - offset) / scale, slow, config.slowreg)
        return Replayed((1 - is_last[:, :-1]) * loss, ret)

    @torch.no_grad()
    def update_slow(self, count: Float[Tensor, ""], ok: Bool[Tensor, ""]) -> None:
        """Let the critic flow into its slow copy, if update number `count` is due."""
        due = ok & (count % self.slowvalue.every == 0)
        mix = torch.where(due, self.slowvalue.rate, 0.0)
        slow: list[Tensor] = list(self.slowval.parameters())
        fast: list[Tensor] = list(self.val.parameters())
        torch._foreach_mul_(slow, 1 - mix)
        torch._foreach_add_(slow, torch._foreach_mul(fast, mix))

    def norms(self) -> list[Tensor]:
        """The statistics, which a skipped update must not change."""
        parts = (self.retnorm, self.valnorm, self.advnorm)
        return [buffer for part in parts for buffer in part.buffers()]

    def _value_loss(
        self, value: Distribution, target: Tensor, slow: Tensor, slowreg: float
    ) -> Tensor:
        """Towards the returns, and not too far from the slow critic."""
        padded = torch.cat([target, torch.zeros_like(target[:, -1:])], 1)
        return (value.loss(padded) + slowreg * value.loss(slow))[:, :-1]

    def _logp(
        self, policy: dict[str, ActionDistribution], actions: dict[str, Tensor]
    ) -> Tensor:
        parts = [
            out.logp(self._to_index(key, actions[key])) for key, out in policy.items()
        ]
        return torch.stack(parts).sum(0)

    def _from_index(self, key: str, sample: Tensor) -> Tensor:
        low = self.lows.get(key)
        sample = sample if low is None else sample + self.get_buffer(low)
        return sample.to(getattr(torch, self.act_space[key].dtype.name))

    def _to_index(self, key: str, action: Tensor) -> Tensor:
        if not self.act_space[key].is_discrete:
            return action
        low = self.lows.get(key)
        return action.long() if low is None else action.long() - self.get_buffer(low)
