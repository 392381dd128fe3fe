"""Fast version of the GRU's loop over time (`nets/gru.py`).

One kernel computes the forward pass of all steps, another one the backward pass. A
program computes some rows of one of the `G` GRUs for all steps, and keeps the
recurrent weights of this GRU in registers. The backward kernel stores the gradients of
the gates (`dgates`) and of the products with the recurrent weights (`drecurrent`). The
weight gradients are then one matrix product over all steps. See
`nets.gru.StateUpdate` for `input_scale`, `output_scale`, `state_scale` and `offset`.

Sizes: `G` GRUs, `B` batch, `T` time steps, `D` width of the state, `W` = 3 D gates.
States are float32; products are computed in the GRU's dtype. In the kernels, `scaled`
is the state times `input_scale`, and R is the number of rows of a program.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import apply_autograd, can_launch, jit
from reverie.nets.gru import GRU, SegmentHold, StateUpdate

ROWS = 16
"""Rows of one program: the smallest size of a matrix product in Triton."""
WIDTHS = {2: (16, 32, 64, 128), 4: (16, 32)}
"""Widths whose weights fit into the registers of one program, by bytes per weight."""
WARPS = 8
"""Warps of a program."""


class FastGRU(GRU):
    """GRU whose `scan` is one kernel each for the forward and the backward pass."""

    def scan(
        self,
        gates: Float[Tensor, "G B T W"],
        start: Float[Tensor, "G B D"],
        state_update: StateUpdate,
        backwards: Collection[int] = (),
    ) -> Float[Tensor, "G B T D"]:
        fits = self.width in WIDTHS.get(self.dtype.itemsize, ())
        if not fits or not can_launch(gates.device, gates.dtype):
            return super().scan(gates, start, state_update, backwards)
        weight, bias = self.weight_hh.to(self.dtype), self.bias_hh
        # one bit per GRU: set if it runs from the last step to the first
        reversed_grus = sum(1 << gru for gru in backwards)
        tensors = (gates, start, weight, bias, *state_update)
        return apply_autograd(_GRUScan, *tensors, reversed_grus)


class FastSegmentHold(SegmentHold):
    """`SegmentHold` with one kernel each for the forward and the backward pass."""

    def forward(
        self,
        x: Float[Tensor, "B T Z"],
        update: Float[Tensor, "B T"],
        copy: Float[Tensor, "B T"],
    ) -> Float[Tensor, "B T Z"]:
        if not can_launch(x.device, x.dtype):
            return super().forward(x, update, copy)
        return apply_autograd(_SegmentHold, x, update, copy)


class _SegmentHold(torch.autograd.Function):
    """Return the recurrence `held = update * x + copy * held` of every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor, copy: Tensor) -> Tensor:
        x, update, copy = (each.contiguous() for each in (x, update, copy))
        held = torch.empty_like(x)
        _launch_hold(_hold_forward, x, update, copy, held)
        ctx.save_for_backward(x, update, copy, held)
        return held

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors[:3]
        grads = tuple(torch.empty_like(each) for each in inputs)
        _launch_hold(_hold_backward, *ctx.saved_tensors, grad.contiguous(), *grads)
        return grads


def _launch_hold(kernel: Any, x: Tensor, *tensors: Tensor) -> None:
    """Launch the forward or the backward kernel of `_SegmentHold`."""
    rows, steps, width = x.shape
    sizes = rows, steps, width, triton.next_power_of_2(width), ROWS
    kernel[(triton.cdiv(rows, ROWS),)](x, *tensors, *sizes, num_warps=1)


class _GRUScan(torch.autograd.Function):
    """Return the states of all steps."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        start: Tensor,
        weight: Tensor,
        bias: Tensor,
        input_scale: Tensor | None,
        output_scale: Tensor | None,
        state_scale: Tensor | None,
        offset: Tensor | None,
        reversed_grus: int,
    ) -> Tensor:
        grus, rows, steps, width = *gates.shape[:3], start.shape[-1]
        gates = gates if gates.stride(-1) == 1 else gates.contiguous()
        weight, bias, start = (x.contiguous() for x in (weight, bias, start))
        factors = [
            None if x is None else x.contiguous()
            for x in (input_scale, output_scale, state_scale)
        ]
        offset = None if offset is None else offset.contiguous()
        out = gates.new_empty(grus, rows, steps, width, dtype=torch.float32)
        saved_gates = gates.new_empty(grus, rows, steps, 4, width, dtype=torch.float32)
        previous = torch.empty_like(out, dtype=weight.dtype)
        sizes = (rows, steps, *gates.stride()[:3], reversed_grus, width, ROWS)
        _scan_forward[(grus, triton.cdiv(rows, ROWS))](
            *(gates, weight, bias, start, *factors, offset, out, saved_gates, previous),
            *sizes,
            num_warps=WARPS,
        )
        ctx.save_for_backward(out, saved_gates, previous, start, weight, *factors)
        ctx.reversed_grus, ctx.has_offset = reversed_grus, offset is not None
        ctx.layout = gates.shape, gates.stride(), gates.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, saved_gates, previous, start, weight, *factors = ctx.saved_tensors
        grus, rows, steps, width = out.shape
        shape, stride, dtype = ctx.layout
        dgates = out.new_empty_strided(shape, stride, dtype=dtype)
        drecurrent = previous.new_empty(grus, rows, steps, 3 * width)
        dstart = torch.empty_like(start)
        doffset = torch.empty_like(out) if ctx.has_offset else None
        dfactors = [None if x is None else torch.empty_like(x) for x in factors]
        sizes = (rows, steps, *dgates.stride()[:3], ctx.reversed_grus, width, ROWS)
        _scan_backward[(grus, triton.cdiv(rows, ROWS))](
            *(grad.contiguous(), weight, start, *factors, out, saved_gates),
            *(dgates, drecurrent, dstart, *dfactors, doffset, *sizes),
            num_warps=WARPS,
        )
        drecurrent, previous = drecurrent.flatten(1, 2), previous.flatten(1, 2)
        dweight = torch.bmm(drecurrent.mT, previous)
        dbias = drecurrent.sum(1, dtype=torch.float32)
        return dgates, dstart, dweight, dbias, *dfactors, doffset, None


# fmt: off


@jit
def _dot(a, b, acc):
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
def _row_tile(rows, axis: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Return rows and columns of this program, and masks of those in range."""
    row = tl.program_id(axis) * R + tl.arange(0, R)
    col = tl.arange(0, D)
    row_mask = row < rows
    return row, col, row_mask, row_mask[:, None] & (col < D)[None, :]


@jit
def _gru_tile(rows, reversed_grus, D: tl.constexpr, R: tl.constexpr):
    """Return GRU and rows of this program, and the offsets of their initial states."""
    gru = tl.program_id(0)
    row, col, row_mask, mask = _row_tile(rows, 1, D, R)
    start_offsets = (gru * rows + row)[:, None] * D + col[None, :]
    return gru, row, col, row_mask, mask, start_offsets, (reversed_grus >> gru) & 1


@jit
def _load_three(pointers, stride):
    """Load the parts of a weight or bias for reset, update and candidate."""
    return tl.load(pointers), tl.load(pointers + stride), tl.load(pointers + 2 * stride)


@jit
def _load_per_row(values, index, row_mask):
    """Load one number for each row, as a column."""
    return tl.load(values + index, row_mask, 0.0)[:, None]


@jit
def _store_three(pointers, stride, mask, reset, update, candidate):
    """Store values for reset, update and candidate, `stride` apart."""
    tl.store(pointers, reset, mask)
    tl.store(pointers + stride, update, mask)
    tl.store(pointers + 2 * stride, candidate, mask)


@triton.jit(do_not_specialize=["steps", "reversed_grus"])
@no_type_check
def _scan_forward(
    gates, weight, bias, start, input_scale, output_scale, state_scale, offset, out,
    saved_gates, previous,
    rows, steps, gru_stride, row_stride, step_stride, reversed_grus,
    D: tl.constexpr, R: tl.constexpr,
):
    """Compute all states of R rows of one GRU.

    Also store what the backward pass needs: `saved_gates` (reset, update, candidate and
    `hidden`, the candidate's product with the state) and `previous` (`scaled`).
    """
    gru, row, col, row_mask, mask, start_offsets, is_reversed = _gru_tile(
        rows, reversed_grus, D, R
    )
    dtype = weight.dtype.element_ty
    weight += gru * 3 * D * D + col[None, :] * D + col[:, None]  # transposed
    reset_weight, update_weight, candidate_weight = _load_three(weight, D * D)
    reset_bias, update_bias, candidate_bias = _load_three(bias + gru * 3 * D + col, D)
    state = tl.load(start + start_offsets, mask, 0.0).to(tl.float32)

    for i in range(steps):
        t = tl.where(is_reversed == 1, steps - 1 - i, i)
        pointers = gates + gru * gru_stride + row[:, None] * row_stride
        pointers += t * step_stride + col[None, :]
        reset = tl.load(pointers, mask, 0.0).to(tl.float32)
        update = tl.load(pointers + D, mask, 0.0).to(tl.float32)
        candidate = tl.load(pointers + 2 * D, mask, 0.0).to(tl.float32)
        step = (gru * rows + row) * steps + t
        offsets = step[:, None] * D + col[None, :]

        scaled = state
        if input_scale is not None:
            scaled = state * _load_per_row(input_scale, step, row_mask)
        rounded = scaled.to(dtype)
        zeros = tl.zeros((R, D), tl.float32)
        reset += _dot(rounded, reset_weight, zeros) + reset_bias[None, :]
        update += _dot(rounded, update_weight, zeros) + update_bias[None, :]
        hidden = _dot(rounded, candidate_weight, zeros) + candidate_bias[None, :]
        reset, update = tl.sigmoid(reset), tl.sigmoid(update)
        candidate = 2 * tl.sigmoid(2 * (candidate + reset * hidden)) - 1  # tanh
        value = candidate + update * (scaled - candidate)
        if output_scale is not None:
            value *= _load_per_row(output_scale, step, row_mask)
        if state_scale is not None:
            value += state * _load_per_row(state_scale, step, row_mask)
        if offset is not None:
            value += tl.load(offset + offsets, mask, 0.0)
        state = value

        tl.store(out + offsets, state, mask)
        tl.store(previous + offsets, rounded, mask)
        pointers = saved_gates + step[:, None] * (4 * D) + col[None, :]
        _store_three(pointers, D, mask, reset, update, candidate)
        tl.store(pointers + 3 * D, hidden, mask)


@triton.jit(do_not_specialize=["steps", "reversed_grus"])
@no_type_check
def _scan_backward(
    grad, weight, start, input_scale, output_scale, state_scale, out, saved_gates,
    dgates, drecurrent, dstart,
    dinput_scale, doutput_scale, dstate_scale, doffset,
    rows, steps, gru_stride, row_stride, step_stride, reversed_grus,
    D: tl.constexpr, R: tl.constexpr,
):
    """Compute the gradients of R rows of one GRU, in reverse order of the steps."""
    gru, row, col, row_mask, mask, start_offsets, is_reversed = _gru_tile(
        rows, reversed_grus, D, R
    )
    dtype = weight.dtype.element_ty
    weight += gru * 3 * D * D + col[:, None] * D + col[None, :]
    reset_weight, update_weight, candidate_weight = _load_three(weight, D * D)
    dstate = tl.zeros((R, D), tl.float32)

    for i in range(steps):
        t = tl.where(is_reversed == 1, i, steps - 1 - i)
        prev_t = tl.where(is_reversed == 1, t + 1, t - 1)
        step = (gru * rows + row) * steps + t
        offsets = step[:, None] * D + col[None, :]
        pointers = saved_gates + step[:, None] * (4 * D) + col[None, :]
        reset = tl.load(pointers, mask, 0.0)
        update = tl.load(pointers + D, mask, 0.0)
        candidate = tl.load(pointers + 2 * D, mask, 0.0)
        hidden = tl.load(pointers + 3 * D, mask, 0.0)
        # shape (R, 1); false in the last iteration, whose step the forward pass
        # computes first
        has_prev = (tl.full((R, 1), steps - 1, tl.int32) - i) > 0
        prev = tl.load(out + offsets + (prev_t - t) * D, mask & has_prev, 0.0)
        prev += tl.load(start + start_offsets, mask & ~has_prev, 0.0).to(tl.float32)
        dstate += tl.load(grad + offsets, mask, 0.0).to(tl.float32)

        scaled = prev
        if input_scale is not None:
            input_scales = _load_per_row(input_scale, step, row_mask)
            scaled = prev * input_scales
        dvalue = dstate
        if output_scale is not None:
            value = candidate + update * (scaled - candidate)
            tl.store(doutput_scale + step, tl.sum(dstate * value, 1), row_mask)
            dvalue = dstate * _load_per_row(output_scale, step, row_mask)
        if doffset is not None:
            tl.store(doffset + offsets, dstate, mask)

        dscaled = dvalue * update
        dupdate = dvalue * (scaled - candidate) * update * (1 - update)
        dcandidate = dvalue * (1 - update) * (1 - candidate * candidate)
        dproduct = (dcandidate * reset).to(dtype)
        dreset = dcandidate * hidden * reset * (1 - reset)
        pointers = dgates + gru * gru_stride + row[:, None] * row_stride
        pointers += t * step_stride + col[None, :]
        _store_three(pointers, D, mask, dreset, dupdate, dcandidate)
        pointers = drecurrent + step[:, None] * (3 * D) + col[None, :]
        dreset, dupdate = dreset.to(dtype), dupdate.to(dtype)
        _store_three(pointers, D, mask, dreset, dupdate, dproduct)
        dscaled = _dot(dreset, reset_weight, dscaled)
        dscaled = _dot(dupdate, update_weight, dscaled)
        dscaled = _dot(dproduct, candidate_weight, dscaled)

        dprev = dscaled
        if input_scale is not None:
            tl.store(dinput_scale + step, tl.sum(dscaled * prev, 1), row_mask)
            dprev = dscaled * input_scales
        if state_scale is not None:
            tl.store(dstate_scale + step, tl.sum(dstate * prev, 1), row_mask)
            dprev += dstate * _load_per_row(state_scale, step, row_mask)
        dstate = dprev

    tl.store(dstart + start_offsets, dstate, mask)


@jit
def _hold_forward(
    x, update, copy, held, rows, steps, width, Z: tl.constexpr, R: tl.constexpr,
):
    """Compute all steps of R rows; Z is the width, padded to a power of two."""
    row, col, row_mask, _ = _row_tile(rows, 0, Z, R)
    mask = row_mask[:, None] & (col < width)[None, :]
    value = tl.zeros((R, Z), tl.float32)
    for t in range(steps):
        step = row * steps + t
        offsets = step[:, None] * width + col[None, :]
        new = tl.load(x + offsets, mask, 0.0)
        new *= _load_per_row(update, step, row_mask)
        value = new + value * _load_per_row(copy, step, row_mask)
        tl.store(held + offsets, value, mask)


@jit
def _hold_backward(
    x, update, copy, held, grad, dx, dupdate, dcopy, rows, steps, width,
    Z: tl.constexpr, R: tl.constexpr,
):
    """Compute the gradients of all steps of R rows, from the last step to the first."""
    row, col, row_mask, _ = _row_tile(rows, 0, Z, R)
    mask = row_mask[:, None] & (col < width)[None, :]
    dvalue = tl.zeros((R, Z), tl.float32)
    for i in range(steps):
        step = row * steps + (steps - 1 - i)
        offsets = step[:, None] * width + col[None, :]
        # shape (R, 1); false in the last iteration, whose step the forward pass
        # computes first
        has_prev = (tl.full((R, 1), steps - 1, tl.int32) - i) > 0
        prev = tl.load(held + offsets - width, mask & has_prev, 0.0)
        new = tl.load(x + offsets, mask, 0.0)
        dvalue += tl.load(grad + offsets, mask, 0.0)
        tl.store(dupdate + step, tl.sum(dvalue * new, 1), row_mask)
        tl.store(dcopy + step, tl.sum(dvalue * prev, 1), row_mask)
        dnew = dvalue * _load_per_row(update, step, row_mask)
        tl.store(dx + offsets, dnew, mask)
        dvalue *= _load_per_row(copy, step, row_mask)
