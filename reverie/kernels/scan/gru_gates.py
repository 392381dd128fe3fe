"""The gates of the block GRU in one kernel, for dreams: there is no gradient."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

BLOCK = 1024


def gru_gates(
    gates: Float[Tensor, "G N W3"],
    bias: Float[Tensor, " D3"],
    deter: Float[Tensor, "N D"],
    out: Float[Tensor, "N D"] | None = None,
) -> Float[Tensor, "N D"]:
    """The next `deter` from what the last block layer computes before its bias.

    Every block holds its reset, candidate and update, one after the other. Rows of
    `deter`, and of `out` if it is given, may lie apart.
    """
    blocks, rows, _ = gates.shape
    gates, width = gates.contiguous(), deter.shape[1]
    new = torch.empty_like(deter) if out is None else out
    assert deter.stride(1) == new.stride(1) == 1
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        apart = deter.stride(0), new.stride(0)
        _gates[grid](
            gates, bias, deter, new, *apart, rows, width, width // blocks, BLOCK
        )
    return new


@triton.jit
@no_type_check
def _gates(
    gates,
    bias,
    deter,
    new,
    deter_apart,
    new_apart,
    rows,
    width,
    each: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    block, unit = col // each, col % each
    place = (block * rows + row) * (3 * each) + unit
    shift = block * (3 * each) + unit
    reset = tl.load(gates + place, inside, 0.0).to(tl.float32)
    reset += tl.load(bias + shift, inside, 0.0).to(tl.float32)
    candidate = tl.load(gates + place + each, inside, 0.0).to(tl.float32)
    candidate += tl.load(bias + shift + each, inside, 0.0).to(tl.float32)
    update = tl.load(gates + place + 2 * each, inside, 0.0).to(tl.float32)
    update += tl.load(bias + shift + 2 * each, inside, 0.0).to(tl.float32)
    old = tl.load(deter + row * deter_apart + col, inside, 0.0).to(tl.float32)
    # tanh by its definition: the sigmoid is the one that every backend has
    candidate = 2 * tl.sigmoid(2 * tl.sigmoid(reset) * candidate) - 1
    update = tl.sigmoid(update - 1)
    value = update * candidate + (1 - update) * old
    tl.store(new + row * new_apart + col, value, inside)
