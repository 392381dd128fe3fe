"""The image encoder on coarse grids: see `phases.py` for the convolutions.

A layer is one convolution and one kernel for all that follows it (`pool.py`); the first
layer, if it is narrow, is a single kernel (`first_layer.py`).
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.kernels.conv.first_layer import first_layer, is_small
from reverie.kernels.conv.max_pool import max_pool_rms_norm_silu
from reverie.kernels.conv.space_to_depth import SIDE, phase_kernel
from reverie.kernels.launch import apply_autograd
from reverie.kernels.norm.rms_norm import is_fusable, linear_norm_act
from reverie.nets.blocks import Norm
from reverie.nets.conv import Conv, Encoder

MANY, WHOLE = 96, 32
"""Input channels from which a layer's convolution stays on the fine grid, where the
coarse one, with its 1.44 times more arithmetic, no longer pays; but only if channels
fill the tensor cores' tiles there. Forward and backward on an H200, in ms:

    channels       coarse   fine
     64 to  96       1.83   1.90
     96 to 128       0.91   0.82
     96 to 144       4.31   5.19
    144 to 192       2.39   2.59
    192 to 192       0.78   0.70
"""
ALIGNED = 16
"""The first layer's channels come in multiples of this, for the tensor cores."""


class FastEncoder(Encoder):
    def _vectors(self, obs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        x: Tensor = self.concat(obs, dtype)
        for i in range(self.config.layers):
            layer, norm = getattr(self, f"mlp{i}"), getattr(self, f"mlp{i}norm")
            x = linear_norm_act(layer, norm, self.act, x)
        return x

    def _images(self, images: list[Tensor], dtype: torch.dtype) -> Tensor:
        if not self._is_simple(images, dtype):
            return super()._images(images, dtype)
        last = len(self.config.mults) - 1
        coarse = [self._is_coarse(i) for i in range(last + 1)] + [False]
        x = self._first(images, dtype, to_phases=coarse[1])
        for i in range(1, last + 1):
            weight, bias = getattr(self, f"cnn{i}").cast(dtype)
            if coarse[i]:
                weight = phase_kernel(weight, 4 * len(weight), x.shape[-1])
            x = self._layer(i, x, weight, bias, coarse[i], coarse[i + 1])
        return x.reshape(*images[0].shape[:-3], -1)

    def _first(
        self, images: list[Tensor], dtype: torch.dtype, to_phases: bool
    ) -> Tensor:
        conv: Conv = getattr(self, "cnn0")  # noqa: B009
        norm: Norm = getattr(self, "cnn0norm")  # noqa: B009
        weight, bias = conv.cast(dtype)
        x = see(images, *self.canvas, dtype)
        kernel = phase_kernel(weight, 4 * len(bias), x.shape[-1])
        if is_small(weight.shape[1], len(bias), dtype):
            norms = norm.scale, norm.eps
            return first_layer(x, kernel, *norms, bias, to_phases=to_phases)
        return self._layer(0, x, kernel, bias, True, to_phases)

    def _layer(
        self, i: int, x: Tensor, kernel: Tensor, bias: Tensor, coarse: bool, fold: bool
    ) -> Tensor:
        """A convolution on the coarse or the fine grid, and all that follows it."""
        norm: Norm = getattr(self, f"cnn{i}norm")
        x = x.permute(0, 3, 1, 2)
        if coarse:
            x = F.conv2d(x, kernel, padding=1)
        else:
            x = apply_autograd(_Convolve, x, kernel)
        return max_pool_rms_norm_silu(
            *(x.permute(0, 2, 3, 1), norm.scale, norm.eps, bias),
            from_phases=coarse,
            to_phases=fold,
        )

    def _is_coarse(self, i: int) -> bool:
        """Whether a layer's convolution is quicker on the coarse grid."""
        layer: Conv = getattr(self, f"cnn{i}")
        units, inputs = layer.weight.shape[:2]
        return i == 0 or inputs < MANY or bool(units % WHOLE or inputs % WHOLE)

    def _is_simple(self, images: list[Tensor], dtype: torch.dtype) -> bool:
        config = self.config
        norm: Norm = getattr(self, "cnn0norm")  # noqa: B009
        return (
            config.kernel == SIDE
            and not config.strided
            and not config.outer
            and config.standard == "none"
            and all(image.dtype == torch.uint8 for image in images)
            and is_fusable(norm, self.act, dtype)
        )


def see(
    images: list[UInt8[Tensor, "*b _h _w _c"]],
    height: int,
    width: int,
    dtype: torch.dtype,
) -> Float[Tensor, "n h w c"]:
    """Images side by side on one canvas, centred, as phases of a coarse map."""
    rows = images[0].shape[:-3].numel()
    total = sum(image.shape[-1] for image in images)
    channels = triton.cdiv(4 * total, ALIGNED) * ALIGNED
    shape = (rows, height // 2, width // 2, channels)
    out = torch.empty(shape, dtype=dtype, device=images[0].device)
    offset, size = 0, width // 2 * channels
    for image in images if rows else ():
        _see[(rows, height // 2)](
            *(image.contiguous(), out, size, *image.shape[-3:-1]),
            *(channels, image.shape[-1], total, offset, offset == 0),
            triton.next_power_of_2(size),
        )
        offset += image.shape[-1]
    return out


class _Convolve(torch.autograd.Function):
    """A 'same' convolution, computed as the gradient of another one.

    For which the library has the better kernels: 128 to 192 channels on 32x32 pixels
    take 1.8 ms that way on an H200, and 3.2 ms directly.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        mirrored = weight.flip(2, 3).transpose(0, 1)
        mirrored = mirrored.contiguous(memory_format=torch.channels_last)
        return F.conv_transpose2d(x, mirrored, padding=SIDE // 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        pad, one = [SIDE // 2, SIDE // 2], [1, 1]
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            *(grad, x, weight, None, one, pad, one, False, [0, 0], 1),
            [True, True, False],
        )
        return dx, dweight


@triton.jit
@no_type_check
def _see(
    image,
    out,
    size,
    height,
    width,
    CHANNELS: tl.constexpr,
    COLORS: tl.constexpr,
    TOTAL: tl.constexpr,
    OFFSET: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A coarse row of an image into its channels; the first image blanks the others."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    channel = place % CHANNELS
    phase, color = channel // TOTAL, channel % TOTAL - OFFSET
    y = tl.program_id(1) * 2 + phase // 2
    x = place // CHANNELS * 2 + phase % 2
    mine = (phase < 4) & (color >= 0) & (color < COLORS) & (place < size)
    seen = mine & (y < height) & (x < width)
    image += row * height * width * COLORS
    value = tl.load(image + (y * width + x) * COLORS + color, seen, 0)
    value = tl.where(seen, value.to(tl.float32) / 255 - 0.5, 0.0)
    out += (row * tl.num_programs(1) + tl.program_id(1)) * size
    if FIRST:
        tl.store(out + place, value, place < size)
    else:
        tl.store(out + place, value, mine)
