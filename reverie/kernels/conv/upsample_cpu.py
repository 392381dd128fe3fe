"""Nearest upsampling followed by a 5x5 or 3x3 convolution, fused for the CPU.

A 5x5 convolution of an upsampled feature map reads each input pixel several times. If
the weights (taps) that read the same pixel are added first, each of the four sub-pixels
of a 2 x 2 output block is a 3x3 convolution at the input's resolution. Together they
are one convolution with four times the output channels and a quarter of the pixels,
which takes 2.8 times less arithmetic. The layer still has a 5x5 weight: autograd
differentiates the additions of its taps.

A 3x3 convolution takes the same arithmetic in both ways. The fused one needs no
upsampled map and is faster if there are few output channels, as in the last layer.

Space-to-depth in the encoder (`space_to_depth.py`) is slower on a CPU, because it takes
more arithmetic in exchange for wider matrix products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from reverie.nets.conv import SameConv

KERNELS = (3, 5)
"""The supported kernel sizes."""

MAX_OUTPUTS = 8
"""Maximum number of output channels of a 3x3 convolution for which this is faster."""

MIN_PIXELS = 4096
"""Minimum number of input pixels of a batch for which this is faster."""


def _tap_inputs(kernel: int) -> Float[Tensor, "2 3 K"]:
    """Return a table (sub-pixel, input pixel, tap) for one axis.

    An entry is 1 if the tap of the kernel reads this input pixel (of three adjacent
    ones) to compute the output sub-pixel, and otherwise 0.
    """
    inputs = torch.zeros(2, 3, kernel)
    for sub in range(2):
        for tap in range(kernel):
            inputs[sub, (sub + tap - kernel // 2) // 2 + 1, tap] = 1
    return inputs


TAP_INPUTS = {kernel: _tap_inputs(kernel) for kernel in KERNELS}


class FusedUpsampleConv(SameConv):
    """A convolution that fuses the upsampling before it."""

    def upsample_and_conv(
        self, x: Float[Tensor, "b h w c"]
    ) -> Float[Tensor, "b h2 w2 o"]:
        supported = self.kernel in KERNELS and self.stride == 1
        is_slow = self.kernel == 3 and len(self.bias) > MAX_OUTPUTS
        if not supported or is_slow or x[..., 0].numel() < MIN_PIXELS:
            return super().upsample_and_conv(x)
        weight, bias = self.cast(x.dtype)
        taps = TAP_INPUTS[self.kernel].to(weight)
        kernel = torch.einsum("pay,qbx,oiyx->pqoiab", taps, taps, weight)
        kernel = kernel.flatten(0, 2).to(memory_format=torch.channels_last)
        y = F.conv2d(x.permute(0, 3, 1, 2), kernel, bias.repeat(4), padding=1)
        batch, height, width, _ = x.shape
        y = y.permute(0, 2, 3, 1).reshape(batch, height, width, 2, 2, -1)
        return y.transpose(2, 3).reshape(batch, 2 * height, 2 * width, -1)
