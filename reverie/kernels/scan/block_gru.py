"""The gates of the block GRU as one kernel without gradients, for single steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import jit

BLOCK = 1024
"""Units of deter that one program computes."""


def block_gru_gates(
    gates: Float[Tensor, "G N W3"],
    bias: Float[Tensor, " D3"],
    deter: Float[Tensor, "N D"],
    out: Float[Tensor, "N D"] | None = None,
) -> Float[Tensor, "N D"]:
    """Return the next `deter`, given the outputs of the gate layer without its bias.

    Each of the `G` blocks has W reset gates, then W candidates and W update gates: W3
    and D3 are 3 W and 3 D. `deter` and `out` may have any row stride.
    """
    blocks, rows, _ = gates.shape
    gates, width = gates.contiguous(), deter.shape[1]
    new = torch.empty_like(deter) if out is None else out
    assert deter.stride(1) == new.stride(1) == 1
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        strides = deter.stride(0), new.stride(0)
        _gates[grid](
            gates, bias, deter, new, *strides, rows, width, width // blocks, BLOCK
        )
    return new


# fmt: off


@jit
def _load_gate(gates, bias, offs, bias_offs, mask):
    """Return outputs of the gate layer with their bias."""
    gate = tl.load(gates + offs, mask, 0.0).to(tl.float32)
    return gate + tl.load(bias + bias_offs, mask, 0.0).to(tl.float32)


@jit
def _gates(
    gates, bias, deter, new, deter_stride, new_stride, rows, width,
    W: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute BLOCK units of the next deter of one row; W is the width of a block."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    block, unit = col // W, col % W
    offs = (block * rows + row) * (3 * W) + unit
    bias_offs = block * (3 * W) + unit
    reset = _load_gate(gates, bias, offs, bias_offs, mask)
    candidate = _load_gate(gates, bias, offs + W, bias_offs + W, mask)
    update = _load_gate(gates, bias, offs + 2 * W, bias_offs + 2 * W, mask)
    old = tl.load(deter + row * deter_stride + col, mask, 0.0).to(tl.float32)
    # tanh in terms of the sigmoid, which every Triton backend supports
    candidate = 2 * tl.sigmoid(2 * tl.sigmoid(reset) * candidate) - 1
    update = tl.sigmoid(update - 1)  # a bias of -1, as in DreamerV3
    value = update * candidate + (1 - update) * old
    tl.store(new + row * new_stride + col, value, mask)
