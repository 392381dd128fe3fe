"""The Triton kernels of one backward step; `tiles.py` explains the layout.

Names that begin with `d` are gradients; those that end with `norm` are gradients of the
output of an RMS norm. `din_norm` has 2 U columns: those of in0, then those of in1.
Names that begin with `grad` are incoming gradients. `after` is `at` of the next step.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from reverie.kernels.scan.triton.tiles import (
    class_tile,
    dot,
    dot_rows,
    load_is_first,
    norm_grad,
    row_tile,
    softmax_terms,
    store_norm_output_grad,
    store_rounded,
    sum_partials,
    tanh,
)

# fmt: off


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def logits_backward(
    din_norm, in1_pre, in1_scale, in1_partials, inv_rms, is_first, weight, logits,
    grad_stoch, grad_logits, dlogits, t, length, batch, unimix,
    U: tl.constexpr, S: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    PADDED: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, PADDED_K: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dlogits from in1 of the next step and the incoming gradients."""
    BN: tl.constexpr = BS * PADDED_K
    L: tl.constexpr = S * K
    rows, mask, at, input_at = row_tile(t, length, batch, BM)
    columns, valid = class_tile(S, K, BS, PADDED_K)
    mask_valid = mask & valid[None, :]
    grad = tl.zeros((BM, BN), tl.float32)
    if t + 1 < length:
        after = at + batch
        inv_rms1 = tl.load(inv_rms + after * 4 + 1, mask=rows < batch, other=0.0)
        mean = sum_partials(in1_partials, rows, batch, TILES, PADDED) / U
        for k in range(0, U, BK):
            offs_k = k + tl.arange(0, BK)
            offs = after[:, None] * U + offs_k[None, :]
            # rows of din_norm are twice as long as those of in1_pre
            a = norm_grad(
                din_norm + U, in1_pre, in1_scale, offs + after[:, None] * U, offs,
                offs_k, mask, inv_rms1, mean,
            )
            b = weight + offs_k[:, None] * L + columns[None, :]
            grad = dot(a, tl.load(b, mask=valid[None, :], other=0.0), grad, PRECISION)
        first = load_is_first(is_first, t + 1, length, batch, rows)
        grad = tl.where(first, 0.0, grad)
    offs = at[:, None] * L + columns[None, :]
    input_at = input_at * L + columns[None, :]
    grad += tl.load(grad_stoch + input_at, mask=mask_valid, other=0.0).to(tl.float32)
    value = tl.load(logits + offs, mask=mask_valid, other=float("-inf")).to(tl.float32)
    # padded classes and NaN logits get probability 0
    value = tl.where(valid[None, :] & (value == value), value, float("-inf"))
    exps, total = softmax_terms(tl.where(mask, value, 0.0), BM, BS, PADDED_K)
    probs = exps / total
    grad = tl.reshape(grad, (BM, BS, PADDED_K))
    grad = (1 - unimix) * probs * (grad - tl.sum(grad * probs, 2)[:, :, None])
    grad = tl.reshape(grad, (BM, BN))
    grad += tl.load(grad_logits + input_at, mask=mask_valid, other=0.0).to(tl.float32)
    store_rounded(dlogits + offs, mask_valid, grad)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def norm_output_backward(
    inputs, weight, pre, scale, inv_rms, dnorm, partials, t, length, batch,
    NORM: tl.constexpr, F: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    ROW: tl.constexpr, INPUT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the gradient of the output of a norm of width F, for obs and hid.

    `inputs` are the gradients of the next layer's outputs, with a row stride of `ROW`;
    each block of W columns depends on K of them. `NORM` is the column of `inv_rms`.
    """
    tile = tl.program_id(0)
    rows, mask, at, _ = row_tile(t, length, batch, BM)
    columns = tile * BN + tl.arange(0, BN)
    block = tile * BN // W
    acc = tl.zeros((BM, BN), tl.float32)
    acc = dot_rows(
        acc, inputs + at[:, None] * ROW + block * K, weight, columns, mask, K,
        INPUT_STRIDE, OUTPUT_STRIDE, BK, PRECISION,
    )
    offs = at[:, None] * F + columns[None, :]
    store_norm_output_grad(
        acc, pre, offs, scale, columns, inv_rms + at * 4 + NORM, dnorm + offs, partials,
        tile, rows, batch,
    )


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def gates_backward(
    dobs_norm, obs_pre, obs_scale, obs_partials, din_norm, in0_pre, in0_scale,
    in0_partials, inv_rms, is_first, weight, grad_deter, gates, prev_deter, ddeter,
    dgates, t, length, batch,
    D: tl.constexpr, U: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr,
    PADDED: tl.constexpr, TILES0: tl.constexpr, PADDED0: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add up the gradient of deter from all layers that read it; compute dgates.

    `weight` has the rows of in0_weight, then those of obs_weight. `ddeter` contains the
    contribution of the next step's `inputs_backward` to the gradient of deter. It is
    overwritten with the gradient of the previous deter through the update gate.
    """
    tile = tl.program_id(0)
    rows, mask, at, input_at = row_tile(t, length, batch, BM)
    columns = tile * BN + tl.arange(0, BN)
    block = tile * BN // W
    acc = tl.zeros((BM, BN), tl.float32)
    if t + 1 < length:
        after = at + batch
        inv_rms0 = tl.load(inv_rms + after * 4, mask=rows < batch, other=0.0)
        mean0 = sum_partials(in0_partials, rows, batch, TILES0, PADDED0) / U
        for k in range(0, U, BK):
            offs_k = k + tl.arange(0, BK)
            offs = after[:, None] * U + offs_k[None, :]
            a = norm_grad(
                din_norm, in0_pre, in0_scale, offs + after[:, None] * U, offs, offs_k,
                mask, inv_rms0, mean0,
            )
            b = tl.load(weight + offs_k[:, None] * D + columns[None, :])
            acc = dot(a, b, acc, PRECISION)
        first = load_is_first(is_first, t + 1, length, batch, rows)
        acc = tl.where(first, 0.0, acc)
    inv_rms3 = tl.load(inv_rms + at * 4 + 3, mask=rows < batch, other=0.0)
    mean3 = sum_partials(obs_partials, rows, batch, TILES, PADDED) / U
    for k in range(0, U, BK):
        offs_k = k + tl.arange(0, BK)
        offs = at[:, None] * U + offs_k[None, :]
        a = norm_grad(
            dobs_norm, obs_pre, obs_scale, offs, offs, offs_k, mask, inv_rms3, mean3
        )
        b = tl.load(weight + (U + offs_k)[:, None] * D + columns[None, :])
        acc = dot(a, b, acc, PRECISION)
    input_at = input_at * D + columns[None, :]
    grad = acc + tl.load(grad_deter + input_at, mask=mask, other=0.0).to(tl.float32)
    carried = ddeter + rows[:, None] * D + columns[None, :]
    grad += tl.load(carried, mask=mask, other=0.0)
    gate = at[:, None] * (3 * D) + block * 3 * W + (columns - block * W)[None, :]
    reset = tl.sigmoid(tl.load(gates + gate, mask=mask, other=0.0).to(tl.float32))
    candidate = tl.load(gates + gate + W, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(gates + gate + 2 * W, mask=mask, other=0.0).to(tl.float32)
    update = tl.sigmoid(update - 1)
    offs = at[:, None] * D + columns[None, :]
    prev = tl.load(prev_deter + offs, mask=mask, other=0.0).to(tl.float32)
    new = tanh(reset * candidate)
    dtanh = grad * update * (1 - new * new)
    dreset = dtanh * candidate * reset * (1 - reset)
    dupdate = grad * (new - prev) * update * (1 - update)
    store_rounded(dgates + gate, mask, dreset)
    store_rounded(dgates + gate + W, mask, dtanh * reset)
    store_rounded(dgates + gate + 2 * W, mask, dupdate)
    tl.store(carried, grad * (1 - update), mask=mask)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def inputs_backward(
    dhid_norm, hid_pre, hid_scale, hid_partials, inv_rms, is_first, weight, in0_pre,
    in1_pre, in0_scale, in1_scale, din_norm, in0_partials, in1_partials, ddeter, t,
    length, batch,
    D: tl.constexpr, U: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr,
    PADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute gradients of the inputs of `hid`: of deter, and of in0 and in1.

    Those of in0 and in1 are gradients of the norms' outputs, in `din_norm`.
    """
    tile = tl.program_id(0)
    rows, mask, at, _ = row_tile(t, length, batch, BM)
    inv_rms2 = tl.load(inv_rms + at * 4 + 2, mask=rows < batch, other=0.0)
    mean = sum_partials(hid_partials, rows, batch, TILES, PADDED) / D
    acc = tl.zeros((BM, BN), tl.float32)
    if tile < 2 * U // BN:
        units = tile * BN + tl.arange(0, BN)
        for k in range(0, D, BK):
            offs_k = k + tl.arange(0, BK)
            block = k // W
            offs = at[:, None] * D + offs_k[None, :]
            a = norm_grad(
                dhid_norm, hid_pre, hid_scale, offs, offs, offs_k, mask, inv_rms2, mean
            )
            weight_rows = (block * (W + 3 * U) + W + units) * W
            b = tl.load(weight + weight_rows[None, :] + (offs_k - block * W)[:, None])
            acc = dot(a, b, acc, PRECISION)
        dnorm = din_norm + at[:, None] * (2 * U) + units[None, :]
        if tile < U // BN:
            store_norm_output_grad(
                acc, in0_pre, at[:, None] * U + units[None, :], in0_scale, units,
                inv_rms + at * 4, dnorm, in0_partials, tile, rows, batch,
            )
        else:
            in1_unit = units - U
            store_norm_output_grad(
                acc, in1_pre, at[:, None] * U + in1_unit[None, :], in1_scale, in1_unit,
                inv_rms + at * 4 + 1, dnorm, in1_partials, tile - U // BN, rows, batch,
            )
    else:
        columns = (tile - 2 * U // BN) * BN + tl.arange(0, BN)
        block = (tile - 2 * U // BN) * BN // W
        weight_rows = (block * (W + 3 * U) + columns - block * W) * W
        for k in range(0, W, BK):
            offs_k = k + tl.arange(0, BK)
            inputs = block * W + offs_k
            offs = at[:, None] * D + inputs[None, :]
            a = norm_grad(
                dhid_norm, hid_pre, hid_scale, offs, offs, inputs, mask, inv_rms2, mean
            )
            b = tl.load(weight + weight_rows[None, :] + offs_k[:, None])
            acc = dot(a, b, acc, PRECISION)
        carried = ddeter + rows[:, None] * D + columns[None, :]
        acc += tl.load(carried, mask=mask, other=0.0)
        first = load_is_first(is_first, t, length, batch, rows)
        tl.store(carried, tl.where(first, 0.0, acc), mask=mask)
