"""Configs of the Δ-IRIS world model; the defaults are the original's for Crafter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from reverie.api import UserError
from reverie.nets.residual import FrameConfig
from reverie.nets.transformer import TransformerConfig


@dataclass(frozen=True)
class QuantizerConfig:
    """Vector quantization with a codebook."""

    codes: int = 1024
    """Codebook size; a power of two."""
    width: int = 64
    """Dimension of a code."""
    revive_until: int | None = 0
    """Number of updates, from the start, in which unused codes may be re-initialized;
    none for no limit. If the codebook is about to collapse, they are re-initialized at
    any time."""

    def __post_init__(self) -> None:
        if self.codes < 2 or self.codes & (self.codes - 1):
            raise ValueError("codes must be a power of two")
        if self.width < 1:
            raise ValueError("width must be at least 1")


@dataclass(frozen=True)
class TokenizerConfig:
    """Sizes and loss scales of the tokenizer."""

    tokens: int = 4
    """Δ-tokens per transition; a square number, arranged as a grid over the image."""
    action_planes: int = 4
    """Channels of the decoder input that represent the action."""
    encoder: FrameConfig = field(default_factory=lambda: FrameConfig(64, 64))
    """Encoder of frame, action and next frame; its output is quantized to tokens."""
    frame: FrameConfig = field(default_factory=lambda: FrameConfig(64, 8))
    """Encoder of the current frame for the decoder input."""
    decoder: FrameConfig = field(default_factory=lambda: FrameConfig(64, 64))
    """Decoder of the next frame; its `latent` is not used."""
    quantizer: QuantizerConfig = field(default_factory=QuantizerConfig)
    """Codebook."""
    l1_scale: float = 0.1
    """Scale of the mean absolute pixel error."""
    l2_scale: float = 1.0
    """Scale of the mean squared pixel error."""
    worst_scale: float = 0.01
    """Scale of the largest squared pixel error of a frame."""
    commit_scale: float = 0.02
    """Scale of the commitment loss."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or math.isqrt(self.tokens) ** 2 != self.tokens:
            raise ValueError("tokens must be a square number, such as 1, 4 or 16")
        if self.action_planes < 0:
            raise ValueError("action_planes must not be negative")
        networks = (self.encoder, self.frame, self.decoder)
        if len({network.downsampling for network in networks}) > 1:
            raise ValueError("encoder, frame and decoder must have equal downsampling")


@dataclass(frozen=True)
class DynamicsConfig:
    """Sizes and loss scales of the transformer dynamics."""

    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    """Layers, heads, width and context length in time steps."""
    frame: FrameConfig = field(default_factory=lambda: FrameConfig(32, 8))
    """Encoder of frames as I-tokens; the size of its flattened output must be the width
    of the transformer."""
    two_hot_rewards: bool = True
    """Predict rewards as two-hot distributions in symlog space; otherwise predict only
    their sign."""
    latents_scale: float = 1.0
    """Scale of the Δ-token loss."""
    rewards_scale: float = 1.0
    """Scale of the reward loss."""
    ends_scale: float = 1.0
    """Scale of the episode-end loss."""


def check_image_size(
    shape: tuple[int, ...], tokenizer: TokenizerConfig, dynamics: DynamicsConfig
) -> None:
    """Raise a `UserError` if the networks do not accept images of this shape."""
    height, width, _ = shape
    grid, halvings = math.isqrt(tokenizer.tokens), sum(tokenizer.encoder.halve)
    divisor = grid * tokenizer.encoder.downsampling
    side = _fitting_side(divisor, dynamics)
    resize = "--configs iris_small, which resizes images to 32x32, or "
    # a stronger reduction of the resolution would lose too much detail
    if side and 4 * side >= min(height, width):
        resize = (
            f"--env.resize {side} {side} (for recordings --offline.read.size {side} "
            f"{side}), or "
        )
    if height % divisor or width % divisor:
        raise UserError(
            f"Images of {height}x{width} cannot be halved {halvings} times and then "
            f"divided into {grid}x{grid} tokens.\n  Fix: {resize}use images whose "
            f"sides are multiples of {divisor}."
        )
    area = dynamics.frame.side(height) * dynamics.frame.side(width)
    latent, embed = dynamics.frame.latent, dynamics.transformer.width
    if area * latent == embed:
        return
    heads = dynamics.transformer.heads
    candidates = range(1, embed // area + heads + 1)
    latents = [n for n in candidates if area * n % heads == 0]
    nearest = min(latents, key=lambda n: abs(area * n - embed))
    fix = (
        f"set world_model.frame.latent to {nearest} and "
        f"world_model.transformer.width to {area * nearest}"
    )
    if area * nearest > 8 * embed:  # the transformer would be too large
        fix = "add downsampling: longer `mults` and `halve`, the same in each network"
    raise UserError(
        f"Images of {height}x{width} give I-tokens of size {area} * {latent}, but the "
        f"transformer has width {embed}.\n  Fix: {resize}{fix}"
    )


def _fitting_side(divisor: int, dynamics: DynamicsConfig) -> int | None:
    """Return the side of square images that fit tokenizer and transformer, if any.

    The tokenizer needs sides that are multiples of `divisor`.
    """
    area, remainder = divmod(dynamics.transformer.width, dynamics.frame.latent)
    side = math.isqrt(area) * dynamics.frame.downsampling
    is_exact = not remainder and math.isqrt(area) ** 2 == area
    return side if is_exact and side % divisor == 0 else None
