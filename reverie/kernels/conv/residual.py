"""Fast versions of the residual networks (`nets/residual.py`).

Bias, norm and activation are one pass over a feature map. A residual block is one
autograd function that saves its input and the output of its first convolution; the
backward pass recomputes everything else (`group_norm.py`). Biases of convolutions,
inside a block or before it, are never added separately: the next norm or the sum at the
end of the block adds them, and the backward kernels sum their gradients. Separate
kernels compute the first and last convolution of a network (`few_channels.py`), and
blocks with few channels, whose norms and sums take longer than their convolutions
(`fused_residual/`).

Upsampling by two followed by a 3x3 convolution is computed as a transposed convolution
with 4x4 kernels, which has 2.25 times less arithmetic.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from reverie.kernels.conv import few_channels
from reverie.kernels.conv.fused_residual import launch as fused_residual
from reverie.kernels.conv.nhwc import conv2d, conv2d_input_grad, conv2d_weight_grad
from reverie.kernels.launch import apply_autograd, can_launch, jit
from reverie.kernels.norm.group_norm import group_norm_silu, norm_conv_backward
from reverie.kernels.norm.group_norm import supports as supports_group_norm
from reverie.kernels.sums import sum_rows
from reverie.nets.residual import (
    Downsample,
    FrameConv,
    FrameDecoder,
    FrameEncoder,
    NormSilu,
    Residual,
    Upsample,
)

TILE = 4096
"""Elements per program in the sum at the end of a block."""


class FastResidual(Residual):
    """`Residual` as one autograd function with fused kernels."""

    cached_bias: Tensor | None = None
    """Output of `_output_bias`, if `cache_bias` was called."""

    def forward(
        self, x: Float[Tensor, "b h w c"], input_bias: Float[Tensor, " c"] | None = None
    ) -> Float[Tensor, "b h w c2"]:
        """Return the block's output for `x + input_bias`."""
        widths = len(self.norm0.scale), len(self.norm1.scale)
        if not supports_group_norm(x, *widths):
            return super().forward(x if input_bias is None else x + input_bias)
        norms = (self.norm0.scale, self.norm0.shift, self.norm1.scale, self.norm1.shift)
        convs = (*self.conv0.cast(x.dtype), self.conv1.cast(x.dtype)[0])
        skip = None if self.skip is None else self.skip.cast(x.dtype)[0]
        bias = self.cached_bias
        if bias is None:
            bias = self._output_bias(input_bias, x.dtype)
        return apply_autograd(_Block, x, input_bias, *norms, *convs, bias, skip)

    @torch.no_grad()
    def cache_bias(self, input_bias: Float[Tensor, " c"] | None) -> None:
        """Compute the output bias once, for fixed weights; call again after updates."""
        bias = self._output_bias(input_bias, self.conv1.weight.dtype)
        if self.cached_bias is None:
            self.cached_bias = bias.clone()
        else:  # in place, as CUDA graphs need fixed addresses
            self.cached_bias.copy_(bias)

    def _output_bias(
        self, input_bias: Float[Tensor, " c"] | None, dtype: torch.dtype
    ) -> Float[Tensor, " c2"]:
        """Return the sum of all biases that are added at the end of the block."""
        output_bias = self.conv1.cast(dtype)[1]
        if self.skip is None:
            return output_bias if input_bias is None else output_bias + input_bias
        weight, bias = self.skip.cast(dtype)
        output_bias = output_bias + bias
        if input_bias is None:
            return output_bias
        return output_bias + weight.flatten(1) @ input_bias


class _FastLayers:
    """`forward` and `prepare` of the fast encoder and decoder."""

    layers: nn.Sequential

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c2"]:
        return _forward_layers(self.layers, x)

    def prepare(self) -> None:
        """Compute the output bias of every block once, for fixed weights."""
        for before, layer in pairwise(self.layers):
            if isinstance(layer, FastResidual):
                bias: Tensor | None = None
                if isinstance(before, FastDownsample | FastUpsample):
                    bias = before.conv.bias
                layer.cache_bias(bias)


class FastFrameEncoder(_FastLayers, FrameEncoder):
    pass


class FastFrameDecoder(_FastLayers, FrameDecoder):
    pass


class FastDownsample(Downsample):
    """`Downsample` that can leave its bias to the next layer."""

    def without_bias(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        """Return the convolution without its bias."""
        weight, _ = self.conv.cast(x.dtype)
        y = F.conv2d(x.permute(0, 3, 1, 2), weight, stride=2)
        return y.permute(0, 2, 3, 1)


class FastUpsample(Upsample):
    """`Upsample` as a transposed convolution; can leave its bias to the next layer."""

    cached_kernel: Tensor | None = None
    """Output of `_kernel`, if `prepare` was called."""

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        if not can_launch(x.device, x.dtype):
            return super().forward(x)
        return self.without_bias(x) + self.conv.cast(x.dtype)[1]

    def without_bias(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        """Return upsampling and convolution without the bias."""
        kernel = self.cached_kernel
        if kernel is None:
            kernel = self._kernel(x.dtype)
        x = x.permute(0, 3, 1, 2)
        y = F.conv_transpose2d(x, kernel, stride=2, padding=1)
        return y.permute(0, 2, 3, 1)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the kernel once, for fixed weights; call again after updates."""
        kernel = self._kernel(self.conv.weight.dtype)
        if self.cached_kernel is None:
            self.cached_kernel = kernel
        else:  # in place, as CUDA graphs need fixed addresses
            self.cached_kernel.copy_(kernel)

    def _kernel(self, dtype: torch.dtype) -> Float[Tensor, "i o 4 4"]:
        """Return the kernel of the transposed convolution."""
        weight, _ = self.conv.low_precision or (self.conv.weight, self.conv.bias)
        return upsample_kernel_4x4(weight.float()).to(dtype)


def upsample_kernel_4x4(weight: Float[Tensor, "o i 3 3"]) -> Float[Tensor, "i o 4 4"]:
    """Return the kernel of a transposed convolution that equals upsample + 3x3 conv.

    Along one axis, an input pixel contributes to four output pixels, to the middle two
    of them by two taps.
    """
    left, center, right = weight.unbind(-1)
    wide = torch.stack([right, center + right, left + center, left], -1)
    above, middle, below = wide.unbind(-2)
    tall = torch.stack([below, middle + below, above + middle, above], -2)
    return tall.transpose(0, 1).contiguous(memory_format=torch.channels_last)


def _forward_layers(net: nn.Sequential, x: Tensor) -> Tensor:
    """Apply all layers of an encoder or decoder, with fused first and last layers."""
    first, *layers, norm, last = net
    assert isinstance(first, FrameConv)
    assert isinstance(last, FrameConv)
    assert isinstance(norm, NormSilu)
    bias: Tensor | None = None
    units, inputs = first.weight.shape[:2]
    if few_channels.is_supported(first, few=inputs, many=units, x=x):
        x = few_channels.conv_from_few(x, first)
    else:
        x = first(x)
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if isinstance(layer, FastDownsample | FastUpsample) and _adds_input_bias(
            following, x
        ):
            x, bias = layer.without_bias(x), layer.conv.cast(x.dtype)[1]
        elif isinstance(layer, FastResidual):
            x, bias = layer(x, bias), None
        else:
            x = layer(x)
    outputs, units = last.weight.shape[:2]
    if few_channels.is_supported(last, few=outputs, many=units, x=x):
        return few_channels.norm_conv_to_few(x, norm, last)
    if not supports_group_norm(x, units):
        out: Tensor = last(norm(x))
        return out
    weight, bias = last.cast(x.dtype)
    return apply_autograd(_NormConv, x, norm.scale, norm.shift, weight) + bias


def _adds_input_bias(layer: Any, x: Tensor) -> bool:
    """True if a layer adds the bias of the layer before it."""
    return isinstance(layer, FastResidual) and can_launch(x.device, x.dtype)


class _NormConv(torch.autograd.Function):
    """`conv(norm(x))`, without the bias of the convolution."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor
    ) -> Tensor:
        x = x.contiguous()
        activation, stats = group_norm_silu(x, None, scale, shift)
        ctx.save_for_backward(x, scale, shift, stats, weight)
        return conv2d(activation, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, scale, shift, stats, weight = ctx.saved_tensors
        grads = norm_conv_backward(
            grad.contiguous(), x, None, scale, shift, stats, weight
        )
        return grads.x, grads.scale, grads.shift, grads.weight


class _Block(torch.autograd.Function):
    """A residual block of `x + input_bias`; `output_bias` is added to its output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        input_bias: Tensor | None,
        scale0: Tensor,
        shift0: Tensor,
        scale1: Tensor,
        shift1: Tensor,
        weight0: Tensor,
        bias0: Tensor,
        weight1: Tensor,
        output_bias: Tensor,
        skip: Tensor | None,
    ) -> Tensor:
        x = x.contiguous()
        norms = (scale0, shift0, scale1, shift1)
        weights = fused_residual.BlockWeights(
            input_bias, *norms, weight0, bias0, weight1, output_bias
        )
        result = fused_residual.forward(x, weights) if skip is None else None
        y, stats0, middle, stats1 = result or _forward_block(x, weights, skip)
        ctx.save_for_backward(
            *(x, scale0, shift0, stats0, weight0),
            *(middle, bias0, scale1, shift1, stats1, weight1),
            *(input_bias, output_bias, skip),
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, input_bias, output_bias, skip = ctx.saved_tensors
        x, scale0, shift0, stats0, weight0, middle, bias0, *norm_conv1 = saved
        grad = grad.contiguous()
        grads1 = norm_conv_backward(grad, middle, bias0, *norm_conv1)
        dskip, residual_grad = None, grad
        if skip is not None:
            dskip = conv2d_weight_grad(grad, x, skip)
            residual_grad = conv2d_input_grad(grad, x, skip).contiguous()
        norm0 = (input_bias, scale0, shift0, stats0)
        grads0 = norm_conv_backward(grads1.x, x, *norm0, weight0, residual_grad)
        dinput_bias = None if input_bias is None else grads0.bias.to(input_bias.dtype)
        # `grad` summed over all pixels; without `skip`, the kernel has summed it
        dbias = grads0.residual if skip is None else sum_rows(grad.flatten(0, 2))
        return (
            *(grads0.x, dinput_bias),
            *(grads0.scale, grads0.shift, grads1.scale, grads1.shift),
            *(grads0.weight, grads1.bias.to(bias0.dtype), grads1.weight),
            *(dbias.to(output_bias.dtype), dskip),
        )


def _forward_block(
    x: Tensor, weights: fused_residual.BlockWeights, skip: Tensor | None
) -> fused_residual.BlockResult:
    """Compute a block of any size, with one kernel per norm, convolution and sum."""
    norm0 = (weights.input_bias, weights.scale0, weights.shift0)
    activation, stats0 = group_norm_silu(x, *norm0)
    middle = conv2d(activation, weights.weight0).contiguous()
    del activation  # free its memory
    norm1 = (weights.bias0, weights.scale1, weights.shift1)
    activation, stats1 = group_norm_silu(middle, *norm1)
    y = conv2d(activation, weights.weight1).contiguous()
    shortcut = x if skip is None else conv2d(x, skip).contiguous()
    bias = weights.output_bias
    _add[(triton.cdiv(y.numel(), TILE),)](
        *(shortcut, y, bias, y, y.numel(), len(bias), TILE), num_warps=8
    )
    return fused_residual.BlockResult(y, stats0, middle, stats1)


@jit
def _add(left, right, bias, out, size, channels, TILE: tl.constexpr):
    """Store `left + right + bias`."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < size
    total = tl.load(left + index, mask, 0.0).to(tl.float32)
    total += tl.load(right + index, mask, 0.0).to(tl.float32)
    total += tl.load(bias + index % channels, mask, 0.0).to(tl.float32)
    tl.store(out + index, total, mask)
