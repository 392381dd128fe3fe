"""The Δ-IRIS world model: tokenizer and transformer, trained separately.

    world.tokenizer.loss(segment, rng)                trains `world.tokenizer`
    world.dynamics_loss(segment)                      trains `world.dynamics`

Imagination starts from real frames and has no gradients:

    state = world.state_from_frames(image, action)    # T + 1 frames and T actions
    step = world.step(state, action, rng)             # step.state.image, .reward, .end

No method synchronizes with the device, so loops that call them can be captured in CUDA
graphs: the length of the KV cache, and which tokens are not yet in it, are the same for
all sequences of a batch and stored as Python values.

The class implements `api.World`. A policy gets the whole state; the states of a rollout
are `IrisFrames`, without the KV cache.

Shapes: `N` imagined sequences, `K` tokens of a transition, `C` codes, `R` reward
classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from reverie.api import Obs, Policy, Rollout, UserError, WorldLoss
from reverie.nets.blocks import AffineLayer
from reverie.nets.distributions import softmax
from reverie.nets.rng import Rng
from reverie.nets.streams import SideStream, on_stream, wait_for
from reverie.nets.transformer import Cache, Embedding
from reverie.spaces import Space
from reverie.worlds.iris.config import (
    DynamicsConfig,
    TokenizerConfig,
    check_image_size,
)
from reverie.worlds.iris.dynamics import ITokenEncoder, TransformerDynamics
from reverie.worlds.iris.segment import EpisodeSegment, to_float
from reverie.worlds.iris.tokenizer import FRAME_FEATURES, Tokenizer
from reverie.worlds.rollout import stack_actions, stack_time

I_TOKEN, OUTCOME = SideStream("i_token", priority=1), SideStream("outcome")
"""CUDA streams: one computes I-tokens, the other one computes rewards and ends."""


class IrisState(NamedTuple):
    """State of an imagined sequence: the newest frame and the transformer's context.

    `step` writes into the tensors of the KV cache. To continue from the same state
    twice, `fork` it first.
    """

    image: UInt8[Tensor, "N h w c"]  # newest frame
    reward: Float[Tensor, " N"]  # received with this frame
    end: Bool[Tensor, " N"]  # True if the episode ends with this frame
    cache: Cache
    i_token_is_cached: bool  # True if the I-token of this frame is in the KV cache
    i_token: Float[Tensor, "N E"] | None = None  # of this frame, if precomputed
    last_token: Int[Tensor, " N"] | None = None  # last Δ-token, if not in the KV cache
    frame_features: Float[Tensor, "N r s c2"] | None = None  # if precomputed

    def fork(self) -> IrisState:
        """Return the state with a copy of the KV cache."""
        return self._replace(cache=self.cache.clone())


class IrisStep(NamedTuple):
    """The next state, the sampled Δ-tokens, and all predicted logits.

    `outputs` are the transformer outputs from which the Δ-tokens are predicted.
    """

    state: IrisState
    outputs: list[Float[Tensor, "N E"]]
    tokens: Int[Tensor, "N K"]
    latent_logits: Float[Tensor, "N K C"]
    reward_logits: Float[Tensor, "N R"]
    end_logits: Float[Tensor, "N two"]


StepReward = Callable[[IrisStep], Float[Tensor, " N"]]
"""Computes rewards of an imagined step that replace the predicted task rewards."""


class IrisFrames(NamedTuple):
    """Frames of imagined sequences, and the reward and end received with each."""

    image: UInt8[Tensor, "*b h w c"]
    reward: Float[Tensor, "*b"]
    end: Bool[Tensor, "*b"]


class IrisWorld(nn.Module):
    """Models one image key and one discrete action. Networks compute in `dtype`.

    `image` is the space of a frame, `key` its observation key, and `actions` the number
    of actions. Actions are indices from 0, under the key `action`.
    """

    def __init__(
        self,
        image: Space,
        actions: int,
        *,
        tokenizer: TokenizerConfig,
        dynamics: DynamicsConfig,
        dtype: torch.dtype = torch.float32,
        key: str = "image",
    ):
        super().__init__()
        if not image.is_image:
            raise UserError(
                f"Δ-IRIS needs an image (uint8, h w c), but {key!r} is "
                f"{image.dtype.name} with shape {image.shape}.\n"
                "  Fix: choose an environment with images, or another agent."
            )
        self.key, self.shape, self.dtype = key, image.shape, dtype
        self.actions = actions
        check_image_size(image.shape, tokenizer, dynamics)
        self.tokenizer = Tokenizer(image.shape, actions, tokenizer, dtype)
        codes = tokenizer.quantizer.codes
        self.dynamics = TransformerDynamics(
            image.shape, actions, tokenizer.tokens, codes, dynamics, dtype
        )

    @property
    def image_keys(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def encoder(self) -> ITokenEncoder:
        return ITokenEncoder(self.dynamics, self.key)

    # Training

    def dynamics_loss(self, segment: EpisodeSegment) -> WorldLoss:
        """Return the losses `latents` `(B, L - 1)`, `rewards` and `ends` `(B, L)`.

        The losses are scaled; the total loss is the sum of their means. The tokenizer
        gets no gradient.
        """
        tokens = self.tokenizer.tokenize(segment.image, segment.action)
        return self.dynamics.loss(segment, tokens)

    @torch.no_grad()
    def reconstruct(
        self, image: UInt8[Tensor, "B L h w c"], action: Int[Tensor, "B any"]
    ) -> UInt8[Tensor, "B L h w c"]:
        """Reconstruct each frame, given the *true* preceding one; copy the first."""
        steps, tokens = image.shape[1] - 1, self.tokenizer.tokenize(image, action)
        before, actions = image[:, :-1].flatten(0, 1), action[:, :steps].flatten()
        decoded = self.tokenizer.decode_tokens(before, actions, tokens.flatten(0, 1))
        decoded = decoded.view(image.shape[0], steps, *self.shape)
        return torch.cat([image[:, :1], decoded], 1)

    # Imagination

    @torch.no_grad()
    def state_from_frames(
        self, image: UInt8[Tensor, "N L h w c"], action: Int[Tensor, "N T"]
    ) -> IrisState:
        """Return the state after real frames, given the T = L - 1 actions in between.

        Frames before the beginning of an episode are black, with action 0.
        """
        assert action.shape[1] == image.shape[1] - 1, (action.shape, image.shape)
        with on_stream(image, I_TOKEN):
            i_tokens = self.dynamics.embed_frames(image)
        tokens = self.tokenizer.tokenize(image, action) if action.shape[1] else None
        wait_for(image, I_TOKEN)
        return self.state_from_tokens(image[:, -1], i_tokens, action, tokens)

    @torch.no_grad()
    def state_from_tokens(
        self,
        image: UInt8[Tensor, "N h w c"],
        i_tokens: Float[Tensor, "N L E"],
        action: Int[Tensor, "N T"],
        tokens: Int[Tensor, "N T K"] | None,
    ) -> IrisState:
        """Return the state after frames with these tokens; `image` is the last one."""
        sequence = i_tokens[:, -1:]
        if tokens is not None:
            blocks = self.dynamics.embed_sequence(i_tokens[:, :-1], action, tokens)
            sequence = torch.cat([blocks, sequence], 1)
        cache = self.dynamics.transformer.cache(image.shape[0], self.dtype)
        _, cache = self._extend(sequence, cache)
        reward = torch.zeros(image.shape[0], device=image.device)
        return IrisState(image, reward, reward.bool(), cache, i_token_is_cached=True)

    @torch.no_grad()
    def step(self, state: IrisState, action: Int[Tensor, " N"], rng: Rng) -> IrisStep:
        """Imagine one step.

        Random numbers are drawn in this order: sign of the reward (without
        `two_hot_rewards`), end, Δ-tokens. When the KV cache cannot hold another time
        step, it is cleared, and the context is the newest frame alone.
        """
        dynamics, dtype = self.dynamics, self.dtype
        cache, last, is_cached = state.cache, state.last_token, state.i_token_is_cached
        if cache.free <= dynamics.tokens_per_step:
            cache, last, is_cached = cache.clear(), None, False
        inputs = [] if last is None else [dynamics.latent(last, dtype)]
        inputs += [] if is_cached else [self._i_token(state)]
        inputs.append(dynamics.action(action, dtype))
        outputs, cache = self._extend(torch.stack(inputs, 1), cache)
        at_action = outputs[:, -1]
        with on_stream(action, OUTCOME):
            reward_logits = dynamics.rewards(at_action)
            end_logits = dynamics.ends(at_action)
            reward = dynamics.reward(reward_logits, rng)
            end = rng.categorical(softmax(end_logits)) == 1

        logits: list[Tensor] = [dynamics.latents(at_action)]
        predictors, tokens = [at_action], list[Tensor]()
        for k in range(dynamics.tokens):
            if k:
                embedded = dynamics.latent(tokens[-1], dtype)[:, None]
                outputs, cache = self._extend(embedded, cache)
                predictors.append(outputs[:, -1])
                logits.append(dynamics.latents(predictors[-1]))
            tokens.append(rng.categorical(softmax(logits[-1])))
        delta_tokens = torch.stack(tokens, 1)  # (N, K)
        wait_for(action, OUTCOME)
        if state.frame_features is not None:
            wait_for(state.image, FRAME_FEATURES)
        image = self.tokenizer.decode_tokens(
            state.image, action, delta_tokens, state.frame_features
        )
        next_state = IrisState(
            image, reward, end, cache, i_token_is_cached=False, last_token=tokens[-1]
        )
        latent_logits = torch.stack(logits, 1)
        return IrisStep(
            *(next_state, predictors, delta_tokens),
            *(latent_logits, reward_logits, end_logits),
        )

    @torch.no_grad()
    def precompute(self, state: IrisState) -> IrisState:
        """Start encoding the newest frame for the next step on side streams.

        The policy can then run in parallel with the encoders.
        """
        image, i_token, features = state.image, state.i_token, state.frame_features
        if i_token is None and not state.i_token_is_cached:
            with on_stream(image, I_TOKEN):
                i_token = self.dynamics.embed_frames(image)
        if features is None:
            with on_stream(image, FRAME_FEATURES):
                features = self.tokenizer.frame_features(image)
        return state._replace(i_token=i_token, frame_features=features)

    def imagine(
        self, state: IrisState, policy: Policy, horizon: int, rng: Rng
    ) -> Rollout:
        """Imagine `horizon` steps with the rewards of the task."""
        return self.rollout(state, policy, horizon, rng)

    def rollout(
        self,
        state: IrisState,
        policy: Policy,
        horizon: int,
        rng: Rng,
        reward: StepReward | None = None,
    ) -> Rollout:
        """Imagine `horizon` steps; sequences continue after a predicted episode end.

        The states of the rollout are `IrisFrames` `(N, H + 1)`. Reward and end are
        those received with a frame; they are zero for the first frame, which is real.
        If `reward` is given, it replaces the predicted rewards.
        """
        frames, actions = [IrisFrames(*state[:3])], []
        for _ in range(horizon):
            state = self.precompute(state)
            actions.append(policy(state))
            step = self.step(state, actions[-1]["action"], rng)
            state = step.state
            if reward is not None:
                state = state._replace(reward=reward(step))
            frames.append(IrisFrames(*state[:3]))
        actions.append(policy(state))
        return Rollout(stack_time(frames), stack_actions(actions))

    def decode(self, states: IrisFrames) -> Obs:
        return {self.key: to_float(states.image, torch.float32)}

    # Low-precision copy

    def frozen_copy(self, dtype: torch.dtype) -> IrisWorld:
        """Return a copy for imagination, with weights converted to `dtype`.

        While the actor-critic is trained, the world model does not change, so its
        weights are converted once (see `copy_weights_to`), not in every call.
        """
        frozen = copy.deepcopy(self).requires_grad_(False).eval()
        for network in (frozen, frozen.tokenizer, frozen.dynamics):
            network.dtype = dtype
        for layer in frozen.modules():  # norms compute in float32
            if isinstance(layer, AffineLayer | Embedding):
                layer.to(dtype)
        return frozen

    @torch.no_grad()
    def copy_weights_to(self, frozen: IrisWorld) -> None:
        """Copy the current weights into a frozen copy."""
        sources, targets = ([*w.parameters(), *w.buffers()] for w in (self, frozen))
        torch._foreach_copy_(targets, sources)
        for layer in frozen.modules():
            if hasattr(layer, "prepare"):  # recompute what is derived from weights
                layer.prepare()  # type: ignore[operator]

    def _i_token(self, state: IrisState) -> Tensor:
        """Return the I-token of the newest frame, precomputed if possible."""
        if state.i_token is None:
            return self.dynamics.embed_frames(state.image)
        wait_for(state.image, I_TOKEN)
        return state.i_token

    def _extend(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Append embedded tokens to the context; return outputs and new cache."""
        outputs, extended = self.dynamics(x, cache)
        assert extended is not None
        return outputs, extended
