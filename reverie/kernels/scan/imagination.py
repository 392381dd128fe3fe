"""Kernels of a step of imagination in the RSSM, without gradients.

`embed_deter_stoch` computes the inputs that all blocks of the recurrent layer share.
`norm_silu_actions` adds the contribution of a discrete action to the output of this
layer, and normalizes it. The contributions of all actions are precomputed in a table,
so the rest of the layer can be computed before the action is known.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from reverie.kernels.launch import block_size, jit
from reverie.kernels.norm.rms_norm import load_columns, norm_silu
from reverie.nets.blocks import Norm

TILE = 8192
"""Elements that one program loads at a time."""


def embed_deter_stoch(
    x: Float[Tensor, "N H"],
    x_bias: Float[Tensor, " H"],
    x_norm: Norm,
    index: Int[Tensor, "N S"],
    weight: Float[Tensor, "SK H"],
    bias: Float[Tensor, " H"],
    norm: Norm,
) -> Float[Tensor, "N H2"]:
    """Return two hidden layers, concatenated: those of `deter` and of `stoch`.

    The first is `silu(x_norm(x + x_bias))`, where `x` is a matrix product with `deter`.
    The second is `silu(norm(onehot(index) @ weight + bias))`, where `index` are the
    sampled classes. Its product is a sum of rows of `weight`, which has one row per
    class of each group.
    """
    rows, width = x.shape
    groups = index.shape[1]
    y = x.new_empty(rows, 2 * width)
    if rows:
        columns = block_size(width)
        groups_per_load = max(1, min(TILE // columns, triton.next_power_of_2(groups)))
        _embed_deter_stoch[(rows,)](
            *(x.contiguous(), x_bias, x_norm.scale, index.contiguous(), weight, bias),
            *(
                norm.scale,
                y,
                x_norm.eps,
                norm.eps,
                width,
                groups,
                len(weight) // groups,
            ),
            *(groups_per_load, columns),
            num_warps=4 if columns <= 256 else 8,
        )
    return y


def norm_silu_actions(
    x: Float[Tensor, "G N W"],
    bias: Float[Tensor, " F"],
    norm: Norm,
    table: Float[Tensor, "G A W"],
    action: Int[Tensor, " N"],
) -> Float[Tensor, "N F"]:
    """Return `silu(norm(x + bias + table[:, action]))`.

    `x` and `table` are outputs of a `BlockLinear` in the layout (block, row, column).
    """
    blocks, rows, block_width = x.shape
    y = x.new_empty(rows, blocks * block_width)
    if rows:
        columns = block_size(y.shape[1])
        _norm_actions[(rows,)](
            *(x.contiguous(), bias, norm.scale, table.contiguous()),
            *(action.contiguous(), y, norm.eps, rows, table.shape[1]),
            *(y.shape[1], block_width, columns),
            num_warps=max(4, columns // 512),
        )
    return y


@jit
def _embed_deter_stoch(
    x, x_bias, x_scale, index, weight, bias, scale, y, x_eps, eps,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, CLASSES: tl.constexpr,
    G: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program computes one row.

    G is the number of groups per iteration. C is the number of columns of a tile: the
    smallest power of two that is at least WIDTH and 16.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, C)[None, :]
    mask = col < WIDTH
    total = tl.zeros((1, C), tl.float32)
    for start in range(0, GROUPS, G):
        group = start + tl.arange(0, G)[:, None]
        sample = tl.load(index + row * GROUPS + group, group < GROUPS, 0)
        # One row of `weight` for the sampled class of each group, with all of its
        # columns: a tile of shape (G, C).
        source = weight + (group * CLASSES + sample) * WIDTH + col
        columns = tl.load(source, (group < GROUPS) & mask, 0.0).to(tl.float32)
        total += tl.sum(columns, 0)[None, :]
    total += load_columns(bias, col, WIDTH)
    v = tl.load(x + row * WIDTH + col, mask, 0.0).to(tl.float32)
    v += load_columns(x_bias, col, WIDTH)
    v = norm_silu(v, load_columns(x_scale, col, WIDTH), WIDTH, x_eps)
    tl.store(y + row * 2 * WIDTH + col, v, mask)
    v = norm_silu(total, load_columns(scale, col, WIDTH), WIDTH, eps)
    tl.store(y + row * 2 * WIDTH + WIDTH + col, v, mask)


@jit
def _norm_actions(
    x, bias, scale, table, action, y, eps, rows, actions,
    WIDTH: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program computes one row.

    W is the width of a block. C is the number of columns of a tile: the smallest power
    of two that is at least WIDTH and 16.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, C)[None, :]
    mask = col < WIDTH
    block, unit = col // W, col % W
    # a policy that returns an invalid action must not read outside of the table
    choice = tl.minimum(tl.maximum(tl.load(action + row).to(tl.int64), 0), actions - 1)
    v = tl.load(x + (block * rows + row) * W + unit, mask, 0.0).to(tl.float32)
    v += load_columns(bias, col, WIDTH)
    source = table + (block * actions + choice) * W + unit
    v += tl.load(source, mask, 0.0).to(tl.float32)
    v = norm_silu(v, load_columns(scale, col, WIDTH), WIDTH, eps)
    tl.store(y + row * WIDTH + col, v, mask)
