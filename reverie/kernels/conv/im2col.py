"""4 x 4 convolutions of stride 2 from or to an image, as matrix products.

The input of an encoder's first layer and the output of a decoder's last layer are
images. cuDNN pads their few channels (colors) to the number that its kernels need. Here
the 4 x 4 patches of the image, two pixels apart, are the rows of a matrix (im2col). The
convolution gathers patches and multiplies; the transposed convolution multiplies and
adds up overlapping patches (col2im). Each is the backward pass of the other.

The matrix product is a Triton kernel, because cuBLAS leaves some rows of such tall
matrices unwritten if MPS limits the process to a part of the GPU (28 SMs of an H200).

K is the number of elements of a patch, sixteen per color, in the order y, x, color.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import apply_autograd, block_size, jit

GEOMETRY = KERNEL, STRIDE, PADDING = 4, 2, 1
"""Kernel size, stride and padding of the supported layers."""
MAX_COLORS = 4
"""Maximum number of channels of the image."""
CHUNKS = 256
"""Number of chunks into which the rows are divided for the weight gradient; their
products are added up."""
ELEMENTS, WARPS = 1024, 4
"""Elements and warps per program of the im2col and col2im kernels."""
ROWS, DEPTH, MAX_COLUMNS = 128, 64, 128
"""Tile of the matrix product: output rows, inner size per step, output columns."""


def conv2d(
    x: Float[Tensor, "n c h w"], weight: Float[Tensor, "o c 4 4"]
) -> Float[Tensor, "n o h2 w2"]:
    """Convolve an image; the image gets no gradient."""
    n, _, h, w = x.shape
    matrix = weight.permute(2, 3, 1, 0).flatten(0, 2).to(x.dtype)  # (K, o)
    with torch.no_grad():
        patches = _im2col(x.permute(0, 2, 3, 1).contiguous())
    y = apply_autograd(_MatMul, patches, matrix)
    return y.reshape(n, h // STRIDE, w // STRIDE, -1).permute(0, 3, 1, 2)


def conv_transpose2d(
    x: Float[Tensor, "n e h w"], weight: Float[Tensor, "e c 4 4"]
) -> Float[Tensor, "n c h2 w2"]:
    """Apply a transposed convolution whose output is an image."""
    n, channels, h, w = x.shape
    matrix = weight.permute(0, 2, 3, 1).flatten(1).to(x.dtype)  # (e, K)
    rows = x.permute(0, 2, 3, 1).reshape(-1, channels)
    patches = apply_autograd(_MatMul, rows, matrix)
    image = apply_autograd(_Col2Im, patches.reshape(n, h, w, -1))
    return image.permute(0, 3, 1, 2)


class _MatMul(torch.autograd.Function):
    """Product of very many rows with a small matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        return _multiply(rows, matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        rows, matrix = ctx.saved_tensors
        grad = grad.contiguous()
        drows = _multiply(grad, matrix.T) if ctx.needs_input_grad[0] else None
        chunks = CHUNKS if len(rows) % CHUNKS == 0 else 1
        x, y = (z.reshape(chunks, -1, z.shape[1]) for z in (rows, grad))
        dmatrix = torch.bmm(x.mT, y).sum(0, dtype=torch.float32)
        return drows, dmatrix.to(matrix.dtype)


class _Col2Im(torch.autograd.Function):
    """Add up overlapping patches to an image."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor) -> Tensor:
        patches = patches.contiguous()
        n, h, w, size = patches.shape
        colors = size // KERNEL**2
        image = patches.new_empty(n, STRIDE * h, STRIDE * w, colors)
        grid = (n, triton.cdiv(image[0].numel(), ELEMENTS))
        _col2im_kernel[grid](*(patches, image, h, w, colors, ELEMENTS), num_warps=WARPS)
        return image

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        n, h, w, _ = grad.shape
        return _im2col(grad.contiguous()).reshape(n, h // STRIDE, w // STRIDE, -1)


def _multiply(
    rows: Float[Tensor, "r K"], matrix: Float[Tensor, "K C"]
) -> Float[Tensor, "r C"]:
    """Return the matrix product; `matrix` may have any strides."""
    rows = rows.contiguous()
    (count, depth), width = rows.shape, matrix.shape[1]
    out = rows.new_empty(count, width)
    columns = min(MAX_COLUMNS, block_size(width))
    grid = triton.cdiv(width, columns), triton.cdiv(count, ROWS)
    _multiply_kernel[grid](
        *(rows, matrix, out, count, *matrix.stride(), depth, width),
        *(ROWS, DEPTH, columns),
        num_warps=8,
    )
    return out


def _im2col(image: Float[Tensor, "n h w c"]) -> Float[Tensor, "r K"]:
    """Return one row per patch; pixels outside of the image are zero."""
    n, h, w, colors = image.shape
    patches, size = (h // STRIDE) * (w // STRIDE), KERNEL**2 * colors
    rows = image.new_empty(n * patches, size)
    columns = triton.next_power_of_2(size)
    block_rows = max(1, ELEMENTS // columns)
    _im2col_kernel[(n, triton.cdiv(patches, block_rows))](
        *(image, rows, h, w, colors, columns, block_rows), num_warps=WARPS
    )
    return rows


@jit
def _multiply_kernel(
    rows, matrix, out, count, row_stride, column_stride,
    K: tl.constexpr, WIDTH: tl.constexpr,
    R: tl.constexpr, DEPTH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Multiply R rows with C columns of the matrix, DEPTH inputs at a time."""
    row = tl.program_id(1).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    sums = tl.zeros((R, C), tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left, right = k[None, :], k[:, None]
        x = tl.load(rows + row * K + left, (row < count) & (left < K), 0.0)
        ptr = matrix + right * row_stride + col * column_stride
        y = tl.load(ptr, (right < K) & (col < WIDTH), 0.0)
        sums = tl.dot(x, y, sums, input_precision="ieee")
    mask = (row < count) & (col < WIDTH)
    tl.store(out + row * WIDTH + col, sums.to(out.dtype.element_ty), mask)


@jit
def _im2col_kernel(
    image, rows, h, w, COLORS: tl.constexpr, K: tl.constexpr, R: tl.constexpr
):
    """Copy R patches of an image to rows; K is padded to a power of two."""
    n = tl.program_id(0).to(tl.int64)
    patches = (h // 2) * (w // 2)
    patch = tl.program_id(1) * R + tl.arange(0, R)[:, None]
    k = tl.arange(0, K)[None, :]
    y = 2 * (patch // (w // 2)) - 1 + k // (4 * COLORS)
    x = 2 * (patch % (w // 2)) - 1 + (k // COLORS) % 4
    valid = (patch < patches) & (k < 16 * COLORS)
    inside = valid & (y >= 0) & (y < h) & (x >= 0) & (x < w)
    image += n * (h * w * COLORS)
    value = tl.load(image + (y * w + x) * COLORS + k % COLORS, inside, 0.0)
    rows += n * (patches * 16 * COLORS)
    tl.store(rows + patch * (16 * COLORS) + k, value, valid)


@jit
def _col2im_kernel(patches, image, h, w, COLORS: tl.constexpr, N: tl.constexpr):
    """Sum the patches that contain each pixel: two along each axis."""
    n = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * N + tl.arange(0, N)
    valid = offset < 4 * h * w * COLORS
    color, pixel = offset % COLORS, offset // COLORS
    x, y = pixel % (2 * w), pixel // (2 * w)
    patches += n * (h * w * 16 * COLORS)
    value = tl.zeros((N,), tl.float32)
    for i in tl.static_range(2):
        tap_y = (y + 1) % 2 + 2 * i
        patch_y = (y + 1 - tap_y) // 2
        valid_y = valid & (y + 1 >= tap_y) & (patch_y < h)
        for j in tl.static_range(2):
            tap_x = (x + 1) % 2 + 2 * j
            patch_x = (x + 1 - tap_x) // 2
            mask = valid_y & (x + 1 >= tap_x) & (patch_x < w)
            k = (patch_y * w + patch_x) * 16 + tap_y * 4 + tap_x
            value += tl.load(patches + k * COLORS + color, mask, 0.0).to(tl.float32)
    image += n * (4 * h * w * COLORS)
    tl.store(image + offset, value.to(image.dtype.element_ty), valid)
