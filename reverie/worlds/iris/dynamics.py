"""The transformer of Δ-IRIS: what will change, what it will be worth, will it end.

A time step is a block of tokens: the frame as one continuous token (I), the action, and
the K tokens of the change that followed (Δ). The output at the action foresees reward,
end and the first Δ; the output at each Δ the one after it.

    position          0    1    2    ...  K + 1
    token             I    a    Δ1   ...  ΔK
    foresees          -    Δ1   Δ2   ...  -
                      -    reward, end    -

Frames outside an episode are tokens as any other: nothing is masked but the future,
and positions count from the start of the segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from reverie.api import Metrics, WorldLoss
from reverie.nets.blocks import Norm
from reverie.nets.distributions import Categorical, SymlogTwoHot, softmax, symlog_bins
from reverie.nets.residual import FrameConfig, FrameEncoder
from reverie.nets.rng import Rng
from reverie.nets.transformer import (
    Cache,
    Dense,
    Embedding,
    Transformer,
    TransformerConfig,
)
from reverie.worlds.iris.segment import Segment, mean_where, pixels

BINS = 255
"""Bins of two-hot rewards."""
SIGNS = 3
"""Classes of sign rewards."""


@dataclass(frozen=True)
class DynamicsConfig:
    """Sizes and loss scales of the dynamics; the defaults are those for Crafter."""

    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    """Layers, heads, width, and how many time steps it looks at."""
    frame: FrameConfig = field(default_factory=lambda: FrameConfig(32, 8))
    """Makes the I-token: its small map, flattened, must have the width above."""
    two_hot_rewards: bool = True
    """Foresee rewards as numbers (two-hot in symlog); otherwise only their sign."""
    latents_scale: float = 1.0
    """Scale of the loss of Δ-tokens."""
    rewards_scale: float = 1.0
    """Scale of the loss of rewards."""
    ends_scale: float = 1.0
    """Scale of the loss of ends."""


class Foresight(NamedTuple):
    """Logits at the positions that foresee something, in order."""

    latents: Float[Tensor, "B P N"]
    rewards: Float[Tensor, "B Q R"]
    ends: Float[Tensor, "B Q two"]


class Head(nn.Module):
    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.hidden, self.out = Dense(width, width), Dense(width, outputs)

    def forward(self, x: Float[Tensor, "*b E"]) -> Float[Tensor, "*b O"]:
        y: Tensor = self.out(F.relu(self.hidden(x)))
        return y.float()


class Dynamics(nn.Module):
    """See the top of this file."""

    bins: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        actions: int,
        tokens: int,
        codes: int,
        config: DynamicsConfig,
    ):
        super().__init__()
        self.config, self.tokens, self.block = config, tokens, tokens + 2
        embed = config.transformer.width
        self.frame = FrameEncoder(shape[-1], config.frame)
        self.frame_norm = Norm("layer1em5", embed)
        self.action = Embedding(actions, embed)
        self.latent = Embedding(codes, embed)
        self.transformer = Transformer(self.block, config.transformer)
        self.latents = Head(embed, codes)
        self.rewards = Head(embed, BINS if config.two_hot_rewards else SIGNS)
        self.ends = Head(embed, 2)
        self.register_buffer("bins", symlog_bins(BINS), persistent=False)

    def embed_frames(
        self, image: UInt8[Tensor, "*b h w c"], dtype: torch.dtype
    ) -> Float[Tensor, "*b E"]:
        """I-tokens."""
        maps = self.frame(pixels(image.flatten(0, -4), dtype))
        tokens: Tensor = self.frame_norm(maps.flatten(1))
        return tokens.view(*image.shape[:-3], -1)

    def sequence(
        self,
        image: UInt8[Tensor, "B L h w c"],
        action: Int[Tensor, "B L"],
        tokens: Int[Tensor, "B L K"],
        dtype: torch.dtype,
    ) -> Float[Tensor, "B S E"]:
        """Whole blocks of embeddings, one after the other."""
        return self.blocks(self.embed_frames(image, dtype), action, tokens)

    def blocks(
        self,
        frames: Float[Tensor, "B L E"],
        action: Int[Tensor, "B L"],
        tokens: Int[Tensor, "B L K"],
    ) -> Float[Tensor, "B S E"]:
        """The same, for frames that are I-tokens already."""
        dtype = frames.dtype
        parts = [
            frames[:, :, None],
            self.action(action, dtype)[:, :, None],
            self.latent(tokens, dtype),
        ]
        return torch.cat(parts, 2).flatten(1, 2)

    def forward(
        self, sequence: Float[Tensor, "B S E"], cache: Cache | None = None
    ) -> tuple[Float[Tensor, "B S E"], Cache | None]:
        """Outputs for tokens that follow those in the cache."""
        outputs: tuple[Tensor, Cache | None] = self.transformer(sequence, cache)
        return outputs

    def foresee(self, outputs: Float[Tensor, "B S E"], before: int = 0) -> Foresight:
        """What outputs say about what comes, when `before` tokens preceded them."""
        at_action = self._at(outputs, before, 1)
        return Foresight(
            self.latents(self._at(outputs, before, self.tokens)),
            self.rewards(at_action),
            self.ends(at_action),
        )

    def reward(self, logits: Float[Tensor, "*b R"], rng: Rng) -> Float[Tensor, "*b"]:
        """The expected reward, or where only signs are known, a drawn one."""
        if self.config.two_hot_rewards:
            return SymlogTwoHot(logits, self.bins).pred()
        return rng.categorical(softmax(logits)).float() - 1

    def loss(
        self, segment: Segment, tokens: Int[Tensor, "B T K"], dtype: torch.dtype
    ) -> WorldLoss:
        """Losses of each row, scaled; the mean of each is the original's term.

        `tokens` describe the transitions between the rows. As in the original, a row
        whose *own* frame is real counts, even if what follows it is padding.
        """
        config = self.config
        filled = F.pad(tokens, (0, 0, 0, 1))  # nothing follows the last row
        sequence = self.sequence(segment.image, segment.action, filled, dtype)
        outputs, _ = self(sequence)
        seen = self.foresee(outputs)

        latents = rearrange(seen.latents, "b (l k) n -> b l k n", k=self.tokens)[:, :-1]
        guess = Categorical(latents)
        real = segment.real[:, :-1]
        right = (guess.pred() == tokens).float().mean(-1)
        losses = {
            "latents": mean_where(
                config.latents_scale * guess.loss(tokens).mean(-1), real
            ),
            "rewards": mean_where(
                config.rewards_scale * self._reward_loss(seen.rewards, segment.reward),
                segment.real,
            ),
            "ends": mean_where(
                config.ends_scale * Categorical(seen.ends).loss(segment.end.long()),
                segment.real,
            ),
        }
        metrics: Metrics = {"latent_accuracy": mean_where(right, real).mean()}
        return WorldLoss(losses, outputs, metrics)

    def _at(
        self, x: Float[Tensor, "B S E"], before: int, count: int
    ) -> Float[Tensor, "B P E"]:
        """Outputs at the action and those behind it, `count` places of each block."""
        places = range(1, 1 + count)
        if not before % self.block and not x.shape[1] % self.block:
            blocks = rearrange(x, "b (l k) e -> b l k e", k=self.block)
            return blocks[:, :, 1 : 1 + count].flatten(1, 2)
        rows = head_rows(places, x.shape[1], before, self.block)
        # slices, since an index tensor would have to be brought to the device
        return torch.cat([x[:, :0], *(x[:, i : i + 1] for i in rows)], 1)

    def _reward_loss(
        self, logits: Float[Tensor, "B L R"], reward: Float[Tensor, "B L"]
    ) -> Float[Tensor, "B L"]:
        if self.config.two_hot_rewards:
            return SymlogTwoHot(logits, self.bins).loss(reward)
        return Categorical(logits).loss(torch.sign(reward).long() + 1)


def head_rows(places: range, new: int, before: int, block: int) -> list[int]:
    """Which of `new` tokens after `before` others stand at these places of a block."""
    return [i for i in range(new) if (before + i) % block in places]
