"""The tokenizer of Δ-IRIS: an autoencoder of the change between two frames.

The encoder takes a frame, the action and the next frame and outputs K Δ-tokens. The
decoder reconstructs the next frame from the tokens, the frame and the action. So the
tokens only need to encode what frame and action do not determine.

Shapes: `R` transitions, `K` tokens of a transition, `F` features of a token, `r s c2`
axes of the smallest feature map.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from reverie.api import WorldLoss
from reverie.nets.residual import FrameDecoder, FrameEncoder
from reverie.nets.rng import Rng
from reverie.nets.streams import SideStream, on_stream, wait_for
from reverie.nets.transformer import Embedding
from reverie.worlds.iris.config import TokenizerConfig
from reverie.worlds.iris.quantizer import Quantizer
from reverie.worlds.iris.segment import (
    EpisodeSegment,
    scale_by_mask,
    to_float,
    to_uint8,
)

FRAME_FEATURES = SideStream("frame_features")
"""CUDA stream of the encoder `frame`, whose output is an input of the decoder."""


class Tokenizer(nn.Module):
    """Autoencoder of transitions between frames, with vector quantization.

    `shape` is that of a frame, and `actions` the number of actions. Images are uint8
    `(h, w, c)` in all arguments. Networks compute in `dtype`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        actions: int,
        config: TokenizerConfig,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.config, self.shape, self.dtype = config, shape, dtype
        height, width, channels = shape
        self.sides = (config.encoder.side(height), config.encoder.side(width))
        self.grid = math.isqrt(config.tokens)
        area = math.prod(self.sides)
        latent = config.encoder.latent
        self.encoder_action = Embedding(actions, height * width)
        self.decoder_action = Embedding(actions, config.action_planes * area)
        self.quantizer = Quantizer(latent * area // config.tokens, config.quantizer)
        self.encoder = FrameEncoder(2 * channels + 1, config.encoder)
        self.frame = FrameEncoder(channels, config.frame)  # for the decoder input
        inputs = config.frame.latent + config.action_planes + latent
        self.decoder = FrameDecoder(inputs, channels, config.decoder)

    def encode(
        self,
        image: UInt8[Tensor, "R h w c"],
        action: Int[Tensor, " R"],
        next_image: UInt8[Tensor, "R h w c"],
    ) -> Float[Tensor, "R K F"]:
        """Return the features of transitions, before quantization."""
        # the embedding of the action is an additional channel of the input
        plane = self.encoder_action(action, self.dtype).view(*image.shape[:-1], 1)
        before, after = (to_float(x, self.dtype) for x in (image, next_image))
        maps: Tensor = self.encoder(torch.cat([before, plane, after], -1))
        # g x k patches of p x q positions; each patch, flattened with channels last, is
        # the input of one token
        pattern, grid = "b (g p) (k q) c -> b (g k) (p q c)", self.grid
        return rearrange(maps, pattern, g=grid, k=grid)

    @torch.no_grad()
    def tokenize(
        self, image: UInt8[Tensor, "B L h w c"], action: Int[Tensor, "B any"]
    ) -> Int[Tensor, "B T K"]:
        """Return the Δ-tokens of the T = L - 1 transitions of segments."""
        before, steps = image[:, :-1].flatten(0, 1), image.shape[1] - 1
        after, actions = image[:, 1:].flatten(0, 1), action[:, :steps].flatten()
        tokens: Tensor = self.quantizer(self.encode(before, actions, after)).tokens
        return tokens.view(image.shape[0], steps, -1)

    def frame_features(
        self, image: UInt8[Tensor, "R h w c"]
    ) -> Float[Tensor, "R r s c2"]:
        """Return features of the current frame, which are an input of the decoder."""
        features: Tensor = self.frame(to_float(image, self.dtype))
        return features

    def decode(
        self,
        image: UInt8[Tensor, "R h w c"],
        action: Int[Tensor, " R"],
        features: Float[Tensor, "R K F"],
        frame_features: Float[Tensor, "R r s c2"] | None = None,
    ) -> Float[Tensor, "R h w c"]:
        """Reconstruct the next frame as floats, not clipped to [0, 1].

        `frame_features` are those of `image`, if already computed.
        """
        rows, cols = self.sides
        planes = self.decoder_action(action, features.dtype)
        planes = rearrange(planes, "b (c r s) -> b r s c", r=rows, s=cols)
        if frame_features is None:
            frame_features = self.frame_features(image)
        inputs = [frame_features, planes, self.unpatchify(features)]
        decoded: Tensor = self.decoder(torch.cat(inputs, -1))
        return decoded.float()

    @torch.no_grad()
    def decode_tokens(
        self,
        image: UInt8[Tensor, "R h w c"],
        action: Int[Tensor, " R"],
        tokens: Int[Tensor, "R K"],
        frame_features: Float[Tensor, "R r s c2"] | None = None,
    ) -> UInt8[Tensor, "R h w c"]:
        """Decode the next frame from Δ-tokens."""
        features = self.quantizer.embed(tokens, self.dtype)
        return to_uint8(self.decode(image, action, features, frame_features))

    def loss(
        self, segment: EpisodeSegment, rng: Rng, update_codebook: bool = True
    ) -> WorldLoss:
        """Return the losses `l1`, `l2`, `worst` and `commit`, each `(B, L - 1)`.

        `worst` is the largest squared error of a pixel. The losses are scaled; their
        means equal those of the original. As in the original, pixel losses are masked
        to transitions without padding, but the commitment loss and the codebook use
        every transition. `.states` are the Δ-tokens. With `update_codebook`, the
        codebook is updated and `.metrics` has its statistics; otherwise the call has no
        side effects.
        """
        config, steps = self.config, segment.image.shape[1] - 1
        shape = (len(segment.image), steps)
        before = segment.image[:, :-1].flatten(0, 1)
        after = segment.image[:, 1:].flatten(0, 1)
        action = segment.action[:, :-1].flatten()
        with on_stream(before, FRAME_FEATURES):
            frame_features = self.frame_features(before)
        quantized = self.quantizer(self.encode(before, action, after))
        wait_for(before, FRAME_FEATURES)
        decoded = self.decode(before, action, quantized.features, frame_features)
        error = (to_float(after, torch.float32) - decoded).flatten(1)
        square = error.square()
        mask = segment.real[:, :-1] & segment.real[:, 1:]  # no padding
        # unit vectors before quantization, and their nearest codes (without gradient)
        commit = (quantized.vectors - quantized.codes).square().mean((-2, -1))
        pixel_losses = {
            "l1": config.l1_scale * error.abs().mean(-1),
            "l2": config.l2_scale * square.mean(-1),
            "worst": config.worst_scale * square.amax(-1),
        }
        losses = {
            key: scale_by_mask(loss.view(shape), mask)
            for key, loss in pixel_losses.items()
        }
        losses["commit"] = config.commit_scale * commit.view(shape)
        metrics = {}
        if update_codebook:
            vectors = quantized.vectors.detach().flatten(0, 1)
            tokens = quantized.tokens.flatten()
            metrics = self.quantizer.update_codebook(vectors, tokens, rng)
        tokens = quantized.tokens.view(*shape, config.tokens)
        return WorldLoss(losses, tokens, metrics)

    def unpatchify(self, features: Float[Tensor, "R K F"]) -> Float[Tensor, "R r s c"]:
        """Arrange the features of all tokens as one feature map."""
        p, q = (side // self.grid for side in self.sides)  # size of a token's patch
        return rearrange(
            features, "b (g k) (p q c) -> b (g p) (k q) c", g=self.grid, p=p, q=q
        )
