"""Convolutions with few colors on one side, as products of patches.

The first layer of an encoder and the last one of a decoder have a map of many channels
on one side and a picture on the other. Libraries pad the colors of the picture to the
width their kernels want. Here the 4 x 4 patches of the picture, two pixels apart, are
rows of a matrix, and the layer is a product with it: halving gathers patches first,
doubling adds up overlapping patches afterwards, and each is the way back of the other.

The product has a kernel of its own: on a part of a GPU (28 multiprocessors of an H200,
under MPS) cuBLAS leaves some of so many rows unwritten.

Letters: `K` entries of a patch, sixteen for each color, in the order y, x, color.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import apply_autograd

SIDE, STRIDE, PAD = 4, 2, 1
"""Of the layers this is for."""
COLORS = 4
"""The most that a patch has room for."""
PARTS = 256
"""Rows of a product of tall matrices are shared among so many smaller ones."""
ENTRIES, WARPS = 1024, 4
"""Of one program, which works on one picture."""
TALL, DEEP, WIDE = 128, 64, 128
"""Of a product, what one program does: rows, entries at a time, and columns at most."""


def halve(
    x: Float[Tensor, "n c h w"], weight: Float[Tensor, "o c 4 4"]
) -> Float[Tensor, "n o h2 w2"]:
    """A convolution that halves a picture, which gets no gradient."""
    n, _, h, w = x.shape
    matrix = weight.permute(2, 3, 1, 0).flatten(0, 2).to(x.dtype)  # (K, o)
    with torch.no_grad():
        rows = _gather(x.permute(0, 2, 3, 1).contiguous())
    y = apply_autograd(_Tall, rows, matrix)
    return y.reshape(n, h // STRIDE, w // STRIDE, -1).permute(0, 3, 1, 2)


def double(
    x: Float[Tensor, "n e h w"], weight: Float[Tensor, "e c 4 4"]
) -> Float[Tensor, "n c h2 w2"]:
    """A transposed convolution that doubles a map into a picture."""
    n, units, h, w = x.shape
    matrix = weight.permute(0, 2, 3, 1).flatten(1).to(x.dtype)  # (e, K)
    rows = x.permute(0, 2, 3, 1).reshape(-1, units)
    patches = apply_autograd(_Tall, rows, matrix)
    picture = apply_autograd(_Overlap, patches.reshape(n, h, w, -1))
    return picture.permute(0, 3, 1, 2)


class _Tall(torch.autograd.Function):
    """A product with a small matrix, whose gradient sums over very many rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        return _multiply(rows, matrix)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor]:
        rows, matrix = ctx.saved_tensors
        slope = slope.contiguous()
        drows = _multiply(slope, matrix.T) if ctx.needs_input_grad[0] else None
        parts = PARTS if len(rows) % PARTS == 0 else 1
        x, y = (z.reshape(parts, -1, z.shape[1]) for z in (rows, slope))
        dmatrix = torch.bmm(x.mT, y).sum(0, dtype=torch.float32)
        return drows, dmatrix.to(matrix.dtype)


class _Overlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, patches: Tensor) -> Tensor:
        patches = patches.contiguous()
        n, h, w, entries = patches.shape
        colors = entries // SIDE**2
        picture = patches.new_empty(n, STRIDE * h, STRIDE * w, colors)
        grid = (n, triton.cdiv(picture[0].numel(), ENTRIES))
        _add_patches[grid](*(patches, picture, h, w, colors, ENTRIES), num_warps=WARPS)
        return picture

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        n, h, w, _ = slope.shape
        return _gather(slope.contiguous()).reshape(n, h // STRIDE, w // STRIDE, -1)


def _multiply(
    rows: Float[Tensor, "r K"], matrix: Float[Tensor, "K C"]
) -> Float[Tensor, "r C"]:
    """A product of very many rows with a small matrix."""
    rows = rows.contiguous()
    (count, depth), width = rows.shape, matrix.shape[1]
    out = rows.new_empty(count, width)
    wide = min(WIDE, max(16, triton.next_power_of_2(width)))
    grid = triton.cdiv(width, wide), triton.cdiv(count, TALL)
    _multiply_rows[grid](
        *(rows, matrix, out, count, *matrix.stride(), depth, width),
        *(TALL, DEEP, wide),
        num_warps=8,
    )
    return out


def _gather(picture: Float[Tensor, "n h w c"]) -> Float[Tensor, "r K"]:
    """The patches of all pictures, one a row; beyond the edge everything is zero."""
    n, h, w, colors = picture.shape
    count, entries = (h // STRIDE) * (w // STRIDE), SIDE**2 * colors
    rows = picture.new_empty(n * count, entries)
    wide = triton.next_power_of_2(entries)
    tall = max(1, ENTRIES // wide)
    _gather_patches[(n, triton.cdiv(count, tall))](
        *(picture, rows, h, w, colors, wide, tall), num_warps=WARPS
    )
    return rows


@triton.jit
@no_type_check
def _multiply_rows(
    rows,
    matrix,
    out,
    count,
    deeper,
    wider,
    K: tl.constexpr,
    C: tl.constexpr,
    TALL: tl.constexpr,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
    col = tl.program_id(0) * WIDE + tl.arange(0, WIDE)[None, :]
    sums = tl.zeros((TALL, WIDE), tl.float32)
    for start in range(0, K, DEEP):
        deep = start + tl.arange(0, DEEP)
        left, right = deep[None, :], deep[:, None]
        x = tl.load(rows + row * K + left, (row < count) & (left < K), 0.0)
        at = matrix + right * deeper + col * wider
        y = tl.load(at, (right < K) & (col < C), 0.0)
        sums = tl.dot(x, y, sums, input_precision="ieee")
    inside = (row < count) & (col < C)
    tl.store(out + row * C + col, sums.to(out.dtype.element_ty), inside)


@triton.jit
@no_type_check
def _gather_patches(
    picture, rows, h, w, C: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    count = (h // 2) * (w // 2)
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)[:, None]
    entry = tl.arange(0, WIDE)[None, :]
    y = 2 * (row // (w // 2)) - 1 + entry // (4 * C)
    x = 2 * (row % (w // 2)) - 1 + (entry // C) % 4
    known = (row < count) & (entry < 16 * C)
    inside = known & (y >= 0) & (y < h) & (x >= 0) & (x < w)
    picture += n * (h * w * C)
    value = tl.load(picture + (y * w + x) * C + entry % C, inside, 0.0)
    tl.store(rows + n * (count * 16 * C) + row * (16 * C) + entry, value, known)


@triton.jit
@no_type_check
def _add_patches(patches, picture, h, w, C: tl.constexpr, ENTRIES: tl.constexpr):
    """Every pixel is in four patches: two above each other, two side by side."""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    known = at < 4 * h * w * C
    color, pixel = at % C, at // C
    x, y = pixel % (2 * w), pixel // (2 * w)
    patches += n * (h * w * 16 * C)
    value = tl.zeros((ENTRIES,), tl.float32)
    for i in tl.static_range(2):
        tap_y = (y + 1) % 2 + 2 * i
        from_y = (y + 1 - tap_y) // 2
        right_y = known & (y + 1 >= tap_y) & (from_y < h)
        for j in tl.static_range(2):
            tap_x = (x + 1) % 2 + 2 * j
            from_x = (x + 1 - tap_x) // 2
            inside = right_y & (x + 1 >= tap_x) & (from_x < w)
            entry = (from_y * w + from_x) * 16 + tap_y * 4 + tap_x
            value += tl.load(patches + entry * C + color, inside, 0.0).to(tl.float32)
    picture += n * (4 * h * w * C)
    tl.store(picture + at, value.to(picture.dtype.element_ty), known)
