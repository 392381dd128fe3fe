"""Fast version of the image encoder, computed on space-to-depth feature maps.

A layer is one convolution (`space_to_depth.py`) and one kernel for pooling, norm and
activation (`max_pool.py`); a first layer with few channels is a single kernel
(`first_layer.py`). "Depth" in names means space-to-depth.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.kernels.conv import first_layer
from reverie.kernels.conv.max_pool import max_pool_rms_norm_silu
from reverie.kernels.conv.nhwc import conv2d, conv2d_grads
from reverie.kernels.conv.space_to_depth import KERNEL, space_to_depth_kernel
from reverie.kernels.launch import apply_autograd, jit
from reverie.kernels.norm.rms_norm import is_fusable, linear_norm_act
from reverie.nets.blocks import Norm
from reverie.nets.conv import SameConv
from reverie.nets.encoder import Encoder

MIN_FULL_CHANNELS, CHANNEL_MULTIPLE = 96, 32
"""Layers are convolved at full resolution if they have at least `MIN_FULL_CHANNELS`
input channels, and input and output channels are multiples of `CHANNEL_MULTIPLE`. Other
layers use space-to-depth maps, which quadruple the channels: this takes 1.44 times the
arithmetic, but tensor cores are inefficient with few or unaligned channels. Forward and
backward on an H200, in ms:

    channels       space-to-depth   full resolution
     64 to  96       1.83             1.90
     96 to 128       0.91             0.82
     96 to 144       4.31             5.19
    144 to 192       2.39             2.59
    192 to 192       0.78             0.70
"""
ALIGNMENT = 16
"""Input channels of the first layer are padded to a multiple of this."""


class FastEncoder(Encoder):
    """`Encoder` with fused kernels for images and vectors."""

    def _vectors(self, obs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        x: Tensor = self.concat(obs, dtype)
        for i in range(self.config.layers):
            layer, norm = getattr(self, f"mlp{i}"), getattr(self, f"mlp{i}norm")
            x = linear_norm_act(layer, norm, self.act, x)
        return x

    def _images(self, images: list[Tensor], dtype: torch.dtype) -> Tensor:
        if not self._is_supported(images, dtype):
            return super()._images(images, dtype)
        last = len(self.config.mults) - 1
        use_depth = [self._uses_depth(i) for i in range(last + 1)] + [False]
        x = self._first_layer(images, dtype, to_depth=use_depth[1])
        for i in range(1, last + 1):
            weight, bias = getattr(self, f"cnn{i}").cast(dtype)
            if use_depth[i]:
                weight = space_to_depth_kernel(weight, 4 * len(weight), x.shape[-1])
            x = self._layer(i, x, weight, bias, use_depth[i], use_depth[i + 1])
        return x.reshape(*images[0].shape[:-3], -1)

    def _first_layer(
        self, images: list[Tensor], dtype: torch.dtype, to_depth: bool
    ) -> Tensor:
        conv: SameConv = getattr(self, "cnn0")  # noqa: B009
        norm: Norm = getattr(self, "cnn0norm")  # noqa: B009
        weight, bias = conv.cast(dtype)
        x = space_to_depth_images(images, *self.padded_size, dtype)
        kernel = space_to_depth_kernel(weight, 4 * len(bias), x.shape[-1])
        if first_layer.is_supported(weight.shape[1], len(bias), x):
            return first_layer.first_layer(
                x, kernel, norm.scale, norm.eps, bias, to_depth=to_depth
            )
        return self._layer(0, x, kernel, bias, True, to_depth)

    def _layer(
        self,
        i: int,
        x: Tensor,
        kernel: Tensor,
        bias: Tensor,
        from_depth: bool,
        to_depth: bool,
    ) -> Tensor:
        """Convolution, pooling, norm and activation of layer `i`.

        `from_depth` and `to_depth`: input and output are space-to-depth maps.
        """
        norm: Norm = getattr(self, f"cnn{i}norm")
        y = conv2d(x, kernel) if from_depth else apply_autograd(_Convolve, x, kernel)
        return max_pool_rms_norm_silu(
            *(y, norm.scale, norm.eps, bias), from_depth=from_depth, to_depth=to_depth
        )

    def _uses_depth(self, i: int) -> bool:
        """True if a layer's convolution is faster on a space-to-depth map."""
        layer: SameConv = getattr(self, f"cnn{i}")
        units, inputs = layer.weight.shape[:2]
        unaligned = units % CHANNEL_MULTIPLE or inputs % CHANNEL_MULTIPLE
        return i == 0 or inputs < MIN_FULL_CHANNELS or bool(unaligned)

    def _is_supported(self, images: list[Tensor], dtype: torch.dtype) -> bool:
        norm: Norm = getattr(self, "cnn0norm")  # noqa: B009
        bytes_only = all(image.dtype == torch.uint8 for image in images)
        return bytes_only and is_supported(self.config, norm, self.act, dtype)


def is_supported(config: Any, norm: Norm, act: object, dtype: torch.dtype) -> bool:
    """True if the fast versions can replace an encoder or decoder with this config."""
    return (
        config.kernel == KERNEL
        and not config.strided
        and not config.outer
        and config.standard == "none"
        and is_fusable(norm, act, dtype)
    )


def space_to_depth_images(
    images: list[UInt8[Tensor, "*b _h _w _c"]],
    height: int,
    width: int,
    dtype: torch.dtype,
) -> Float[Tensor, "n h w c"]:
    """Return images as one space-to-depth map.

    Pixels are scaled to [-0.5, 0.5], images are padded with zeros to the given size,
    and their channels are concatenated.
    """
    rows = images[0].shape[:-3].numel()
    total = sum(image.shape[-1] for image in images)
    channels = triton.cdiv(4 * total, ALIGNMENT) * ALIGNMENT
    shape = (rows, height // 2, width // 2, channels)
    out = torch.empty(shape, dtype=dtype, device=images[0].device)
    offset, size = 0, width // 2 * channels
    for image in images if rows else ():
        _space_to_depth_image[(rows, height // 2)](
            *(image.contiguous(), out, size, *image.shape[-3:-1]),
            *(channels, image.shape[-1], total, offset, offset == 0),
            triton.next_power_of_2(size),
        )
        offset += image.shape[-1]
    return out


class _Convolve(torch.autograd.Function):
    """A "same" convolution, computed as the input gradient of another convolution.

    cuDNN has faster kernels for input gradients: 128 to 192 channels on 32x32 pixels
    take 1.8 ms on an H200, and 3.2 ms as a forward convolution.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        mirrored = weight.flip(2, 3).transpose(0, 1)
        mirrored = mirrored.contiguous(memory_format=torch.channels_last)
        y = F.conv_transpose2d(x.permute(0, 3, 1, 2), mirrored, padding=KERNEL // 2)
        return y.permute(0, 2, 3, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return conv2d_grads(grad, *ctx.saved_tensors)


@jit
def _space_to_depth_image(
    image, out, size, height, width,
    CHANNELS: tl.constexpr, COLORS: tl.constexpr, TOTAL: tl.constexpr,
    OFFSET: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the channels of one image to one row of pixels of the space-to-depth map.

    They start at channel OFFSET of TOTAL channels per sub-pixel. With FIRST, the other
    channels are set to zero.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    channel = index % CHANNELS
    sub, color = channel // TOTAL, channel % TOTAL - OFFSET
    y = tl.program_id(1) * 2 + sub // 2
    x = index // CHANNELS * 2 + sub % 2
    is_own = (sub < 4) & (color >= 0) & (color < COLORS) & (index < size)
    inside = is_own & (y < height) & (x < width)
    image += row * height * width * COLORS
    value = tl.load(image + (y * width + x) * COLORS + color, inside, 0)
    value = tl.where(inside, value.to(tl.float32) / 255 - 0.5, 0.0)
    out += (row * tl.num_programs(1) + tl.program_id(1)) * size
    if FIRST:
        tl.store(out + index, value, index < size)
    else:
        tl.store(out + index, value, is_own)
