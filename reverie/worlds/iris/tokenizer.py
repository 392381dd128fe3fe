"""The tokenizer of Δ-IRIS: what changed between two frames, in a few tokens.

Its encoder sees a frame, the action and the next frame, and has only K tokens to say
what the decoder cannot know; the decoder sees the frame and the action too, and draws
the next one. So tokens are spent on what is new, and most of a picture is free.

Shapes: `K` tokens of a transition, `F` features of a token, `N` codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from reverie.api import WorldLoss
from reverie.nets.residual import FrameConfig, FrameDecoder, FrameEncoder
from reverie.nets.rng import Rng
from reverie.nets.streams import Lane, beside, catch_up
from reverie.nets.transformer import Embedding
from reverie.worlds.iris.quantizer import Quantizer, QuantizerConfig
from reverie.worlds.iris.segment import Segment, mean_where, pixels, to_bytes

SEEN = Lane("seen")
"""The lane in which a frame is looked at for the decoder."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Sizes and loss scales of the tokenizer; the defaults are those for Crafter."""

    tokens: int = 4
    """Tokens of a transition; a square number, laid over the image as a grid."""
    action_planes: int = 4
    """Maps that tell the decoder about the action."""
    encoder: FrameConfig = field(default_factory=lambda: FrameConfig(64, 64))
    """Sees frame, action and next frame; `latent` channels go to the tokens."""
    frame: FrameConfig = field(default_factory=lambda: FrameConfig(64, 8))
    """Shows the decoder the frame it starts from."""
    decoder: FrameConfig = field(default_factory=lambda: FrameConfig(64, 64))
    """Draws the next frame; its `latent` follows from the others and is not used."""
    quantizer: QuantizerConfig = field(default_factory=QuantizerConfig)
    """The codebook."""
    l1_scale: float = 0.1
    """Scale of the mean distance of pixels."""
    l2_scale: float = 1.0
    """Scale of the mean squared distance of pixels."""
    worst_scale: float = 0.01
    """Scale of the squared distance of the worst pixel."""
    commit_scale: float = 0.02
    """Scale of the pull of vectors towards their codes."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or math.isqrt(self.tokens) ** 2 != self.tokens:
            raise ValueError("tokens must be a square number, such as 1, 4 or 16")
        if self.action_planes < 0:
            raise ValueError("action_planes must not be negative")
        shrinks = {c.shrink for c in (self.encoder, self.frame, self.decoder)}
        if len(shrinks) > 1:
            raise ValueError("encoder, frame and decoder must halve equally often")


class Tokenizer(nn.Module):
    """See the top of this file. Images are `(h, w, c)` bytes at its borders."""

    def __init__(self, shape: tuple[int, ...], actions: int, config: TokenizerConfig):
        super().__init__()
        self.config, self.shape = config, shape
        height, width, colours = shape
        self.sides = (config.encoder.side(height), config.encoder.side(width))
        self.grid = math.isqrt(config.tokens)
        area = math.prod(self.sides)
        latent = config.encoder.latent
        self.encoder_action = Embedding(actions, height * width)
        self.decoder_action = Embedding(actions, config.action_planes * area)
        self.quantizer = Quantizer(latent * area // config.tokens, config.quantizer)
        self.encoder = FrameEncoder(2 * colours + 1, config.encoder)
        self.frame = FrameEncoder(colours, config.frame)
        inputs = config.frame.latent + config.action_planes + latent
        self.decoder = FrameDecoder(inputs, colours, config.decoder)

    def encode(
        self,
        image: UInt8[Tensor, "R h w c"],
        action: Int[Tensor, " R"],
        after: UInt8[Tensor, "R h w c"],
        dtype: torch.dtype,
    ) -> Float[Tensor, "R K F"]:
        """Features of transitions, before they are quantised."""
        plane = self.encoder_action(action, dtype).view(*image.shape[:-1], 1)
        maps = self.encoder(
            torch.cat([pixels(image, dtype), plane, pixels(after, dtype)], -1)
        )
        return self.to_tokens(maps)

    @torch.no_grad()
    def tokenize(
        self,
        image: UInt8[Tensor, "B L h w c"],
        action: Int[Tensor, "B any"],
        dtype: torch.dtype,
    ) -> Int[Tensor, "B T K"]:
        """The tokens of all transitions of some stretches; T is L - 1."""
        first, steps = image[:, :-1].flatten(0, 1), image.shape[1] - 1
        after, act = image[:, 1:].flatten(0, 1), action[:, :steps].flatten()
        tokens: Tensor = self.quantizer(self.encode(first, act, after, dtype)).tokens
        return tokens.view(len(image), steps, -1)

    def see(
        self, image: UInt8[Tensor, "R h w c"], dtype: torch.dtype
    ) -> Float[Tensor, "R r s c2"]:
        """What the decoder is shown of a frame."""
        seen: Tensor = self.frame(pixels(image, dtype))
        return seen

    def decode(
        self,
        image: UInt8[Tensor, "R h w c"],
        action: Int[Tensor, " R"],
        features: Float[Tensor, "R K F"],
        seen: Float[Tensor, "R r s c2"] | None = None,
    ) -> Float[Tensor, "R h w c"]:
        """The next frame as numbers, not yet brought into [0, 1].

        `seen` is what was seen of the frame before it, if somebody has looked already.
        """
        dtype = features.dtype
        rows, cols = self.sides
        planes = self.decoder_action(action, dtype)
        planes = rearrange(planes, "b (c r s) -> b r s c", r=rows, s=cols)
        seen = self.see(image, dtype) if seen is None else seen
        drawn: Tensor = self.decoder(
            torch.cat([seen, planes, self.to_map(features)], -1)
        )
        return drawn.float()

    @torch.no_grad()
    def draw(
        self,
        image: UInt8[Tensor, "R h w c"],
        action: Int[Tensor, " R"],
        tokens: Int[Tensor, "R K"],
        dtype: torch.dtype,
        seen: Float[Tensor, "R r s c2"] | None = None,
    ) -> UInt8[Tensor, "R h w c"]:
        """The next frame as tokens tell it."""
        features = self.quantizer.embed(tokens, dtype)
        return to_bytes(self.decode(image, action, features, seen))

    def loss(
        self, segment: Segment, rng: Rng, dtype: torch.dtype, learn: bool = True
    ) -> WorldLoss:
        """Losses of each transition, scaled; the mean of each is the original's term.

        With `learn`, the codebook follows this batch (once per call). Pictures count
        only where both frames are real; the codebook sees every transition, as in the
        original.
        """
        config, steps = self.config, segment.image.shape[1] - 1
        shape = (len(segment.image), steps)
        before = segment.image[:, :-1].flatten(0, 1)
        after = segment.image[:, 1:].flatten(0, 1)
        action = segment.action[:, :-1].flatten()
        with beside(before, SEEN):
            seen = self.see(before, dtype)
        q = self.quantizer(self.encode(before, action, after, dtype))
        catch_up(before, SEEN)
        drawn = self.decode(before, action, q.features, seen)
        wrong = pixels(after, torch.float32) - drawn
        wrong = wrong.flatten(1)
        square = wrong.square()
        real = segment.real[:, :-1] & segment.real[:, 1:]
        commit = (q.vectors - q.codes).square().mean((-2, -1))
        losses = {
            "l1": mean_where(config.l1_scale * wrong.abs().mean(-1).view(shape), real),
            "l2": mean_where(config.l2_scale * square.mean(-1).view(shape), real),
            "worst": mean_where(config.worst_scale * square.amax(-1).view(shape), real),
            "commit": config.commit_scale * commit.view(shape),
        }
        metrics = {}
        if learn:
            vectors, tokens = q.vectors.detach().flatten(0, 1), q.tokens.flatten()
            metrics = self.quantizer.follow(vectors, tokens, rng)
        return WorldLoss(losses, q.tokens.view(*shape, config.tokens), metrics)

    def to_tokens(self, maps: Float[Tensor, "R r s c"]) -> Float[Tensor, "R K F"]:
        """Cut maps into patches, one per token; inside, channels run fastest."""
        grid = self.grid
        return rearrange(maps, "b (g p) (k q) c -> b (g k) (p q c)", g=grid, k=grid)

    def to_map(self, features: Float[Tensor, "R K F"]) -> Float[Tensor, "R r s c"]:
        rows, cols = (side // self.grid for side in self.sides)
        return rearrange(
            features, "b (g k) (p q c) -> b (g p) (k q) c", g=self.grid, p=rows, q=cols
        )
