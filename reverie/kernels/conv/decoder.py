"""Fast version of the image decoder: layers compute at half their output resolution.

A layer is one convolution that includes the upsampling (`space_to_depth.py`) and one
kernel that adds the bias, normalizes, activates, and writes the full-resolution feature
map. In training, the predicted image is never written to memory: a kernel compares the
space-to-depth output of the last layer with the stored image and sums the squared error
of every image.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.conv import last_layer
from reverie.kernels.conv.encoder import is_supported
from reverie.kernels.conv.nhwc import conv2d
from reverie.kernels.conv.space_to_depth import image_offset, upsample_kernel
from reverie.kernels.launch import apply_autograd, jit, num_programs, tile_shape
from reverie.kernels.norm.rms_norm import (
    linear_norm_act,
    load_columns,
    norm_silu,
    norm_silu_backward,
    rms_norm_silu,
    rms_norm_silu_depth_to_space,
)
from reverie.kernels.sums import sum_partials
from reverie.nets.blocks import Norm
from reverie.nets.decoder import Decoder
from reverie.nets.distributions import Distribution

ALIGNMENT = 16
"""Output channels of the last layer are padded to a multiple of this."""
TILE = 2048
"""Elements per tile of the image loss."""


class FastDecoder(Decoder):
    """`Decoder` with fused kernels for images."""

    def _image_outputs(self, deter: Tensor, stoch: Tensor) -> dict[str, Distribution]:
        norm = self.spnorm if self.config.bspace else self.spacenorm
        if not is_supported(self.config, norm, self.act, deter.dtype):
            return super()._image_outputs(deter, stoch)
        batch, dtype = deter.shape[:-1], deter.dtype
        x = self._smallest_map(deter.flatten(0, -2), stoch.flatten(0, -2))
        for i in reversed(range(len(self.config.mults) - 1)):
            norm = getattr(self, f"conv{i}norm")
            weight, bias = getattr(self, f"conv{i}").cast(dtype)
            x = conv2d(x, upsample_kernel(weight, 4 * len(bias)))
            x = rms_norm_silu_depth_to_space(x, norm.scale, norm.eps, bias)
        weight, bias = self.imgout.cast(dtype)
        units = triton.cdiv(4 * len(bias), ALIGNMENT) * ALIGNMENT
        layer = LazyLastLayer(x, upsample_kernel(weight, units), bias)
        distributions: dict[str, Distribution] = {}
        offset = 0
        for key, space in self.images.items():
            distributions[key] = FusedImageMSE(layer, batch, space.shape, offset)
            offset += space.shape[2]
        return distributions

    def _smallest_map(self, deter: Tensor, stoch: Tensor) -> Float[Tensor, "b h w c"]:
        """Return the smallest feature map, the input of the first convolution."""
        norm: Norm
        if not self.config.bspace:
            feat = torch.cat([stoch, deter], -1)
            norm = self.spacenorm
            return rms_norm_silu(self.space(feat), norm.scale, norm.eps)
        x = linear_norm_act(self.sp1, self.sp1norm, self.act, stoch)
        weight0, bias0 = self.sp0.cast(deter.dtype)
        weight1, bias1 = self.sp2.cast(deter.dtype)
        rows = deter.reshape(len(deter), len(weight0), -1).transpose(0, 1)
        norm = self.spnorm
        return apply_autograd(
            *(_AddNormSilu, torch.bmm(rows, weight0), F.linear(x, weight1)),
            *(bias0, bias1),
            *(norm.scale, norm.eps, self.smallest),
        )


class LazyLastLayer:
    """The last layer of all images, computed only when its output is read."""

    def __init__(
        self,
        x: Float[Tensor, "n h w c"],
        kernel: Float[Tensor, "o c 3 3"],
        bias: Float[Tensor, " C"],
    ):
        self.x, self.kernel, self.bias = x, kernel, bias

    @cached_property
    def output(self) -> Float[Tensor, "n h w o"]:
        """Space-to-depth output for all images, before bias and sigmoid."""
        return conv2d(self.x, self.kernel)


class FusedImageMSE:
    """Prediction of one image with a squared error loss, as in `distributions.MSE`.

    All images of a decoder share the last layer. The channels of this image start at
    channel `offset` of the layer's output, which may be larger than the image, at the
    bottom and right.
    """

    def __init__(
        self,
        layer: LazyLastLayer,
        batch: torch.Size,
        shape: tuple[int, ...],
        offset: int,
    ):
        self.layer, self.batch, self.shape, self.offset = layer, batch, shape, offset

    def pred(self) -> Float[Tensor, "*b h w c"]:
        height, width, channels = self.shape
        total = len(self.layer.bias)
        x = rearrange(
            self.layer.output[..., : 4 * total].float(),
            "n h w (y x c) -> n (h y) (w x) c",
            y=2,
            x=2,
        )
        x = torch.sigmoid(x + self.layer.bias.float())
        x = x[:, :height, :width, self.offset : self.offset + channels]
        return x.reshape(*self.batch, *self.shape)

    def loss(self, target: Tensor) -> Float[Tensor, "*b"]:
        if target.dtype != torch.uint8:
            error = self.pred() - target.float() / 255
            return error.square().flatten(-3).sum(-1)
        target = target.reshape(-1, *self.shape)
        x, kernel, bias = self.layer.x, self.layer.kernel, self.layer.bias
        is_only_image = self.shape[-1] == len(bias)
        if is_only_image and last_layer.is_supported(x.shape[-1], len(bias), x):
            loss = last_layer.last_layer_loss(x, kernel, bias, target)
        else:
            output = self.layer.output
            loss = apply_autograd(_ImageLoss, output, bias, target, self.offset)
        return loss.reshape(self.batch)


class _AddNormSilu(torch.autograd.Function):
    """Add outputs of a block-linear (`x0`) and a linear layer (`x1`); RMS norm; SiLU.

    `x0` is (blocks, batch, pixels, channels of a block), `x1` is (batch, pixels,
    channels), both without bias; the biases have the same axes except batch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x0: Tensor,
        x1: Tensor,
        bias0: Tensor,
        bias1: Tensor,
        scale: Tensor,
        eps: float,
        shape: tuple[int, int, int],
    ) -> Tensor:
        x0, x1 = x0.contiguous(), x1.contiguous()
        h, w, channels = shape
        y = torch.empty_like(x1)
        ctx.settings = len(x1), h * w, channels, channels // len(x0), eps
        if len(x1):
            block_rows, columns = tile_shape(channels)
            grid = (triton.cdiv(len(x1) * h * w, block_rows),)
            inputs = (x0, x1, bias0, bias1, scale, y)
            _add_norm_silu[grid](*inputs, *ctx.settings, block_rows, columns)
        ctx.save_for_backward(x0, x1, bias0, bias1, scale)
        return y.view(-1, h, w, channels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x0, x1, bias0, bias1, scale = ctx.saved_tensors
        batch, pixels, channels, _, _ = ctx.settings
        dx0, dx1 = torch.empty_like(x0), torch.empty_like(x1)
        block_rows, columns = tile_shape(channels)
        tiles = triton.cdiv(batch * pixels, block_rows)
        programs = num_programs(x0.device, tiles)
        partial = torch.empty(programs, channels, device=x0.device)
        _add_norm_silu_backward[(programs,)](
            *(x0, x1, bias0, bias1, scale, grad.contiguous(), dx0, dx1, partial),
            *(*ctx.settings, triton.cdiv(tiles, programs), block_rows, columns),
        )
        # `dx0` and `dx1` are equal except for their layout, and so are the bias grads
        dbias1 = dx1.sum(0, dtype=torch.float32)
        dbias0 = dbias1.view(pixels, len(x0), -1).transpose(0, 1).reshape(-1)
        return (
            *(dx0, dx1, dbias0.to(bias0.dtype), dbias1.to(bias1.dtype)),
            *(sum_partials(partial).to(scale.dtype), None, None),
        )


class _ImageLoss(torch.autograd.Function):
    """Squared error of every image, from the last layer's space-to-depth output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, target: Tensor, offset: int
    ) -> Tensor:
        x, target = x.contiguous(), target.contiguous()
        loss = torch.empty(len(x), device=x.device)
        ctx.sizes = _loss_sizes(x, bias, target, offset)
        if len(x):
            inputs = (x, bias, target, loss, None, None, None)
            _image_loss[(len(x),)](*inputs, *ctx.sizes)
        ctx.save_for_backward(x, bias, target)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, target = ctx.saved_tensors
        dx = torch.empty_like(x)
        partial = torch.empty(len(x), x.shape[-1], device=x.device)
        if len(x):
            inputs = (x, bias, target, None, grad.contiguous(), dx, partial)
            _image_loss[(len(x),)](*inputs, *ctx.sizes)
        dbias = sum_partials(partial)[: 4 * len(bias)].view(4, -1).sum(0)
        return dx, dbias.to(bias.dtype), None, None


def _loss_sizes(
    x: Tensor, bias: Tensor, target: Tensor, offset: int
) -> tuple[int, ...]:
    """Return the size arguments of `_image_loss`."""
    _, h, w, channels = x.shape
    rows, columns = tile_shape(channels, TILE)
    steps = triton.cdiv(h * w, rows)
    image = target.shape[1:]
    return (h * w, w, channels, len(bias), *image, offset, steps, rows, columns)


@jit
def _load_sum(
    x0, x1, bias0, bias1, row, col, mask, batch, pixels, channels, block_width
):
    """Return the sum of both inputs with their biases, and the offsets of both.

    A row is one pixel of one batch entry.
    """
    b, pixel = row // pixels, row % pixels
    block, unit = col // block_width, col % block_width
    offset0 = ((block * batch + b) * pixels + pixel) * block_width + unit
    offset1 = row * channels + col
    v = tl.load(x0 + offset0, mask, 0.0).to(tl.float32)
    v += tl.load(x1 + offset1, mask, 0.0).to(tl.float32)
    entry = (block * pixels + pixel) * block_width + unit
    v += tl.load(bias0 + entry, mask, 0.0).to(tl.float32)
    v += tl.load(bias1 + pixel * channels + col, mask, 0.0).to(tl.float32)
    return v, offset0, offset1


@jit
def _add_norm_silu(
    x0, x1, bias0, bias1, scale, y, batch, pixels, channels, block_width, eps,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add both inputs and their biases, normalize and activate R pixels."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.arange(0, C)[None, :]
    mask = (row < batch * pixels) & (col < channels)
    v, _, offset = _load_sum(
        x0, x1, bias0, bias1, row, col, mask, batch, pixels, channels, block_width
    )
    gain = load_columns(scale, col, channels)
    tl.store(y + offset, norm_silu(v, gain, channels, eps), mask)


@jit
def _add_norm_silu_backward(
    x0, x1, bias0, bias1, scale, dy, dx0, dx1, partial,
    batch, pixels, channels, block_width, eps,
    STEPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of both inputs, and partial sums of that of the scale."""
    col = tl.arange(0, C)[None, :]
    gain = load_columns(scale, col, channels)
    dscale = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile.to(tl.int64) * R + tl.arange(0, R)[:, None]
        mask = (row < batch * pixels) & (col < channels)
        v, offset0, offset1 = _load_sum(
            x0, x1, bias0, bias1, row, col, mask, batch, pixels, channels, block_width
        )
        dv = tl.load(dy + offset1, mask, 0.0).to(tl.float32)
        dv, dgain = norm_silu_backward(v, dv, gain, channels, eps)
        dscale += dgain
        tl.store(dx0 + offset0, dv, mask)
        tl.store(dx1 + offset1, dv, mask)
    col = tl.arange(0, C)
    ptr = partial + tl.program_id(0) * channels + col
    tl.store(ptr, tl.sum(dscale, 0), col < channels)


@jit
def _image_loss(
    x, bias, target, loss, grad, dx, partial,
    pixels, map_width, channels, total, height, width, colors, first_color,
    STEPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sum the squared error of one image; with `grad`, compute gradients instead.

    These are the gradient of the layer's output (`dx`) and its sum over pixels
    (`partial`). The layer has `total` colors per sub-pixel; those of the image start at
    `first_color`. `height` and `width` are those of the image. The layer's output has
    half the resolution: it has `pixels` pixels, and its width is `map_width`.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * pixels * channels
    target += row * height * width * colors
    if grad is not None:
        dx += row * pixels * channels
        twice_grad = 2 * tl.load(grad + row)
    col = tl.arange(0, C)[None, :]
    biases = tl.load(bias + col % total, col < 4 * total, 0.0).to(tl.float32)
    sums = tl.zeros((R, C), tl.float32)
    for step in range(STEPS):
        pixel = step * R + tl.arange(0, R)[:, None]
        sub, color = col // total, col % total - first_color
        offset, mask = image_offset(pixel, sub, color, map_width, height, width, colors)
        mask = mask & (color >= 0) & (color < colors) & (pixel < pixels)
        x_offset = pixel * channels + col
        v = tl.load(x + x_offset, mask, 0.0).to(tl.float32)
        true = tl.load(target + offset, mask, 0).to(tl.float32) / 255
        pred = tl.sigmoid(v + biases)
        if grad is None:
            error = tl.where(mask, pred - true, 0.0)
            sums += error * error
        else:
            dv = twice_grad * (pred - true) * pred * (1 - pred)
            dv = tl.where(mask, dv, 0.0)
            sums += dv
            tl.store(dx + x_offset, dv, (pixel < pixels) & (col < channels))
    if grad is None:
        tl.store(loss + row, tl.sum(sums))
    else:
        col = tl.arange(0, C)
        tl.store(partial + row * channels + col, tl.sum(sums, 0), col < channels)
