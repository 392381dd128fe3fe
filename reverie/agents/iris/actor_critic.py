"""The actor-critic of Δ-IRIS: sees dreamt pixels, remembers with an LSTM.

It learns in dreams alone. A dream begins from a few real frames, which both the network
and its slow copy (the target) watch first; then the network acts. The target foresees
the values of every frame: they bootstrap the lambda-returns, and they are the baseline
from which the policy's actions are judged.

The dream is dreamt without gradients; its frames are then looked at again, all at once,
to learn from them. Rows of a dream count up to its first end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from reverie.agents.returns import lambda_return
from reverie.api import Metrics, Rollout, UserError
from reverie.nets.blocks import Linear
from reverie.nets.distributions import (
    MSE,
    Categorical,
    Distribution,
    SymlogTwoHot,
    symlog_bins,
)
from reverie.nets.residual import FrameConfig, FrameEncoder
from reverie.nets.rng import Rng
from reverie.nets.streams import SideStream, on_stream, wait_for

BINS = 255
"""Bins of two-hot values."""
TARGET = SideStream("target")
"""The lane in which the slow copy looks at a dream."""


@dataclass(frozen=True)
class PixelActorCriticConfig:
    """Sizes and losses of the actor-critic; the defaults are those for Crafter."""

    frame: FrameConfig = field(default_factory=lambda: FrameConfig(32, 16))
    """Sees the frame."""
    width: int = 512
    """Size of the LSTM."""
    burn_in: int = 5
    """Real frames it watches before a dream, and before a stretch of acting."""
    horizon: int = 15
    """Steps of a dream."""
    discount: float = 0.997
    """What a reward is worth one step later."""
    lam: float = 0.95
    """Lambda of the returns."""
    entropy_scale: float = 0.001
    """What a nat of policy entropy is worth."""
    two_hot_values: bool = True
    """Values as numbers with two-hot targets in symlog; otherwise by squared error."""
    target_rate: float = 0.005
    """How much of the network flows into its slow copy at each batch."""
    half: bool = True
    """Where the run computes in bfloat16, let convolutions do so too; the original's
    compute in float32 here. The LSTM and all losses always do."""

    def __post_init__(self) -> None:
        for name, least in {"width": 1, "horizon": 1, "burn_in": 0}.items():
            if getattr(self, name) < least:
                raise UserError(
                    f"iris.actor_critic.{name} is {getattr(self, name)}, but must be "
                    f"at least {least}.\n  Fix: --iris.actor_critic.{name} {least}"
                )
        for name in ("discount", "lam", "target_rate"):
            if not 0 <= getattr(self, name) <= 1:
                good = type(self).__dataclass_fields__[name].default
                raise UserError(
                    f"iris.actor_critic.{name} is {getattr(self, name)}, but must be "
                    f"from 0 to 1.\n  Fix: --iris.actor_critic.{name} {good}"
                )


class Recall(NamedTuple):
    """What an LSTM remembers."""

    hidden: Float[Tensor, "N W"]
    cell: Float[Tensor, "N W"]


class Opinion(NamedTuple):
    """What a network thinks of frames."""

    policy: Float[Tensor, "*b A"]
    value: Float[Tensor, "*b V"]


class Learned(NamedTuple):
    """The losses of a dream, scaled so that their plain mean counts; see `loss`."""

    losses: dict[str, Float[Tensor, "N H"]]
    returns: Float[Tensor, "N H"]
    mask: Bool[Tensor, "N H"]
    opinion: Opinion
    values: Float[Tensor, "N H1"]
    metrics: Metrics


class DreamWorld(Protocol):
    """What the actor-critic asks of a world: `worlds/iris/world.py` has it."""

    def state_from_frames(self, image: Any, action: Any) -> Any: ...

    def imagine(self, state: Any, policy: Any, horizon: int, rng: Rng) -> Rollout: ...


class LSTM(nn.LSTMCell):
    """A cell that computes in float32 and is initialized from a generator."""

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            parameter.uniform_(-bound, bound, generator=generator)


class Plain(Linear):
    """A dense layer that starts as PyTorch's own."""

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        for parameter in (self.weight, self.bias):
            parameter.uniform_(-bound, bound, generator=generator)


class Zero(Linear):
    """A dense layer that starts at zero."""

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        self.weight.zero_()
        self.bias.zero_()


class PixelNet(nn.Module):
    """Frames, through a convolutional network and an LSTM, to a policy and a value."""

    def __init__(
        self,
        shape: tuple[int, ...],
        actions: int,
        config: PixelActorCriticConfig,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.dtype = dtype
        height, width, colours = shape
        area = config.frame.side(height) * config.frame.side(width)
        self.width = config.width
        self.frame = FrameEncoder(colours, config.frame)
        self.lstm = LSTM(area * config.frame.latent, config.width)
        self.actor = Plain(config.width, actions)
        self.critic = Zero(config.width, BINS if config.two_hot_values else 1)

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.agents.iris.fast import FastPixelNet

        return FastPixelNet

    def initial(self, rows: int) -> Recall:
        zeros = self.actor.weight.new_zeros(rows, self.width)
        return Recall(zeros, zeros)

    def features(self, image: UInt8[Tensor, "*b h w c"]) -> Float[Tensor, "*b F"]:
        """What is seen in frames; channels run fastest."""
        rows = image.flatten(0, -4).to(self.dtype) / 255
        maps: Tensor = self.frame(rows)
        return maps.float().reshape(*image.shape[:-3], -1)

    def watch(
        self, recall: Recall, features: Float[Tensor, "N T F"]
    ) -> tuple[Recall, Float[Tensor, "N T W"]]:
        """Remember frames one after the other; the hidden state at each."""
        states = []
        for t in range(features.shape[1]):
            recall = Recall(*self.lstm(features[:, t], tuple(recall)))
            states.append(recall.hidden)
        if not states:
            return recall, features.new_zeros(len(features), 0, self.width)
        return recall, torch.stack(states, 1)

    def judge(self, hidden: Float[Tensor, "*b W"]) -> Opinion:
        return Opinion(self.actor(hidden), self.critic(hidden))

    def decide(
        self, recall: Recall, image: UInt8[Tensor, "N h w c"]
    ) -> tuple[Recall, Float[Tensor, "N A"]]:
        """What to do in view of one more frame, whatever it is worth."""
        recall, hidden = self.watch(recall, self.features(image)[:, None])
        return recall, self.actor(hidden[:, 0])

    def forward(
        self, recall: Recall, image: UInt8[Tensor, "N T h w c"]
    ) -> tuple[Recall, Opinion]:
        """Opinions on each of some frames in a row."""
        recall, hidden = self.watch(recall, self.features(image))
        return recall, self.judge(hidden)


class PixelActorCritic(nn.Module):
    """See the top of this file. `dtype` is what convolutions may compute in."""

    bins: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        actions: int,
        config: PixelActorCriticConfig,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.config = config
        dtype = dtype if config.half else torch.float32
        self.online = PixelNet(shape, actions, config, dtype)
        self.target = PixelNet(shape, actions, config, dtype).requires_grad_(False)
        self.register_buffer("bins", symlog_bins(BINS), persistent=False)

    def initialize(self, generator: torch.Generator) -> None:
        """Fill the network from one generator; the target begins as its copy."""
        for layer in self.online.modules():
            if hasattr(layer, "initialize"):
                layer.initialize(generator)  # type: ignore[operator]
        self.target.load_state_dict(self.online.state_dict())

    def value(self, logits: Float[Tensor, "*b V"]) -> Distribution:
        if self.config.two_hot_values:
            return SymlogTwoHot(logits, self.bins)
        return MSE(logits[..., 0])

    @torch.no_grad()
    def dream(
        self,
        world: DreamWorld,
        image: UInt8[Tensor, "N L h w c"],
        action: Int[Tensor, "N L"],
        rng: Rng,
        recall: Recall | None = None,
        acts_last: bool = True,
    ) -> Rollout:
        """Act in the world from where some real frames end.

        `action` is what was done in each of them; the last frame's is not used.
        `recall` is what is remembered of the frames before it, if that is known. In
        the last frame of the dream an action leads nowhere; it may be left out, as 0.
        """
        net, steps = self.online, self.config.horizon
        carry: list[Recall] = [recall or self.burn_in(image[:, :-1])]
        frames = count()

        def policy(state: Any) -> dict[str, Tensor]:
            if next(frames) == steps and not acts_last:
                return {"action": torch.zeros_like(state.reward, dtype=torch.int64)}
            carry[0], logits = net.decide(carry[0], state.image)
            return {"action": Categorical(logits).sample(rng)}

        state = world.state_from_frames(image, action[:, :-1])
        return world.imagine(state, policy, steps, rng)

    @torch.no_grad()
    def burn_in(
        self, image: UInt8[Tensor, "N T h w c"], net: PixelNet | None = None
    ) -> Recall:
        """What is remembered after watching some frames."""
        net = net or self.online
        start = net.initial(len(image))
        if not image.shape[1]:
            return start
        recall, _ = net.watch(start, net.features(image))
        return recall

    def loss(
        self,
        before: UInt8[Tensor, "N L h w c"],
        image: UInt8[Tensor, "N H1 h w c"],
        action: Int[Tensor, "N H"],
        reward: Float[Tensor, "N H1"],
        end: Bool[Tensor, "N H1"],
        recall: Recall | None = None,
    ) -> Learned:
        """What dreams teach: losses `actions`, `entropy` and `values`.

        `before` are the real frames watched first, and `recall` what the network
        remembers of them, if that is known. A dream of H actions has H + 1
        frames; `reward` and `end` belong to *arriving* at a frame, so the first has
        none. The total is the sum of the means.
        """
        config = self.config
        with torch.no_grad(), on_stream(image, TARGET):
            _, seen = self.target(self.burn_in(before, self.target), image)
            values = self.value(seen.value).pred()
        recall = recall or self.burn_in(before)
        _, opinion = self.online(recall, image[:, :-1])
        wait_for(image, TARGET)
        with torch.no_grad():
            done = end.float()
            never = torch.zeros_like(done)
            returns = lambda_return(
                reward, values, never, done, config.discount, config.lam
            )
            mask = end[:, :-1].long().cumsum(1) == 0  # up to and including the first
        policy = Categorical(opinion.policy)
        advantage = returns - values[:, :-1]
        entropy = policy.entropy()
        losses = {
            "actions": -policy.logp(action) * advantage,
            "entropy": -config.entropy_scale * entropy,
            "values": self.value(opinion.value).loss(returns),
        }
        weight = mask / mask.sum() * mask.numel()
        losses = {k: torch.where(mask, x, 0) * weight for k, x in losses.items()}
        metrics: Metrics = {
            "policy_entropy": (entropy.detach() * weight).mean(),
            "returns": (returns * weight).mean(),
            "advantage_size": (advantage.abs() * weight).mean(),
            "dream_reward": (reward[:, 1:] * weight).mean(),
            "dream_length": mask.float().sum(1).mean(),
        }
        return Learned(losses, returns, mask, opinion, values, metrics)

    @torch.no_grad()
    def update_target(self) -> None:
        """Let the network flow into its slow copy."""
        torch._foreach_lerp_(
            list(self.target.parameters()),
            list(self.online.parameters()),
            self.config.target_rate,
        )
