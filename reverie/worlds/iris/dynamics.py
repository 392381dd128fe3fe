"""The transformer of Δ-IRIS: predicts Δ-tokens, rewards and episode ends.

A time step is a block of tokens: the I-token (a continuous embedding of the frame), the
action, and the K Δ-tokens of the transition to the next frame. The output at the action
predicts reward, end and the first Δ-token; the output at each Δ-token predicts the next
one.

    position          0    1    2    ...  K + 1
    token             I    a    Δ1   ...  ΔK
    predicts          -    Δ1   Δ2   ...  -
                      -    reward, end    -

Padding frames outside the episode are embedded like all others: the attention mask is
causal only, and positions are counted from the start of the segment.

Shapes: `L` frames, `K` Δ-tokens per frame, `S` positions, `C` codes, `R` reward
classes, `P` positions that predict Δ-tokens, `Q` positions that predict reward and end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from reverie.api import Metrics, WorldLoss
from reverie.nets.blocks import Norm
from reverie.nets.distributions import (
    Categorical,
    DeltaIrisTwoHot,
    softmax,
    symlog_bins,
)
from reverie.nets.residual import FrameEncoder
from reverie.nets.rng import Rng
from reverie.nets.transformer import Cache, Dense, Embedding, Transformer
from reverie.worlds.iris.config import DynamicsConfig
from reverie.worlds.iris.segment import EpisodeSegment, scale_by_mask, to_float

BINS = 255
"""Bins of two-hot rewards."""
SIGNS = 3
"""Classes of rewards if only their sign is predicted: -1, 0 and 1."""


class PredictionLogits(NamedTuple):
    """Logits of all predictions, in sequence order."""

    latents: Float[Tensor, "B P C"]
    rewards: Float[Tensor, "B Q R"]
    ends: Float[Tensor, "B Q two"]


class LogitHead(nn.Module):
    """Two dense layers with ReLU in between; logits are float32."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.hidden, self.out = Dense(width, width), Dense(width, outputs)

    def forward(self, x: Float[Tensor, "*b E"]) -> Float[Tensor, "*b O"]:
        y: Tensor = self.out(F.relu(self.hidden(x)))
        return y.float()


class TransformerDynamics(nn.Module):
    """Predicts reward, end and Δ-tokens of every time step.

    `shape` is the shape of a frame, `actions` the number of actions, `tokens` the
    number of Δ-tokens per frame, and `codes` the number of values of a Δ-token.
    """

    bins: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        actions: int,
        tokens: int,
        codes: int,
        config: DynamicsConfig,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.tokens, self.tokens_per_step = tokens, tokens + 2
        embed = config.transformer.width
        self.frame = FrameEncoder(shape[-1], config.frame)  # I-tokens
        self.frame_norm = Norm("layer1em5", embed)
        self.action = Embedding(actions, embed)
        self.latent = Embedding(codes, embed)  # of Δ-tokens
        self.transformer = Transformer(self.tokens_per_step, config.transformer)
        self.latents = LogitHead(embed, codes)  # next Δ-token
        self.rewards = LogitHead(embed, BINS if config.two_hot_rewards else SIGNS)
        self.ends = LogitHead(embed, 2)
        self.register_buffer("bins", symlog_bins(BINS), persistent=False)

    def embed_frames(
        self, image: UInt8[Tensor, "*b h w c"], dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*b E"]:
        """Return the I-tokens of frames, computed in another dtype if given."""
        maps = self.frame(to_float(image.flatten(0, -4), dtype or self.dtype))
        tokens: Tensor = self.frame_norm(maps.flatten(1))
        return tokens.view(*image.shape[:-3], -1)

    def embed_sequence(
        self,
        i_tokens: Float[Tensor, "B L E"],
        action: Int[Tensor, "B L"],
        tokens: Int[Tensor, "B L K"],
    ) -> Float[Tensor, "B S E"]:
        """Embed actions and Δ-tokens, and interleave them with I-tokens."""
        dtype = i_tokens.dtype
        block = [
            i_tokens[:, :, None],
            self.action(action, dtype)[:, :, None],
            self.latent(tokens, dtype),
        ]
        return torch.cat(block, 2).flatten(1, 2)

    def forward(
        self, sequence: Float[Tensor, "B S E"], cache: Cache | None = None
    ) -> tuple[Float[Tensor, "B S E"], Cache | None]:
        """Return the outputs for tokens that follow those in the KV cache."""
        outputs: tuple[Tensor, Cache | None] = self.transformer(sequence, cache)
        return outputs

    def predict(self, outputs: Float[Tensor, "B S E"]) -> PredictionLogits:
        """Apply the heads to the outputs of whole time steps."""
        blocks = rearrange(outputs, "b (l k) e -> b l k e", k=self.tokens_per_step)
        at_action = blocks[:, :, 1]
        latents = self.latents(blocks[:, :, 1 : 1 + self.tokens].flatten(1, 2))
        return PredictionLogits(latents, self.rewards(at_action), self.ends(at_action))

    def reward(self, logits: Float[Tensor, "*b R"], rng: Rng) -> Float[Tensor, "*b"]:
        """Return the expected reward, or sample its sign without `two_hot_rewards`."""
        if self.config.two_hot_rewards:
            return DeltaIrisTwoHot(logits, self.bins).pred()
        return rng.categorical(softmax(logits)).float() - 1

    def loss(self, segment: EpisodeSegment, tokens: Int[Tensor, "B T K"]) -> WorldLoss:
        """Return the scaled losses of each frame.

        `tokens` are the Δ-tokens of the T = L - 1 transitions between the L frames. The
        mean of each loss equals that of the original code. As in the original code, a
        loss is masked only if its *own* frame is padding, not if the next frame is.
        """
        config = self.config
        padded = F.pad(tokens, (0, 0, 0, 1))  # the last frame has no transition
        i_tokens = self.embed_frames(segment.image)
        sequence = self.embed_sequence(i_tokens, segment.action, padded)
        outputs, _ = self(sequence)
        logits = self.predict(outputs)

        latents = rearrange(logits.latents, "b (l k) c -> b l k c", k=self.tokens)
        dist = Categorical(latents[:, :-1])
        rewards = self._reward_loss(logits.rewards, segment.reward)
        ends = Categorical(logits.ends).loss(segment.end.long())
        mask = segment.real
        losses = {
            "latents": scale_by_mask(
                config.latents_scale * dist.loss(tokens).mean(-1), mask[:, :-1]
            ),
            "rewards": scale_by_mask(config.rewards_scale * rewards, mask),
            "ends": scale_by_mask(config.ends_scale * ends, mask),
        }
        correct = (dist.pred() == tokens).float().mean(-1)
        accuracy = scale_by_mask(correct, mask[:, :-1]).mean()
        metrics: Metrics = {"latent_accuracy": accuracy}
        return WorldLoss(losses, outputs, metrics)

    def _reward_loss(
        self, logits: Float[Tensor, "B L R"], reward: Float[Tensor, "B L"]
    ) -> Float[Tensor, "B L"]:
        """Return the cross-entropy of two-hot rewards, or of their signs."""
        if self.config.two_hot_rewards:
            return DeltaIrisTwoHot(logits, self.bins).loss(reward)
        return Categorical(logits).loss(torch.sign(reward).long() + 1)


class ITokenEncoder(nn.Module):
    """Encodes frames as I-tokens for other agents; meets `capabilities.ObsEncoder`."""

    def __init__(self, dynamics: TransformerDynamics, key: str):
        super().__init__()
        self.dynamics, self.keys = dynamics, [key]
        self.width = dynamics.config.transformer.width

    def forward(
        self, obs: dict[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "*b E"]:
        return self.dynamics.embed_frames(obs[self.keys[0]], dtype)
