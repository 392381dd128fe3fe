"""Decoder for observations with any number of images and vectors; see `encoder.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError
from reverie.nets.blocks import (
    MLP,
    BlockLinear,
    Linear,
    ModulesByKey,
    Norm,
    activation,
    symexp,
    symlog,
)
from reverie.nets.conv import SameConv
from reverie.nets.distributions import MSE, Categorical, Distribution
from reverie.nets.encoder import (
    ConvConfig,
    make_standardizers,
    padded_size,
    split_keys,
)
from reverie.nets.inputs import missing_value
from reverie.nets.standardize import Standardize, StandardizedMSE
from reverie.spaces import Space, Spaces


@dataclass(frozen=True)
class DecoderConfig(ConvConfig):
    """Decoder: latent states to observations."""

    outscale: float = 1.0
    """Scale of the initial output weights."""
    bspace: int = 8
    """Number of blocks of the block-diagonal layer from `deter` to the smallest feature
    map; 0 for one dense layer from `deter` and `stoch`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bspace < 0:
            raise ValueError("bspace must be at least 0")


class Decoder(nn.Module):
    """Latent states to a distribution over every observation key."""

    fast_version = "reverie.kernels.conv.decoder:FastDecoder"

    # classes of layers, which subclasses replace
    HiddenLayers: ClassVar[Callable[..., Any]] = MLP
    OutputLayer: ClassVar[Callable[..., nn.Module]] = Linear

    def __init__(self, spaces: Spaces, deter: int, stoch: int, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.images, self.vectors = split_keys(spaces, config.cnn_keys, config.mlp_keys)
        self.act = activation(config.act)
        if self.vectors:
            self.mlp = type(self).HiddenLayers(stoch + deter, config)
            heads: dict[str, nn.Module] = {}
            for key, space in self.vectors.items():
                kind, shape = "pred", space.shape  # names of layers as in DreamerV3
                if space.is_discrete:
                    kind, shape = "logits", (*shape, space.classes)
                head = type(self).OutputLayer(self.mlp.width, shape, config.outscale)
                heads[key] = nn.ModuleDict({kind: head})
            self.vec = ModulesByKey(heads)
        # names of buffers with the lowest class of a key, for keys where it is not 0
        self.lows: dict[str, str] = {}
        for i, (key, space) in enumerate(self.vectors.items()):
            if space.is_discrete and space.low.any():
                self.lows[key] = f"low{i}"
                self.register_buffer(f"low{i}", torch.tensor(space.low), False)
        self.standardizers = make_standardizers(self.images, config)
        if self.images:
            self._build_images(deter, stoch)

    def forward(
        self, deter: Float[Tensor, "*b D"], stoch: Float[Tensor, "*b Z"]
    ) -> dict[str, Distribution]:
        outputs: dict[str, Distribution] = {}
        if self.vectors:
            # stoch first, as in DreamerV3 (in the features of a state, deter is first)
            x = self.mlp(torch.cat([stoch, deter], -1))
            for key, space in self.vectors.items():
                outputs[key] = self._vector_output(key, space, x)
        if self.images:
            outputs.update(self._image_outputs(deter, stoch))
        return outputs

    def _vector_output(self, key: str, space: Space, x: Tensor) -> Distribution:
        out, dims = self.vec[key], len(space.shape)
        if space.is_discrete:
            low = self.get_buffer(self.lows[key]) if key in self.lows else None
            categorical = Categorical(out.get_submodule("logits")(x), dims)
            return _MaskedOutput(categorical, space, low)
        pred = out.get_submodule("pred")(x)
        return _MaskedOutput(self._vector_distribution(pred, dims), space)

    def _vector_distribution(self, pred: Tensor, dims: int) -> Distribution:
        transforms = (symlog, symexp) if self.config.symlog else (None, None)
        return MSE(pred, dims, *transforms)

    def _build_images(self, deter: int, stoch: int) -> None:
        """Create the layers that decode images."""
        config = self.config
        height, width = padded_size(self.images, config.mults, config.outer)
        factor = 2 ** (len(config.mults) - int(config.outer))
        depths = [config.depth * mult for mult in config.mults]
        h, w, c = self.smallest = (height // factor, width // factor, depths[-1])
        if config.bspace:
            if c % config.bspace or deter % config.bspace:
                raise UserError(
                    f"deter={deter} and the {c} channels of the decoder must both be "
                    f"divisible by bspace={config.bspace}.\n"
                    "  Fix: set bspace of the decoder to 0, or change the sizes."
                )
            self.sp0 = BlockLinear(deter, h * w * c, config.bspace)
            self.sp1 = Linear(stoch, 2 * config.units)
            self.sp1norm = Norm(config.norm, 2 * config.units)
            self.sp2 = Linear(2 * config.units, self.smallest)
            self.spnorm = Norm(config.norm, c)
        else:
            self.space = Linear(stoch + deter, self.smallest)
            self.spacenorm = Norm(config.norm, c)
        stride, transposed = (2, True) if config.strided else (1, False)
        for i in reversed(range(len(depths) - 1)):
            conv = SameConv(depths[i + 1], depths[i], config.kernel, stride, transposed)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"conv{i}norm", Norm(config.norm, depths[i]))
        channels = sum(space.shape[2] for space in self.images.values())
        if config.outer:
            stride, transposed = 1, False
        self.imgout = SameConv(
            depths[0], channels, config.kernel, stride, transposed, config.outscale
        )

    def _image_outputs(self, deter: Tensor, stoch: Tensor) -> dict[str, Distribution]:
        config, batch = self.config, deter.shape[:-1]
        deter, stoch = deter.flatten(0, -2), stoch.flatten(0, -2)
        if config.bspace:
            h, w, _ = self.smallest
            x0 = rearrange(
                self.sp0(deter), "b (g h w c) -> b h w (g c)", h=h, w=w, g=config.bspace
            )
            x1 = self.sp2(self.sp1norm.activate(self.sp1(stoch), self.act))
            x = self.spnorm.activate(x0 + x1, self.act)
        else:
            x = self.space(torch.cat([stoch, deter], -1))
            x = self.spacenorm.activate(x, self.act)
        for i in reversed(range(len(config.mults) - 1)):
            conv: SameConv = getattr(self, f"conv{i}")
            x = conv(x) if config.strided else conv.upsample_and_conv(x)
            x = getattr(self, f"conv{i}norm").activate(x, self.act)
        upsamples = not (config.strided or config.outer)
        x = self.imgout.upsample_and_conv(x) if upsamples else self.imgout(x)
        return self._split_images(x.float(), batch)

    def _split_images(self, x: Tensor, batch: torch.Size) -> dict[str, Distribution]:
        """Return a distribution per image; `x` has the channels of all images."""
        x = x if self.standardizers else self._squash(x)
        x = x.reshape(*batch, *x.shape[1:])
        outputs: dict[str, Distribution] = {}
        channels = [space.shape[2] for space in self.images.values()]
        parts = torch.split(x, channels, -1)
        for (key, space), part in zip(self.images.items(), parts, strict=True):
            height, width, _ = space.shape
            image = part[..., :height, :width, :]
            if self.standardizers:
                standardize = self.standardizers[key]
                assert isinstance(standardize, Standardize)
                outputs[key] = StandardizedMSE(image, standardize)
            else:
                outputs[key] = self._image_distribution(key, image)
        return outputs

    def _squash(self, x: Tensor) -> Tensor:
        """Map outputs of the last layer to pixels in [0, 1]."""
        return torch.sigmoid(x)

    def _image_distribution(self, key: str, image: Tensor) -> Distribution:
        return MSE(image, 3, to_unit_range)


def to_unit_range(image: Tensor) -> Tensor:
    """Scale pixels from [0, 255] to [0, 1]."""
    return image / 255


class _MaskedOutput:
    """A distribution whose loss is zero where the target is missing.

    An entry of -inf or -1 marks the key as missing in that row, see `missing_value`.
    `low` is the lowest class of a discrete key; None for 0.
    """

    def __init__(self, dist: Distribution, space: Space, low: Tensor | None = None):
        self.dist, self.dims, self.low = dist, len(space.shape), low
        self.missing = missing_value(space)

    def pred(self) -> Tensor:
        pred = self.dist.pred()
        return pred if self.low is None else pred + self.low

    def loss(self, target: Tensor) -> Tensor:
        shifted = target if self.low is None else target.long() - self.low
        if self.missing is None:
            return self.dist.loss(shifted.long())
        present = target != self.missing
        loss = self.dist.loss(torch.where(present, shifted, 0))
        all_present = present.flatten(-self.dims).all(-1) if self.dims else present
        return torch.where(all_present, loss, 0)
