"""The loop of the gated units (`nets/gru.py`) as one kernel each way.

A program has some rows of one unit and its recurrent weights at hand, and goes through
all steps by itself. On the way back it leaves the gradients of all gates behind, from
which those of the weights follow as one product over all steps.

Letters: `G` units, `D` width, `W` three times `D`. States are float32, products are
computed in the dtype that is asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import apply_autograd, can_launch
from reverie.nets.gru import GRU, Hold, Route

ROWS = 16
"""Rows of one program: the fewest that a product takes."""
WIDTHS = {2: (16, 32, 64, 128), 4: (16, 32)}
"""Units whose weights one program can hold, by the bytes of a number."""
WARPS = 8


class FastGRU(GRU):
    """The same units; see the top of this file."""

    def scan(
        self,
        gates: Float[Tensor, "G B T W"],
        start: Float[Tensor, "G B D"],
        route: Route,
        backwards: Collection[int] = (),
    ) -> Float[Tensor, "G B T D"]:
        fits = self.width in WIDTHS.get(self.dtype.itemsize, ())
        if not fits or not can_launch(gates.device, gates.dtype):
            return super().scan(gates, start, route, backwards)
        weight, bias = self.weight_hh.to(self.dtype), self.bias_hh
        turned = sum(1 << unit for unit in backwards)
        return apply_autograd(_Scan, gates, start, weight, bias, *route, turned)


class FastHold(Hold):
    """The same in one kernel each way."""

    def forward(
        self,
        fresh: Float[Tensor, "B T Z"],
        read: Float[Tensor, "B T"],
        copy: Float[Tensor, "B T"],
    ) -> Float[Tensor, "B T Z"]:
        if not can_launch(fresh.device, fresh.dtype):
            return super().forward(fresh, read, copy)
        return apply_autograd(_Hold, fresh, read, copy)


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fresh: Tensor, read: Tensor, copy: Tensor) -> Tensor:
        fresh, read, copy = (x.contiguous() for x in (fresh, read, copy))
        held = torch.empty_like(fresh)
        rows, steps, width = fresh.shape
        sizes = rows, steps, width, triton.next_power_of_2(width), ROWS
        _hold[(triton.cdiv(rows, ROWS),)](fresh, read, copy, held, *sizes, num_warps=1)
        ctx.save_for_backward(fresh, read, copy, held)
        return held

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:
        fresh, read, copy, held = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (fresh, read, copy)]
        rows, steps, width = fresh.shape
        sizes = rows, steps, width, triton.next_power_of_2(width), ROWS
        _hold_back[(triton.cdiv(rows, ROWS),)](
            *(slope.contiguous(), fresh, read, copy, held, *grads, *sizes), num_warps=1
        )
        return tuple(grads)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        start: Tensor,
        weight: Tensor,
        bias: Tensor,
        keep: Tensor | None,
        move: Tensor | None,
        stay: Tensor | None,
        fresh: Tensor | None,
        turned: int,
    ) -> Tensor:
        units, rows, steps, width = *gates.shape[:3], start.shape[-1]
        gates = gates if gates.stride(-1) == 1 else gates.contiguous()
        weight, bias, start = (x.contiguous() for x in (weight, bias, start))
        route = [None if x is None else x.contiguous() for x in (keep, move, stay)]
        fresh = None if fresh is None else fresh.contiguous()
        out = gates.new_empty(units, rows, steps, width, dtype=torch.float32)
        opened = gates.new_empty(units, rows, steps, 4, width, dtype=torch.float32)
        past = torch.empty_like(out, dtype=weight.dtype)
        sizes = (rows, steps, *gates.stride()[:3], turned, width, ROWS)
        _forward[(units, triton.cdiv(rows, ROWS))](
            *(gates, weight, bias, start, *route, fresh, out, opened, past, *sizes),
            num_warps=WARPS,
        )
        ctx.save_for_backward(out, opened, past, start, weight, *route)
        ctx.turned, ctx.has_fresh = turned, fresh is not None
        ctx.layout = gates.shape, gates.stride(), gates.dtype
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        out, opened, past, start, weight, *route = ctx.saved_tensors
        units, rows, steps, width = out.shape
        slope = slope.contiguous()
        shape, stride, dtype = ctx.layout
        dgates = out.new_empty_strided(shape, stride, dtype=dtype)
        dhidden = past.new_empty(units, rows, steps, 3 * width)
        dstart = torch.empty_like(start)
        dfresh = torch.empty_like(out) if ctx.has_fresh else None
        droute = [None if x is None else torch.empty_like(x) for x in route]
        sizes = (rows, steps, *dgates.stride()[:3], ctx.turned, width, ROWS)
        _backward[(units, triton.cdiv(rows, ROWS))](
            *(slope, weight, start, *route, out, opened),
            *(dgates, dhidden, dstart, *droute, dfresh, *sizes),
            num_warps=WARPS,
        )
        dhidden, past = dhidden.flatten(1, 2), past.flatten(1, 2)
        dweight = torch.bmm(dhidden.mT, past)
        dbias = dhidden.sum(1, dtype=torch.float32)
        return dgates, dstart, dweight, dbias, *droute, dfresh, None


@triton.jit
@no_type_check
def _dot(a, b, sums):
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["steps", "turned"])
@no_type_check
def _forward(
    gates,
    weight,
    bias,
    start,
    keep,
    move,
    stay,
    fresh,
    out,
    opened,
    past,
    rows,
    steps,
    unit_apart,
    row_apart,
    step_apart,
    turned,
    D: tl.constexpr,
    R: tl.constexpr,
):
    unit = tl.program_id(0)
    row = tl.program_id(1) * R + tl.arange(0, R)
    inside = row < rows
    col = tl.arange(0, D)
    mask = inside[:, None] & (col < D)[None, :]
    is_turned = (turned >> unit) & 1

    kind = weight.dtype.element_ty
    weight += unit * 3 * D * D + col[None, :] * D + col[:, None]  # transposed
    reset_weight, update_weight = tl.load(weight), tl.load(weight + D * D)
    candidate_weight = tl.load(weight + 2 * D * D)
    bias += unit * 3 * D + col
    reset_bias, update_bias = tl.load(bias)[None, :], tl.load(bias + D)[None, :]
    candidate_bias = tl.load(bias + 2 * D)[None, :]
    begin = (unit * rows + row)[:, None] * D + col[None, :]
    state = tl.load(start + begin, mask, 0.0).to(tl.float32)

    for i in range(steps):
        t = tl.where(is_turned == 1, steps - 1 - i, i)
        at = gates + unit * unit_apart + row[:, None] * row_apart
        at += t * step_apart + col[None, :]
        reset = tl.load(at, mask, 0.0).to(tl.float32)
        update = tl.load(at + D, mask, 0.0).to(tl.float32)
        candidate = tl.load(at + 2 * D, mask, 0.0).to(tl.float32)
        flag = (unit * rows + row) * steps + t
        place = flag[:, None] * D + col[None, :]

        kept = state
        if keep is not None:
            kept = state * tl.load(keep + flag, inside, 0.0)[:, None]
        exact = kept.to(kind)
        zeros = tl.zeros((R, D), tl.float32)
        reset += _dot(exact, reset_weight, zeros) + reset_bias
        update += _dot(exact, update_weight, zeros) + update_bias
        hidden = _dot(exact, candidate_weight, zeros) + candidate_bias
        reset, update = tl.sigmoid(reset), tl.sigmoid(update)
        candidate = 2 * tl.sigmoid(2 * (candidate + reset * hidden)) - 1  # tanh
        value = candidate + update * (kept - candidate)
        if move is not None:
            value *= tl.load(move + flag, inside, 0.0)[:, None]
        if stay is not None:
            value += state * tl.load(stay + flag, inside, 0.0)[:, None]
        if fresh is not None:
            value += tl.load(fresh + place, mask, 0.0)
        state = value

        tl.store(out + place, state, mask)
        tl.store(past + place, exact, mask)
        at = opened + flag[:, None] * (4 * D) + col[None, :]
        tl.store(at, reset, mask)
        tl.store(at + D, update, mask)
        tl.store(at + 2 * D, candidate, mask)
        tl.store(at + 3 * D, hidden, mask)


@triton.jit(do_not_specialize=["steps", "turned"])
@no_type_check
def _backward(
    slope,
    weight,
    start,
    keep,
    move,
    stay,
    out,
    opened,
    dgates,
    dhidden,
    dstart,
    dkeep,
    dmove,
    dstay,
    dfresh,
    rows,
    steps,
    unit_apart,
    row_apart,
    step_apart,
    turned,
    D: tl.constexpr,
    R: tl.constexpr,
):
    unit = tl.program_id(0)
    row = tl.program_id(1) * R + tl.arange(0, R)
    inside = row < rows
    col = tl.arange(0, D)
    mask = inside[:, None] & (col < D)[None, :]
    is_turned = (turned >> unit) & 1

    kind = weight.dtype.element_ty
    weight += unit * 3 * D * D + col[:, None] * D + col[None, :]
    reset_weight, update_weight = tl.load(weight), tl.load(weight + D * D)
    candidate_weight = tl.load(weight + 2 * D * D)
    begin = (unit * rows + row)[:, None] * D + col[None, :]
    dstate = tl.zeros((R, D), tl.float32)

    for i in range(steps):
        t = tl.where(is_turned == 1, i, steps - 1 - i)
        before = tl.where(is_turned == 1, t + 1, t - 1)
        flag = (unit * rows + row) * steps + t
        place = flag[:, None] * D + col[None, :]
        at = opened + flag[:, None] * (4 * D) + col[None, :]
        reset = tl.load(at, mask, 0.0)
        update = tl.load(at + D, mask, 0.0)
        candidate = tl.load(at + 2 * D, mask, 0.0)
        hidden = tl.load(at + 3 * D, mask, 0.0)
        left = (tl.full((R, 1), steps - 1, tl.int32) - i) > 0
        last = tl.load(out + place + (before - t) * D, mask & left, 0.0)
        last += tl.load(start + begin, mask & ~left, 0.0).to(tl.float32)
        dstate += tl.load(slope + place, mask, 0.0).to(tl.float32)

        kept = last
        if keep is not None:
            held = tl.load(keep + flag, inside, 0.0)[:, None]
            kept = last * held
        dvalue = dstate
        if move is not None:
            value = candidate + update * (kept - candidate)
            tl.store(dmove + flag, tl.sum(dstate * value, 1), inside)
            dvalue = dstate * tl.load(move + flag, inside, 0.0)[:, None]
        if dfresh is not None:
            tl.store(dfresh + place, dstate, mask)

        dkept = dvalue * update
        dupdate = dvalue * (kept - candidate) * update * (1 - update)
        dcandidate = dvalue * (1 - update) * (1 - candidate * candidate)
        inner = (dcandidate * reset).to(kind)
        dreset = dcandidate * hidden * reset * (1 - reset)
        at = dgates + unit * unit_apart + row[:, None] * row_apart
        at += t * step_apart + col[None, :]
        tl.store(at, dreset, mask)
        tl.store(at + D, dupdate, mask)
        tl.store(at + 2 * D, dcandidate, mask)
        at = dhidden + flag[:, None] * (3 * D) + col[None, :]
        dreset, dupdate = dreset.to(kind), dupdate.to(kind)
        tl.store(at, dreset, mask)
        tl.store(at + D, dupdate, mask)
        tl.store(at + 2 * D, inner, mask)
        dkept = _dot(dreset, reset_weight, dkept)
        dkept = _dot(dupdate, update_weight, dkept)
        dkept = _dot(inner, candidate_weight, dkept)

        dlast = dkept
        if keep is not None:
            tl.store(dkeep + flag, tl.sum(dkept * last, 1), inside)
            dlast = dkept * held
        if stay is not None:
            tl.store(dstay + flag, tl.sum(dstate * last, 1), inside)
            dlast += dstate * tl.load(stay + flag, inside, 0.0)[:, None]
        dstate = dlast

    tl.store(dstart + begin, dstate, mask)


@triton.jit
@no_type_check
def _hold(
    fresh, read, copy, held, rows, steps, width, Z: tl.constexpr, R: tl.constexpr
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    col = tl.arange(0, Z)[None, :]
    inside = row < rows
    mask = inside[:, None] & (col < width)
    value = tl.zeros((R, Z), tl.float32)
    for t in range(steps):
        flag = row * steps + t
        place = flag[:, None] * width + col
        new = tl.load(fresh + place, mask, 0.0)
        new *= tl.load(read + flag, inside, 0.0)[:, None]
        value = new + value * tl.load(copy + flag, inside, 0.0)[:, None]
        tl.store(held + place, value, mask)


@triton.jit
@no_type_check
def _hold_back(
    slope,
    fresh,
    read,
    copy,
    held,
    dfresh,
    dread,
    dcopy,
    rows,
    steps,
    width,
    Z: tl.constexpr,
    R: tl.constexpr,
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    col = tl.arange(0, Z)[None, :]
    inside = row < rows
    mask = inside[:, None] & (col < width)
    dvalue = tl.zeros((R, Z), tl.float32)
    for i in range(steps):
        flag = row * steps + (steps - 1 - i)
        place = flag[:, None] * width + col
        left = (tl.full((R, 1), steps - 1, tl.int32) - i) > 0
        last = tl.load(held + place - width, mask & left, 0.0)
        new = tl.load(fresh + place, mask, 0.0)
        dvalue += tl.load(slope + place, mask, 0.0)
        tl.store(dread + flag, tl.sum(dvalue * new, 1), inside)
        tl.store(dcopy + flag, tl.sum(dvalue * last, 1), inside)
        begun = dvalue * tl.load(read + flag, inside, 0.0)[:, None]
        tl.store(dfresh + place, begun, mask)
        dvalue *= tl.load(copy + flag, inside, 0.0)[:, None]
