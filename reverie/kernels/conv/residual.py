"""Residual blocks in which a norm, an activation and the bias before them are one pass.

A block is one step for autograd, which keeps what came in and the output of its first
convolution (`group_norm.py` says how the rest is made again). Biases of convolutions,
inside a block or ahead of one, are never added by themselves: the next norm or the sum
at the end of the block does it, and the kernels that go back sum up their gradients on
the way. The first and last convolution of a network have kernels of their own
(`narrow.py`). So have blocks of few channels, where the norms and sums around a
convolution take longer than its arithmetic (`tiles/`).

Doubling the side of a map and convolving is a transposed convolution with 4x4 kernels
at half the resolution, which has 2.25 times less arithmetic.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.conv.few_channels import from_few, is_narrow, norm_to_few
from reverie.kernels.conv.fused_residual import launch as fused_residual
from reverie.kernels.launch import apply_autograd, can_launch
from reverie.kernels.norm.group_norm import (
    convolve,
    convolve_back,
    fits,
    normalize,
    slopes,
)
from reverie.kernels.sums import sum_rows
from reverie.nets.residual import (
    Conv,
    Double,
    FrameDecoder,
    FrameEncoder,
    Halve,
    NormSilu,
    Residual,
)

TILE = 4096
"""Entries a program adds at a time."""


class FastResidual(Residual):
    ready: Tensor | None = None  # the biases of all that is summed at the end

    def forward(
        self, x: Float[Tensor, "b h w c"], first: Float[Tensor, " c"] | None = None
    ) -> Float[Tensor, "b h w c2"]:
        """What the plain block makes of `x + first`."""
        if not fits(x, len(self.norm0.scale), len(self.norm1.scale)):
            return super().forward(x if first is None else x + first)
        norms = (self.norm0.scale, self.norm0.shift, self.norm1.scale, self.norm1.shift)
        convs = (*self.conv0.cast(x.dtype), self.conv1.cast(x.dtype)[0])
        skip = None if self.skip is None else self.skip.cast(x.dtype)[0]
        last = self._last(first, x.dtype) if self.ready is None else self.ready
        return apply_autograd(_Block, x, first, *norms, *convs, last, skip)

    @torch.no_grad()
    def sum_biases(self, first: Float[Tensor, " c"] | None) -> None:
        """Do it once, for weights that stand still; again if they moved."""
        last = self._last(first, self.conv1.weight.dtype)
        self.ready = last.clone() if self.ready is None else self.ready.copy_(last)

    def _last(
        self, first: Float[Tensor, " c"] | None, dtype: torch.dtype
    ) -> Float[Tensor, " c2"]:
        last = self.conv1.cast(dtype)[1]
        if self.skip is None:
            return last if first is None else last + first
        weight, bias = self.skip.cast(dtype)
        last = last + bias
        return last if first is None else last + weight.flatten(1) @ first


class FastFrameEncoder(FrameEncoder):
    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b r s latent"]:
        return _through(self, x)

    def prepare(self) -> None:
        _prepare(self)


class FastFrameDecoder(FrameDecoder):
    def forward(self, x: Float[Tensor, "b r s f"]) -> Float[Tensor, "b h w c"]:
        return _through(self, x)

    def prepare(self) -> None:
        _prepare(self)


class FastHalve(Halve):
    def without_bias(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        """The convolution alone."""
        weight, _ = self.conv.cast(x.dtype)
        y = F.conv2d(x.permute(0, 3, 1, 2), weight, stride=2)
        return y.permute(0, 2, 3, 1)


class FastDouble(Double):
    ready: Tensor | None = None

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        if not can_launch(x.device, x.dtype):
            return super().forward(x)
        return self.without_bias(x) + self.conv.cast(x.dtype)[1]

    def without_bias(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 c"]:
        weight = self._kernel(x.dtype) if self.ready is None else self.ready
        x = x.permute(0, 3, 1, 2)
        y = F.conv_transpose2d(x, weight, stride=2, padding=1)
        return y.permute(0, 2, 3, 1)

    @torch.no_grad()
    def prepare(self) -> None:
        """Make the kernel once, for weights that stand still; again if they moved."""
        kernel = self._kernel(self.conv.weight.dtype)
        self.ready = kernel if self.ready is None else self.ready.copy_(kernel)

    def _kernel(self, dtype: torch.dtype) -> Float[Tensor, "i o 4 4"]:
        weight, _ = self.conv.low_precision or (self.conv.weight, self.conv.bias)
        return doubling_kernel(weight.float()).to(dtype)


def doubling_kernel(weight: Float[Tensor, "o i 3 3"]) -> Float[Tensor, "i o 4 4"]:
    """What a 3x3 kernel on a doubled map is to each pixel of the map itself.

    Along one axis, a pixel reaches four of the finer ones; the middle two see it twice.
    """
    left, centre, right = weight.unbind(-1)
    wide = torch.stack([right, centre + right, left + centre, left], -1)
    above, middle, below = wide.unbind(-2)
    tall = torch.stack([below, middle + below, above + middle, above], -2)
    return tall.transpose(0, 1).contiguous(memory_format=torch.channels_last)


def _through(net: FrameEncoder | FrameDecoder, x: Tensor) -> Tensor:
    """All layers; the last norm goes with the last convolution."""
    first, *layers, norm, last = net.layers
    assert isinstance(first, Conv)
    assert isinstance(last, Conv)
    assert isinstance(norm, NormSilu)
    bias: Tensor | None = None
    many, few = first.weight.shape[:2]
    x = from_few(x, first) if is_narrow(first, few, many, x) else first(x)
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        if isinstance(layer, FastHalve | FastDouble) and _takes_bias(after, x):
            x, bias = layer.without_bias(x), layer.conv.cast(x.dtype)[1]
        elif isinstance(layer, FastResidual):
            x, bias = layer(x, bias), None
        else:
            x = layer(x)
    few, many = last.weight.shape[:2]
    if is_narrow(last, few, many, x):
        return norm_to_few(x, norm, last)
    if not fits(x, many):
        out: Tensor = last(norm(x))
        return out
    weight, bias = last.cast(x.dtype)
    return apply_autograd(_NormConv, x, norm.scale, norm.shift, weight) + bias


def _prepare(net: FrameEncoder | FrameDecoder) -> None:
    """Sum up the biases that meet in each block, for weights that stand still."""
    for before, layer in pairwise(net.layers):
        if isinstance(layer, FastResidual):
            first: Tensor | None = None
            if isinstance(before, FastHalve | FastDouble):
                first = before.conv.bias
            layer.sum_biases(first)


def _takes_bias(layer: Any, x: Tensor) -> bool:
    """Whether a layer adds the bias of the one before it."""
    return isinstance(layer, FastResidual) and can_launch(x.device, x.dtype)


class _NormConv(torch.autograd.Function):
    """`conv(norm(x))`, without the bias of the convolution."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor
    ) -> Tensor:
        x = x.contiguous()
        active, stats = normalize(x, None, scale, shift)
        ctx.save_for_backward(x, scale, shift, stats, weight)
        return convolve(active, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, scale, shift, stats, weight = ctx.saved_tensors
        back = slopes(grad.contiguous(), x, None, scale, shift, stats, weight)
        return back.x, back.scale, back.shift, back.weight


class _Block(torch.autograd.Function):
    """A residual block; `first` is the bias of what comes in ahead of the first norm,
    `last` that of all that is summed at its end."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor | None,
        scale0: Tensor,
        shift0: Tensor,
        scale1: Tensor,
        shift1: Tensor,
        weight0: Tensor,
        bias0: Tensor,
        weight1: Tensor,
        last: Tensor,
        skip: Tensor | None,
    ) -> Tensor:
        x = x.contiguous()
        norms = (scale0, shift0, scale1, shift1)
        given = fused_residual.Given(first, *norms, weight0, bias0, weight1, last)
        found = fused_residual.forward(x, given) if skip is None else None
        y, stats0, middle, stats1 = found or _forward(x, given, skip)
        ctx.save_for_backward(
            *(x, scale0, shift0, stats0, weight0),
            *(middle, bias0, scale1, shift1, stats1, weight1),
            *(first, last, skip),
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, first, last, skip = ctx.saved_tensors
        x, scale0, shift0, stats0, weight0 = saved[:5]
        middle, bias0, scale1, shift1, stats1, weight1 = saved[5:]
        grad = grad.contiguous()
        back1 = slopes(grad, middle, bias0, scale1, shift1, stats1, weight1)
        dskip, beside = None, grad
        if skip is not None:
            dskip = convolve_back(grad, x, skip, of_input=False)
            beside = convolve_back(grad, x, skip, of_input=True).contiguous()
        back0 = slopes(back1.x, x, first, scale0, shift0, stats0, weight0, more=beside)
        dfirst = None if first is None else back0.bias.to(first.dtype)
        dlast = back0.more if skip is None else sum_rows(grad.flatten(0, 2))
        return (
            *(back0.x, dfirst),
            *(back0.scale, back0.shift, back1.scale, back1.shift),
            *(back0.weight, back1.bias.to(bias0.dtype), back1.weight),
            *(dlast.to(last.dtype), dskip),
        )


def _forward(
    x: Tensor, given: fused_residual.Given, skip: Tensor | None
) -> fused_residual.Found:
    """A block of any kind, with a kernel for every step."""
    active, stats0 = normalize(x, given.first, given.scale0, given.shift0)
    middle = convolve(active, given.weight0).contiguous()
    del active
    active, stats1 = normalize(middle, given.bias0, given.scale1, given.shift1)
    y = convolve(active, given.weight1).contiguous()
    beside = x if skip is None else convolve(x, skip).contiguous()
    _join[(triton.cdiv(y.numel(), TILE),)](
        *(beside, y, given.last, y, y.numel(), len(given.last), TILE), num_warps=8
    )
    return fused_residual.Found(y, stats0, middle, stats1)


@triton.jit
@no_type_check
def _join(left, right, bias, out, size, channels, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < size
    total = tl.load(left + at, mask, 0.0).to(tl.float32)
    total += tl.load(right + at, mask, 0.0).to(tl.float32)
    total += tl.load(bias + at % channels, mask, 0.0).to(tl.float32)
    tl.store(out + at, total, mask)
