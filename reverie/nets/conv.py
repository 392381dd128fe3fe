"""Convolution with "same" padding, pooling and upsampling, for images `(b, h, w, c)`.

PyTorch's functions get them permuted to `(b, c, h, w)` without a copy, which is the
channels-last memory format.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from reverie.nets.blocks import AffineLayer


class SameConv(AffineLayer):
    """A convolution with "same" padding; if `transposed`, `stride` upsamples."""

    fast_cpu_version = "reverie.kernels.conv.upsample_cpu:FusedUpsampleConv"

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

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c2"]:
        weight, bias = self.cast(x.dtype)
        x = x.permute(0, 3, 1, 2)
        if self.transposed:
            y = self._transposed(x, weight, bias)
        else:
            # an odd amount of padding has one more pixel at the right and bottom
            total = max(0, self.kernel - self.stride)
            pad = total // 2
            if total % 2:
                x, pad = F.pad(x, (pad, total - pad, pad, total - pad)), 0
            y = F.conv2d(x, weight, bias, self.stride, pad)
        return y.permute(0, 2, 3, 1)

    def upsample_and_conv(
        self, x: Float[Tensor, "b h w c"]
    ) -> Float[Tensor, "b h2 w2 o"]:
        """Upsample by two (nearest neighbor), then convolve."""
        y: Tensor = self(upsample_nearest(x))
        return y

    def _transposed(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Transposed convolution with "same" padding, as in JAX."""
        pad_before = math.ceil((self.kernel + self.stride - 2) / 2)
        weight = weight.flip(2, 3).transpose(0, 1)
        pad = self.kernel - 1 - pad_before
        y = F.conv_transpose2d(x, weight, bias, self.stride, pad)
        return y[..., : x.shape[-2] * self.stride, : x.shape[-1] * self.stride]


def max_pool_2x2(x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
    """Max-pooling over 2x2 pixels."""
    return F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


def upsample_nearest(x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
    """Nearest-neighbor upsampling by two."""
    y = F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2.0, mode="nearest")
    return y.permute(0, 2, 3, 1)
