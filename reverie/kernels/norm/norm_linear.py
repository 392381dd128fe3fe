"""RMS norm, SiLU and the next linear layer in one forward-only kernel.

The kernel adds the previous layer's bias to `x`, applies its norm and SiLU, and
multiplies by the weights of the next layer. Every program that computes a tile of
outputs recomputes the norm of its rows; this costs less than a separate kernel. Used
for layers of up to `MAX_WIDTH` inputs, whose time is mostly launch overhead; larger
products are faster in cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import jit, supports_large_tiles
from reverie.kernels.norm.rms_norm import is_fusable
from reverie.nets.blocks import Linear, Norm

MAX_WIDTH = 256
"""Maximum number of inputs of a layer that is fused with the norm before it.

On an H200, imagination with the preset `size25m` (384 inputs) takes 2.0 ms without and
3.1 ms with fused layers, and with `size12m` (256 inputs) 1.9 and 1.5 ms.
"""

COLUMNS = 64
"""Outputs that one program computes."""


def is_linear_fusable(norm: Norm, act: object, dtype: torch.dtype) -> bool:
    """True if `norm_silu_linear` supports the norm and activation before a layer."""
    return norm.width <= MAX_WIDTH and is_fusable(norm, act, dtype)


def norm_silu_linear(
    x: Float[Tensor, "N H"], bias: Float[Tensor, " H"], norm: Norm, layer: Linear
) -> Float[Tensor, "N O"]:
    """Return the matrix product of `layer` and `silu(norm(x + bias))`.

    The bias of `layer` is not added: the next kernel does this.
    """
    weight, _ = layer.cast(x.dtype)
    rows, width = x.shape
    y = x.new_empty(rows, len(weight))
    assert x.stride(1) == 1
    if rows:
        tile_rows, chunk = tile_sizes(x)
        grid = (triton.cdiv(rows, tile_rows), triton.cdiv(len(weight), COLUMNS))
        _norm_linear[grid](
            *(x, bias, norm.scale, weight.contiguous(), y, norm.eps),
            *(rows, x.stride(0), width, len(weight), tile_rows, chunk, COLUMNS),
        )
    return y


def tile_sizes(x: Float[Tensor, "N H"]) -> tuple[int, int]:
    """Return the number of rows of a tile, and of inputs per iteration of its loop.

    With larger tiles, weights are read less often, but fewer multiprocessors are used.
    """
    rows, width = x.shape
    tile_rows = 16 if rows <= 256 else 32 if width <= 256 else 64
    if x.dtype == torch.float32:
        return min(tile_rows, 32), 32
    # up to 256 inputs in one iteration, so that all loads start together
    if 128 < width <= 256 and supports_large_tiles(x.device):
        return tile_rows, 256
    return tile_rows, 128 if width > 64 else 64


@jit
def norm_silu_dot(
    x, bias, scale, weight, row, output, output_mask, eps, rows, x_stride,
    WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return a tile of `silu(norm(x + bias)) @ weight.T` in float32.

    The tile has the rows `row` of `x` and the outputs `output` of the layer. `weight`
    has one row per output, so `output` are indices of its rows. R is the number of rows
    of the tile, N its number of outputs, and C the number of inputs that each iteration
    of the loops reads.
    """
    k = tl.arange(0, C)
    squares = tl.zeros((R,), tl.float32)
    source = x + row.to(tl.int64)[:, None] * x_stride
    row_mask = (row < rows)[:, None]
    for start in range(0, WIDTH, C):
        col = (start + k)[None, :]
        v = tl.load(source + col, row_mask & (col < WIDTH), 0.0).to(tl.float32)
        v += tl.load(bias + col, col < WIDTH, 0.0).to(tl.float32)
        squares += tl.sum(v * v, 1)
    rstd = tl.rsqrt(squares / WIDTH + eps)[:, None]
    acc = tl.zeros((R, N), tl.float32)
    for start in range(0, WIDTH, C):
        col, inputs = (start + k)[None, :], (start + k)[:, None]
        v = tl.load(source + col, row_mask & (col < WIDTH), 0.0).to(tl.float32)
        v += tl.load(bias + col, col < WIDTH, 0.0).to(tl.float32)
        z = v * rstd * tl.load(scale + col, col < WIDTH, 0.0).to(tl.float32)
        z = (z * tl.sigmoid(z)).to(weight.dtype.element_ty)
        mask = (inputs < WIDTH) & output_mask[None, :]
        w = tl.load(weight + output[None, :] * WIDTH + inputs, mask, 0.0)
        acc = tl.dot(z, w, acc, input_precision="ieee")
    return acc


@jit
def _norm_linear(
    x, bias, scale, weight, y, eps, rows, x_stride,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program computes R rows and N outputs; see `norm_silu_dot`."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    col = tl.program_id(1) * N + tl.arange(0, N)
    acc = norm_silu_dot(
        x, bias, scale, weight, row, col, col < OUTPUTS, eps, rows, x_stride,
        WIDTH, R, C, N,
    )  # fmt: skip
    offset = row.to(tl.int64)[:, None] * OUTPUTS + col[None, :]
    tl.store(y + offset, acc, (row < rows)[:, None] & (col < OUTPUTS)[None, :])
