"""Actor-critic of Δ-IRIS: a convolutional network and an LSTM on frames.

It is trained on imagined rollouts only. A rollout starts from a few real frames, the
burn-in, which initialize the LSTM states of the network and of its slow copy (the
target network). The target network predicts the values of all frames; they bootstrap
the lambda-returns, and are the baseline of the policy gradient.

Rollouts are imagined without gradients; the network then runs on all their frames again
for the losses. Frames after the predicted end of the episode are masked.

Shapes: `W` units of the LSTM, `V` outputs of the value head, `H1` = H + 1 frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from reverie.agents.returns import lambda_return
from reverie.api import Metrics, Rollout, UserError
from reverie.config import check_minimum
from reverie.distributed.collective import all_reduce_with_grad, global_count
from reverie.nets.blocks import Linear, initialize
from reverie.nets.distributions import (
    MSE,
    Categorical,
    DeltaIrisTwoHot,
    Distribution,
    symlog_bins,
)
from reverie.nets.normalize import Normalize, NormalizeConfig
from reverie.nets.residual import FrameConfig, FrameEncoder
from reverie.nets.rng import Rng
from reverie.nets.streams import SideStream, on_stream, wait_for
from reverie.worlds.iris.world import IrisFrames, IrisWorld, StepReward

BINS = 255
"""Bins of two-hot values."""
TARGET = SideStream("target")
"""Stream on which the target network runs."""


@dataclass(frozen=True)
class PixelActorCriticConfig:
    """Sizes and losses of the actor-critic. The defaults are those for Crafter."""

    frame: FrameConfig = field(default_factory=lambda: FrameConfig(32, 16))
    """Convolutional encoder of frames."""
    width: int = 512
    """Units of the LSTM."""
    burn_in: int = 5
    """Real frames that initialize the LSTM before imagination, and at the start of each
    collection epoch."""
    horizon: int = 15
    """Imagination horizon in steps."""
    discount: float = 0.997
    """Discount factor per step."""
    lam: float = 0.95
    """Lambda of the returns."""
    entropy_scale: float = 0.001
    """Scale of the entropy bonus of the actor."""
    two_hot_values: bool = True
    """Predict values with two-hot targets in symlog space; False for squared error."""
    target_rate: float = 0.005
    """Rate of the moving average of the target network, per batch."""
    low_precision_conv: bool = True
    """Compute convolutions in bfloat16 if the run has that precision; the original
    uses float32. The LSTM and the losses are always in float32."""

    def __post_init__(self) -> None:
        check_minimum(self, "iris.actor_critic.", width=1, horizon=1, burn_in=0)
        for name in ("discount", "lam", "target_rate"):
            if not 0 <= getattr(self, name) <= 1:
                default = type(self).__dataclass_fields__[name].default
                raise UserError(
                    f"iris.actor_critic.{name} is {getattr(self, name)}, but must be "
                    f"from 0 to 1.\n  Fix: --iris.actor_critic.{name} {default}"
                )


class LSTMState(NamedTuple):
    """Hidden and cell state of the LSTM."""

    hidden: Float[Tensor, "N W"]
    cell: Float[Tensor, "N W"]


class ActorCriticOutput(NamedTuple):
    """Outputs of the policy head (logits) and of the value head."""

    policy: Float[Tensor, "*b A"]
    value: Float[Tensor, "*b V"]  # BINS, or 1 without two-hot values


class ActorCriticLoss(NamedTuple):
    """Scaled losses of imagined rollouts; their means add up to the total."""

    losses: dict[str, Float[Tensor, "N H"]]
    returns: Float[Tensor, "N H"]
    mask: Bool[Tensor, "N H"]  # False after the predicted end of the episode
    output: ActorCriticOutput
    values: Float[Tensor, "N H1"]  # of the target network
    metrics: Metrics


class LSTMCell(nn.LSTMCell):
    """LSTM cell in float32 that is initialized from a generator."""

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            parameter.uniform_(-bound, bound, generator=generator)


class UniformLinear(Linear):
    """Linear layer with the default initialization of PyTorch."""

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        for parameter in (self.weight, self.bias):
            parameter.uniform_(-bound, bound, generator=generator)


class PixelNet(nn.Module):
    """Convolutional encoder and LSTM with a policy head and a value head.

    `shape` is that of a frame, and `actions` the number of actions.
    """

    fast_version = "reverie.agents.iris.fast:FastPixelNet"

    def __init__(
        self,
        shape: tuple[int, ...],
        actions: int,
        config: PixelActorCriticConfig,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.dtype = dtype
        height, width, channels = shape
        area = config.frame.side(height) * config.frame.side(width)
        self.width = config.width
        self.frame = FrameEncoder(channels, config.frame)
        self.lstm = LSTMCell(area * config.frame.latent, config.width)
        self.actor = UniformLinear(config.width, actions)
        outputs = BINS if config.two_hot_values else 1
        self.critic = Linear(config.width, outputs, outscale=0.0)

    def initial(self, batch: int) -> LSTMState:
        """Return the LSTM state at the start of an episode."""
        zeros = self.actor.weight.new_zeros(batch, self.width)
        return LSTMState(zeros, zeros)

    def features(self, image: UInt8[Tensor, "*b h w c"]) -> Float[Tensor, "*b F"]:
        """Return features of frames, flattened from (height, width, channels)."""
        frames = image.flatten(0, -4).to(self.dtype) / 255
        maps: Tensor = self.frame(frames)
        return maps.float().reshape(*image.shape[:-3], -1)

    def run_lstm(
        self, state: LSTMState, features: Float[Tensor, "N T F"]
    ) -> tuple[LSTMState, Float[Tensor, "N T W"]]:
        """Return the last state, and the hidden states of all frames."""
        hidden = []
        for t in range(features.shape[1]):
            state = LSTMState(*self.lstm(features[:, t], tuple(state)))
            hidden.append(state.hidden)
        if not hidden:
            return state, features.new_zeros(len(features), 0, self.width)
        return state, torch.stack(hidden, 1)

    def policy_step(
        self, state: LSTMState, image: UInt8[Tensor, "N h w c"]
    ) -> tuple[LSTMState, Float[Tensor, "N A"]]:
        """Return the next LSTM state and the policy logits of one frame."""
        state, hidden = self.run_lstm(state, self.features(image)[:, None])
        return state, self.actor(hidden[:, 0])

    def forward(
        self, state: LSTMState, image: UInt8[Tensor, "N T h w c"]
    ) -> tuple[LSTMState, ActorCriticOutput]:
        """Return the last LSTM state and the outputs for a sequence of frames."""
        state, hidden = self.run_lstm(state, self.features(image))
        return state, ActorCriticOutput(self.actor(hidden), self.critic(hidden))


class PixelActorCritic(nn.Module):
    """The network `online` and its moving average `target`.

    `dtype` is that of the convolutions. With `retnorm`, advantages are divided by the
    scale of the returns; the original does not do this.
    """

    bins: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        actions: int,
        config: PixelActorCriticConfig,
        dtype: torch.dtype = torch.float32,
        retnorm: NormalizeConfig | None = None,
    ):
        super().__init__()
        self.config = config
        dtype = dtype if config.low_precision_conv else torch.float32
        self.online = PixelNet(shape, actions, config, dtype)
        self.target = PixelNet(shape, actions, config, dtype).requires_grad_(False)
        self.retnorm = Normalize(retnorm) if retnorm else None
        self.register_buffer("bins", symlog_bins(BINS), persistent=False)

    def initialize(self, generator: torch.Generator) -> None:
        """Initialize `online` from a generator, and copy it to `target`."""
        initialize(self.online, generator)
        self.target.load_state_dict(self.online.state_dict())

    def value(self, logits: Float[Tensor, "*b V"]) -> Distribution:
        """Return the distribution of values from outputs of the value head."""
        if self.config.two_hot_values:
            return DeltaIrisTwoHot(logits, self.bins)
        return MSE(logits[..., 0])

    @torch.no_grad()
    def imagine(
        self,
        world: IrisWorld,
        image: UInt8[Tensor, "N L h w c"],
        action: Int[Tensor, "N L"],
        rng: Rng,
        lstm: LSTMState | None = None,
        act_in_last_frame: bool = True,
        reward: StepReward | None = None,
    ) -> Rollout:
        """Imagine a rollout with the policy, starting from the last real frame.

        `action` are the actions chosen in the real frames; the last one is not used.
        `lstm` is the state before the last frame, if it is already computed. The action
        in the last imagined frame has no effect; without `act_in_last_frame` it is 0,
        and the network does not run. `reward` replaces the predicted rewards.
        """
        net, steps = self.online, self.config.horizon
        state: LSTMState = lstm or self.burn_in(image[:, :-1])
        frame_index = count()

        def policy(world_state: Any) -> dict[str, Tensor]:
            nonlocal state
            if next(frame_index) == steps and not act_in_last_frame:
                zeros = torch.zeros_like(world_state.reward, dtype=torch.int64)
                return {"action": zeros}
            state, logits = net.policy_step(state, world_state.image)
            return {"action": Categorical(logits).sample(rng)}

        start = world.state_from_frames(image, action[:, :-1])
        return world.rollout(start, policy, steps, rng, reward)

    @torch.no_grad()
    def burn_in(
        self, image: UInt8[Tensor, "N T h w c"], net: PixelNet | None = None
    ) -> LSTMState:
        """Return the LSTM state of `net` (default: `online`) after some frames."""
        net = net or self.online
        start = net.initial(image.shape[0])
        if not image.shape[1]:
            return start
        state, _ = net.run_lstm(start, net.features(image))
        return state

    def loss(
        self,
        context: UInt8[Tensor, "N L h w c"],
        frames: IrisFrames,
        action: Int[Tensor, "N H"],
        lstm: LSTMState | None = None,
        update_stats: bool = True,
    ) -> ActorCriticLoss:
        """Return the losses `actions`, `entropy` and `values` of imagined rollouts.

        `context` are the real frames before the rollout, and `lstm` the state of the
        network after them, if it is already computed. A rollout of H actions has H + 1
        frames; `reward` and `end` of a frame are those of the step that led to it.
        `update_stats` includes the returns in the running statistics of `retnorm`.
        """
        config, (image, reward, end) = self.config, frames
        with torch.no_grad(), on_stream(image, TARGET):
            _, target = self.target(self.burn_in(context, self.target), image)
            values = self.value(target.value).pred()
        lstm = lstm or self.burn_in(context)
        _, output = self.online(lstm, image[:, :-1])
        wait_for(image, TARGET)
        with torch.no_grad():
            is_terminal = end.float()
            is_last = torch.zeros_like(is_terminal)
            returns = lambda_return(
                reward, values, is_last, is_terminal, config.discount, config.lam
            )
            mask = end[:, :-1].long().cumsum(1) == 0  # until the first end is reached
            advantage = returns - values[:, :-1]
            if self.retnorm:
                _, scale = self.retnorm(returns, update_stats)
                advantage = advantage / scale
        policy = Categorical(output.policy)
        entropy = policy.entropy()
        losses = {
            "actions": -policy.logp(action) * advantage,
            "entropy": -config.entropy_scale * entropy,
            "values": self.value(output.value).loss(returns),
        }
        # with these weights, a mean over all steps of all ranks is the mean over the
        # unmasked steps
        weight = mask / all_reduce_with_grad(mask.sum()) * global_count(mask.numel())
        losses = {k: torch.where(mask, x, 0) * weight for k, x in losses.items()}
        metrics: Metrics = {
            "policy_entropy": (entropy.detach() * weight).mean(),
            "returns": (returns * weight).mean(),
            "advantage_size": (advantage.abs() * weight).mean(),
            "imagined_reward": (reward[:, 1:] * weight).mean(),
            "imagined_length": mask.float().sum(1).mean(),
        }
        return ActorCriticLoss(losses, returns, mask, output, values, metrics)

    def running_stats(self) -> list[Tensor]:
        """Return the running statistics, which a skipped update must not change."""
        return list(self.retnorm.buffers()) if self.retnorm else []

    def changed_by_loss(self) -> list[Tensor]:
        """Return the tensors that `loss` and `update_target` change."""
        target = self.target
        return [*target.parameters(), *target.buffers(), *self.running_stats()]

    @torch.no_grad()
    def update_target(self) -> None:
        """Update the moving average of the weights in the target network."""
        torch._foreach_lerp_(
            list(self.target.parameters()),
            list(self.online.parameters()),
            self.config.target_rate,
        )
