"""One kernel that computes the logits of categoricals and samples them.

It is used for imagination and acting, without gradients. The kernel reads the
pre-activations of the last hidden layer, and does not write the logits to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from reverie.kernels.launch import block_size, jit
from reverie.kernels.norm.norm_linear import norm_silu_dot, tile_sizes
from reverie.nets.blocks import Linear, Norm

MAX_CLASSES = 128
"""Maximum number of classes: one program has all classes of a categorical."""

COLUMNS = 64
"""Logits per program; more only if a single categorical has more classes."""


def sample_layer(
    x: Float[Tensor, "N H"],
    bias: Float[Tensor, " H"],
    norm: Norm,
    layer: Linear,
    noise: Float[Tensor, "N S K"],
    unimix: float,
    dtype: torch.dtype = torch.int64,
    onehot: Float[Tensor, "N S K"] | None = None,
) -> Int[Tensor, "N S"]:
    """Return samples of the categoricals with logits `layer(silu(norm(x + bias)))`.

    They are class indices in the given dtype, and also written to `onehot`, which may
    have any row stride. `noise` is exponential, as in `heads/onehot.py`.
    """
    weight, logit_bias = layer.cast(x.dtype)
    rows, groups, classes = noise.shape
    index = torch.empty(rows, groups, dtype=dtype, device=x.device)
    assert x.stride(1) == 1
    assert onehot is None or onehot.stride()[1:] == (classes, 1)
    if rows:
        padded = block_size(classes)
        per_tile = max(1, min(COLUMNS // padded, triton.next_power_of_2(groups)))
        tile_rows, chunk = tile_sizes(x)
        grid = (triton.cdiv(rows, tile_rows), triton.cdiv(groups, per_tile))
        _sample_layer[grid](
            *(x, bias, norm.scale, weight.contiguous(), logit_bias),
            *(noise.contiguous(), onehot, index, norm.eps, unimix, rows, x.stride(0)),
            *(0 if onehot is None else onehot.stride(0), norm.width, groups, classes),
            *(tile_rows, chunk, per_tile, padded),
        )
    return index


@jit
def _sample_layer(
    x, bias, scale, weight, logit_bias, noise, onehot, index, eps, unimix,
    rows, x_stride, onehot_stride,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, CLASSES: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sample G categoricals (groups) of R rows.

    K is CLASSES padded to a power of two, and C the number of inputs per iteration of
    `norm_silu_dot`.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    first_group = tl.program_id(1) * G
    # a column is a class of a group; both are padded to powers of two
    col = tl.arange(0, G * K)
    group, label = first_group + col // K, col % K
    mask = (group < GROUPS) & (label < CLASSES)
    output = group * CLASSES + label
    logits = norm_silu_dot(
        x, bias, scale, weight, row, output, mask, eps, rows, x_stride,
        WIDTH, R, C, G * K,
    )  # fmt: skip
    logits += tl.load(logit_bias + output, mask, 0.0).to(tl.float32)[None, :]
    v = tl.reshape(tl.where(mask[None, :], logits, float("-inf")), (R, G, K))
    # at least -1e30: all values of a padding group are -inf, and -inf - -inf is NaN
    v = tl.exp(v - tl.maximum(tl.max(v, 2), -1e30)[:, :, None])
    p = v / tl.maximum(tl.sum(v, 2), 1e-30)[:, :, None]
    p = (1 - unimix) * p + unimix / CLASSES

    row = row[:, None, None]
    group = (first_group + tl.arange(0, G))[None, :, None]
    label = tl.arange(0, K)[None, None, :]
    mask = (row < rows) & (group < GROUPS) & (label < CLASSES)
    offset = (row.to(tl.int64) * GROUPS + group) * CLASSES + label
    score = tl.where(mask, p / tl.load(noise + offset, mask, 1.0), -1.0)
    # if all scores are NaN, the argmax may be in the padding
    sample = tl.minimum(tl.argmax(score, 2), CLASSES - 1)[:, :, None]
    if onehot is not None:
        offset = row.to(tl.int64) * onehot_stride + group * CLASSES + label
        tl.store(onehot + offset, (label == sample).to(tl.float32), mask)
    mask = (row < rows) & (group < GROUPS)
    offset = row.to(tl.int64) * GROUPS + group
    tl.store(index + offset, sample.to(index.dtype.element_ty), mask)
