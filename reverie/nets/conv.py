"""Encoder and decoder for any mix of images and vectors.

Images are halved (and in the decoder doubled) once per entry of `mults`, and the
smallest map must have 3 to 16 pixels a side. An image that the halvings do not divide
is padded at the bottom and right with mid-grey, up to the next size they do; the
decoder draws the padded canvas and crops it, so losses only see true pixels. Images of
several sizes share the canvas of the largest.

Between layers, images are `(rows, h, w, c)`; the convolutions see the same memory as
channels-last `(rows, c, h, w)`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError
from reverie.nets.blocks import (
    MLP,
    BlockLinear,
    ByKey,
    Kernel,
    Linear,
    Norm,
    activation,
    symexp,
    symlog,
)
from reverie.nets.distributions import MSE, Categorical, Output
from reverie.nets.inputs import Concat
from reverie.nets.standardize import Standard, StandardMSE
from reverie.spaces import Space, Spaces, agent_obs_space

SMALLEST, LARGEST = 3, 16
"""Allowed sides of the smallest feature map."""


@dataclass(frozen=True)
class EncoderConfig:
    """How observations become tokens."""

    depth: int = 64
    """Channels of the first stage, before `mults`."""
    mults: tuple[int, ...] = (2, 3, 4, 4)
    """Channel multiple of each stage; their number is the number of halvings."""
    layers: int = 3
    """Layers of the vector branch."""
    units: int = 1024
    """Width of the vector branch."""
    act: str = "silu"
    """Activation."""
    norm: str = "rms"
    """Norm: rms, layer or none."""
    symlog: bool = True
    """Squash numbers before the first layer."""
    outer: bool = False
    """Keep the full resolution in the first stage."""
    kernel: int = 5
    """Side of the convolution kernels."""
    strided: bool = False
    """Halve by strided convolutions instead of max-pooling."""
    standard: Literal["none", "batch", "dataset"] = "none"
    """Take out the mean and deviation of pixels: of the batch, or of all recordings;
    otherwise images are only centred."""
    minstd: float = 1e-3
    """Least deviation to divide by then."""
    cnn_keys: str = ".*"
    """Pattern of the image keys to see; it must match the whole key."""
    mlp_keys: str = ".*"
    """Pattern of the other keys to see; it must match the whole key."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class DecoderConfig:
    """How latents become observations again."""

    depth: int = 64
    """Channels of the last stage, before `mults`."""
    mults: tuple[int, ...] = (2, 3, 4, 4)
    """Channel multiple of each stage, from the image inwards."""
    layers: int = 3
    """Layers of the vector branch."""
    units: int = 1024
    """Width of the vector branch; twice that for the way into images."""
    act: str = "silu"
    """Activation."""
    norm: str = "rms"
    """Norm: rms, layer or none."""
    outscale: float = 1.0
    """Scale of the initial output weights."""
    symlog: bool = True
    """Predict numbers in symlog space."""
    outer: bool = False
    """Keep the full resolution in the last stage."""
    kernel: int = 5
    """Side of the convolution kernels."""
    bspace: int = 8
    """Blocks of the layer from `deter` to the smallest map; 0 for one dense layer."""
    strided: bool = False
    """Double by strided transposed convolutions instead of repeating pixels."""
    standard: Literal["none", "batch", "dataset"] = "none"
    """Draw images with mean and deviation taken out, as the encoder sees them."""
    minstd: float = 1e-3
    """Least deviation to divide by then."""
    cnn_keys: str = ".*"
    """Pattern of the image keys to draw; it must match the whole key."""
    mlp_keys: str = ".*"
    """Pattern of the other keys to predict; it must match the whole key."""

    def __post_init__(self) -> None:
        _check(self)
        if self.bspace < 0:
            raise ValueError("bspace must be at least 0")


def _check(config: EncoderConfig | DecoderConfig) -> None:
    sizes = (config.depth, config.units, config.kernel, len(config.mults))
    if min(*sizes, *config.mults) < 1 or config.layers < 0:
        raise ValueError(
            "depth, units, kernel and all of mults must be at least 1, and layers at "
            "least 0"
        )
    for pattern in (config.cnn_keys, config.mlp_keys):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{pattern!r} is not a regular expression ({error})"
            ) from None


class Conv(Kernel):
    """A 'same' convolution; `stride` 2 halves, and doubles if `transposed`."""

    def __init__(
        self,
        inputs: int,
        units: int,
        kernel: int,
        stride: int = 1,
        transposed: bool = False,
        outscale: float = 1.0,
    ):
        shape = (units, inputs, kernel, kernel)
        super().__init__(shape, units, inputs * kernel * kernel, outscale)
        self.weight.data = self.weight.data.to(memory_format=torch.channels_last)
        self.kernel, self.stride, self.transposed = kernel, stride, transposed

    @staticmethod
    def fast_cpu_version() -> type[nn.Module]:
        from reverie.kernels.conv.upsample_cpu import FusedUpsampleConv

        return FusedUpsampleConv

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c2"]:
        weight, bias = self.cast(x.dtype)
        x = x.permute(0, 3, 1, 2)
        if self.transposed:
            y = self._double(x, weight, bias)
        else:
            # 'same' for an even size: what cannot be split evenly goes right and below
            total = max(0, self.kernel - self.stride)
            pad = total // 2
            if total % 2:
                x, pad = F.pad(x, (pad, total - pad, pad, total - pad)), 0
            y = F.conv2d(x, weight, bias, self.stride, pad)
        return y.permute(0, 2, 3, 1)

    def after_doubling(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 o"]:
        """The convolution of a map in which every pixel is there four times."""
        y: Tensor = self(double(x))
        return y

    def _double(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """A correlation with the input spread out over every second pixel."""
        before = math.ceil((self.kernel + self.stride - 2) / 2)
        weight = weight.flip(2, 3).transpose(0, 1)
        pad = self.kernel - 1 - before
        y = F.conv_transpose2d(x, weight, bias, self.stride, pad)
        return y[..., : x.shape[-2] * self.stride, : x.shape[-1] * self.stride]


def halve(x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
    """The largest of every 2 by 2 pixels."""
    return F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


def double(x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
    """Every pixel four times."""
    y = F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2.0, mode="nearest")
    return y.permute(0, 2, 3, 1)


def split_keys(spaces: Spaces, cnn_keys: str, mlp_keys: str) -> tuple[Spaces, Spaces]:
    """The images and the other keys that an encoder or decoder is told to handle."""
    images, vectors = {}, {}
    for key, space in agent_obs_space(spaces).items():
        if space.is_image:
            if re.fullmatch(cnn_keys, key):
                images[key] = space
        elif re.fullmatch(mlp_keys, key):
            if len(space.shape) > 2:
                raise UserError(
                    f"Observation {key!r} is {space.dtype} of shape {space.shape}, "
                    "which is neither an image nor a vector.\n"
                    "  Fix: make it a uint8 (h, w, c) image, flatten it, or leave it "
                    "out with mlp_keys."
                )
            vectors[key] = space
    return images, vectors


def canvas(images: Spaces, mults: tuple[int, ...], outer: bool) -> tuple[int, int]:
    """The padded height and width that holds every image."""
    halvings = len(mults) - int(outer)
    factor = 2**halvings
    sides = [max(space.shape[axis] for space in images.values()) for axis in (0, 1)]
    padded = [math.ceil(side / factor) * factor for side in sides]
    if all(SMALLEST <= side // factor <= LARGEST for side in padded):
        return padded[0], padded[1]
    low, high = (SMALLEST - 1) * factor + 1, LARGEST * factor
    message = (
        f"Images of {sides[0]}x{sides[1]} pixels do not fit {halvings} halvings, which "
        f"take sides of {low} to {high}."
    )
    fewest = 0 if outer else 1
    for stages in sorted(range(fewest, 8), key=lambda n: abs(n - halvings)):
        if all(SMALLEST <= math.ceil(side / 2**stages) <= LARGEST for side in sides):
            count = stages + int(outer)
            longer = (*mults, *mults[-1:] * count)
            fits = (*longer[: count - 1], mults[-1])
            flag = " ".join(str(mult) for mult in fits)
            raise UserError(
                f"{message}\n"
                f"  Fix: --env.resize 64 64, or --dreamer.enc.mults {flag} and "
                f"--dreamer.dec.mults {flag}"
            )
    raise UserError(f"{message}\n  Fix: --env.resize 64 64")


class Encoder(nn.Module):
    """Observations to one token per step: vector features first, then the image's."""

    def __init__(self, spaces: Spaces, config: EncoderConfig):
        super().__init__()
        self.config = config
        images, vectors = split_keys(spaces, config.cnn_keys, config.mlp_keys)
        if not images and not vectors:
            seen = ", ".join(agent_obs_space(spaces)) or "none at all"
            raise UserError(
                f"There is nothing to see: the observation keys are {seen}.\n"
                "  Fix: give the environment an observation besides reward and flags, "
                "or widen `--dreamer.enc.cnn_keys` and `--dreamer.enc.mlp_keys`."
            )
        self.act = activation(config.act)
        self.imgkeys, self.veckeys = sorted(images), sorted(vectors)
        self.width = 0
        if vectors:
            self.concat = Concat(vectors, symlog if config.symlog else None)
            width = self.concat.width
            for i in range(config.layers):
                self.add_module(f"mlp{i}", Linear(width, config.units))
                self.add_module(f"mlp{i}norm", Norm(config.norm, config.units))
                width = config.units
            self.width += width
        if images:
            self.canvas = canvas(images, config.mults, config.outer)
            h, w = self.canvas
            channels = sum(space.shape[2] for space in images.values())
            for i, mult in enumerate(config.mults):
                stride = 1 if (config.outer and i == 0) else 2
                step = stride if config.strided else 1
                units = config.depth * mult
                self.add_module(f"cnn{i}", Conv(channels, units, config.kernel, step))
                self.add_module(f"cnn{i}norm", Norm(config.norm, units))
                channels, h, w = units, h // stride, w // stride
            self.width += h * w * channels
            self.standards = make_standards(images, config)

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.conv.encoder import FastEncoder

        return FastEncoder

    def forward(
        self, obs: dict[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "*b E"]:
        parts = []
        if self.veckeys:
            parts.append(self._vectors(obs, dtype))
        if self.imgkeys:
            parts.append(self._images([obs[key] for key in self.imgkeys], dtype))
        return torch.cat(parts, -1)

    def _vectors(self, obs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        x: Tensor = self.concat(obs, dtype)
        for i in range(self.config.layers):
            x = getattr(self, f"mlp{i}")(x)
            x = self.act(getattr(self, f"mlp{i}norm")(x))
        return x

    def _images(self, images: list[Tensor], dtype: torch.dtype) -> Tensor:
        batch = images[0].shape[:-3]
        h, w = self.canvas
        centered = [
            self._centre(key, image.reshape(-1, *image.shape[-3:]), dtype)
            for key, image in zip(self.imgkeys, images, strict=True)
        ]
        x = torch.cat(
            [F.pad(x, (0, 0, 0, w - x.shape[2], 0, h - x.shape[1])) for x in centered],
            -1,
        )
        for i in range(len(self.config.mults)):
            x = getattr(self, f"cnn{i}")(x)
            if not self.config.strided and not (self.config.outer and i == 0):
                x = halve(x)
            x = self.act(getattr(self, f"cnn{i}norm")(x))
        return x.reshape(*batch, -1)  # flattened in (h, w, c) order

    def _centre(self, key: str, image: Tensor, dtype: torch.dtype) -> Tensor:
        if self.standards is None:
            return image.to(dtype) / 255 - 0.5
        standardised: Tensor = self.standards[key](image.float() / 255)
        return standardised.to(dtype)


class Decoder(nn.Module):
    """Latents to a prediction of every observation key."""

    def __init__(self, spaces: Spaces, deter: int, stoch: int, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.images, self.vectors = split_keys(spaces, config.cnn_keys, config.mlp_keys)
        self.act = activation(config.act)
        if self.vectors:
            self.mlp = MLP(
                stoch + deter, config.layers, config.units, config.act, config.norm
            )
            self.vec = ByKey(
                {
                    key: make_vector_out(space, self.mlp.width, config.outscale)
                    for key, space in self.vectors.items()
                }
            )
        self.lows: dict[str, str] = {}  # of classes that do not count from zero
        for i, (key, space) in enumerate(self.vectors.items()):
            if space.is_discrete and space.low.any():
                self.lows[key] = f"low{i}"
                self.register_buffer(f"low{i}", torch.tensor(space.low), False)
        self.standards = make_standards(self.images, config)
        if self.images:
            self._build_images(deter, stoch)

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.conv.decoder import FastDecoder

        return FastDecoder

    def forward(
        self, deter: Float[Tensor, "*b D"], stoch: Float[Tensor, "*b Z"]
    ) -> dict[str, Output]:
        outs: dict[str, Output] = {}
        if self.vectors:
            # this one place has the stochastic half first
            x = self.mlp(torch.cat([stoch, deter], -1))
            for key, space in self.vectors.items():
                outs[key] = self._vector(key, space, x)
        if self.images:
            outs.update(self._draw(deter, stoch))
        return outs

    def _vector(self, key: str, space: Space, x: Tensor) -> Output:
        out, dims = self.vec[key], len(space.shape)
        if space.is_discrete:
            low = self.get_buffer(self.lows[key]) if key in self.lows else None
            choice = Categorical(out.get_submodule("logits")(x), dims)
            return _Seen(choice, space, low)
        pred = out.get_submodule("pred")(x)
        squashing = (symlog, symexp) if self.config.symlog else (None, None)
        return _Seen(MSE(pred, dims, *squashing), space)

    def _build_images(self, deter: int, stoch: int) -> None:
        config = self.config
        height, width = canvas(self.images, config.mults, config.outer)
        factor = 2 ** (len(config.mults) - int(config.outer))
        depths = [config.depth * mult for mult in config.mults]
        h, w, c = self.smallest = (height // factor, width // factor, depths[-1])
        if config.bspace:
            if c % config.bspace or deter % config.bspace:
                raise UserError(
                    f"The decoder cuts deter={deter} and {c} channels into "
                    f"{config.bspace} blocks, which does not divide both.\n"
                    "  Fix: set `--dreamer.dec.bspace 0` or change the sizes."
                )
            self.sp0 = BlockLinear(deter, h * w * c, config.bspace)
            self.sp1 = Linear(stoch, 2 * config.units)
            self.sp1norm = Norm(config.norm, 2 * config.units)
            self.sp2 = Linear(2 * config.units, self.smallest)
            self.spnorm = Norm(config.norm, c)
        else:
            self.space = Linear(stoch + deter, self.smallest)
            self.spacenorm = Norm(config.norm, c)
        stride, strided = (2, True) if config.strided else (1, False)
        for i in reversed(range(len(depths) - 1)):
            conv = Conv(depths[i + 1], depths[i], config.kernel, stride, strided)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"conv{i}norm", Norm(config.norm, depths[i]))
        channels = sum(space.shape[2] for space in self.images.values())
        if config.outer:
            stride, strided = 1, False
        self.imgout = Conv(
            depths[0], channels, config.kernel, stride, strided, config.outscale
        )

    def _draw(self, deter: Tensor, stoch: Tensor) -> dict[str, Output]:
        config, batch = self.config, deter.shape[:-1]
        deter, stoch = deter.flatten(0, -2), stoch.flatten(0, -2)
        if config.bspace:
            h, w, _ = self.smallest
            x0 = rearrange(
                self.sp0(deter), "b (g h w c) -> b h w (g c)", h=h, w=w, g=config.bspace
            )
            x1 = self.sp2(self.act(self.sp1norm(self.sp1(stoch))))
            x = self.act(self.spnorm(x0 + x1))
        else:
            x = self.act(self.spacenorm(self.space(torch.cat([stoch, deter], -1))))
        for i in reversed(range(len(config.mults) - 1)):
            conv: Conv = getattr(self, f"conv{i}")
            x = conv(x) if config.strided else conv.after_doubling(x)
            x = self.act(getattr(self, f"conv{i}norm")(x))
        fine = config.strided or config.outer
        x = self.imgout(x) if fine else self.imgout.after_doubling(x)
        x = x.float() if self.standards else torch.sigmoid(x.float())
        x = x.reshape(*batch, *x.shape[1:])
        outs: dict[str, Output] = {}
        channels = [space.shape[2] for space in self.images.values()]
        parts = torch.split(x, channels, -1)
        for (key, space), part in zip(self.images.items(), parts, strict=True):
            height, width, _ = space.shape
            drawn = part[..., :height, :width, :]
            outs[key] = MSE(drawn, 3, _as_fraction)
            if self.standards:
                standard = self.standards[key]
                assert isinstance(standard, Standard)
                outs[key] = StandardMSE(drawn, standard)
        return outs


def make_standards(
    images: Spaces, config: EncoderConfig | DecoderConfig
) -> ByKey | None:
    if config.standard == "none" or not images:
        return None
    mode, floor = config.standard, config.minstd
    return ByKey({k: Standard(k, s.shape, mode, floor) for k, s in images.items()})


def make_vector_out(space: Space, inputs: int, outscale: float) -> nn.ModuleDict:
    if space.is_discrete:
        units = (*space.shape, space.classes)
        return nn.ModuleDict({"logits": Linear(inputs, units, outscale)})
    return nn.ModuleDict({"pred": Linear(inputs, space.shape, outscale)})


def _as_fraction(image: Tensor) -> Tensor:
    return image / 255


class _Seen:
    """A prediction whose target may be missing, and whose classes count from `low`.

    As in the encoder, an entry of -inf or -1 says that the key is missing in that row;
    there is nothing to compare then, and the loss is zero.
    """

    def __init__(self, out: Output, space: Space, low: Tensor | None = None):
        self.out, self.dims, self.low = out, len(space.shape), low
        self.missing: float | None = -torch.inf
        if space.is_discrete:
            signed = space.dtype.kind == "i" and (space.low >= 0).all()
            self.missing = -1 if signed else None

    def pred(self) -> Tensor:
        pred = self.out.pred()
        return pred if self.low is None else pred + self.low

    def loss(self, target: Tensor) -> Tensor:
        index = target if self.low is None else target.long() - self.low
        if self.missing is None:
            return self.out.loss(index.long())
        present = target != self.missing
        loss = self.out.loss(torch.where(present, index, 0))
        return torch.where(_all(present, self.dims), loss, 0)


def _all(x: Tensor, dims: int) -> Tensor:
    return x.flatten(-dims).all(-1) if dims else x
