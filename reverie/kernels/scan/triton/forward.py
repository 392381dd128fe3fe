"""The five Triton kernels of one forward step; `tiles.py` explains the layout."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from reverie.kernels.scan.triton.tiles import (
    class_tile,
    dot,
    dot_rows,
    load_is_first,
    norm_act,
    row_tile,
    softmax_terms,
    store_partial,
    store_rounded,
    sum_partials,
    tanh,
)

# fmt: off


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def hidden_forward(
    prev_deter, in0_pre, in1_pre, in0_scale, in1_scale, in0_partials, in1_partials,
    projected_actions, weight, hid_pre, hid_partials, shared_input, inv_rms, t, length,
    batch, eps,
    D: tl.constexpr, U: tl.constexpr, W: tl.constexpr, TILES0: tl.constexpr,
    PADDED0: tl.constexpr, TILES1: tl.constexpr, PADDED1: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute hid_pre from the block's deter, in0, in1 and the projected actions."""
    tile = tl.program_id(0)
    rows, mask, at, input_at = row_tile(t, length, batch, BM)
    block = tile * BN // W
    columns = tile * BN + tl.arange(0, BN)
    block_column = columns - block * W
    weight += block * (W + 3 * U) * W
    squares0 = sum_partials(in0_partials, rows, batch, TILES0, PADDED0)
    squares1 = sum_partials(in1_partials, rows, batch, TILES1, PADDED1)
    inv_rms0, inv_rms1 = tl.rsqrt(squares0 / U + eps), tl.rsqrt(squares1 / U + eps)
    acc = tl.zeros((BM, BN), tl.float32)
    block_deter = prev_deter + at[:, None] * D + block * W
    acc = dot_rows(acc, block_deter, weight, block_column, mask, W, W, 1, BW, PRECISION)
    weight += W * W
    pre_row = at[:, None] * U
    shared_row = shared_input + at[:, None] * (3 * U)
    for k in range(0, U, BU):
        offs_k = k + tl.arange(0, BU)
        offs = pre_row + offs_k[None, :]
        a = norm_act(in0_pre, in0_scale, offs, offs_k, mask, inv_rms0)
        b = tl.load(weight + offs_k[:, None] * W + block_column[None, :])
        acc = dot(a, b, acc, PRECISION)
        if tile == 0:
            tl.store(shared_row + offs_k[None, :], a, mask=mask)
    for k in range(0, U, BU):
        offs_k = k + tl.arange(0, BU)
        offs = pre_row + offs_k[None, :]
        a = norm_act(in1_pre, in1_scale, offs, offs_k, mask, inv_rms1)
        b = tl.load(weight + (U + offs_k)[:, None] * W + block_column[None, :])
        acc = dot(a, b, acc, PRECISION)
        if tile == 0:
            tl.store(shared_row + U + offs_k[None, :], a, mask=mask)
    input_at = input_at * D + columns[None, :]
    acc += tl.load(projected_actions + input_at, mask=mask, other=0.0).to(tl.float32)
    value = store_rounded(hid_pre + at[:, None] * D + columns[None, :], mask, acc)
    store_partial(hid_partials, tile, rows, batch, value * value)
    if tile == 0:
        tl.store(inv_rms + at * 4, inv_rms0, mask=rows < batch)
        tl.store(inv_rms + at * 4 + 1, inv_rms1, mask=rows < batch)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def gates_forward(
    hid_pre, scale, hid_partials, weight, bias, prev_deter, is_first, gates, deter,
    hid_act, inv_rms, t, length, batch, eps,
    D: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the gates and the new deter."""
    tile = tl.program_id(0)
    rows, mask, at, _ = row_tile(t, length, batch, BM)
    block = tile * BN // W
    columns = tile * BN + tl.arange(0, BN)
    block_column = columns - block * W
    weight += block * W * (3 * W)
    squares = sum_partials(hid_partials, rows, batch, TILES, PADDED)
    inv_rms2 = tl.rsqrt(squares / D + eps)
    reset = tl.zeros((BM, BN), tl.float32)
    candidate = tl.zeros((BM, BN), tl.float32)
    update = tl.zeros((BM, BN), tl.float32)
    for k in range(0, W, BK):
        offs_k = k + tl.arange(0, BK)
        offs = at[:, None] * D + block * W + offs_k[None, :]
        a = norm_act(hid_pre, scale, offs, block * W + offs_k, mask, inv_rms2)
        b = weight + offs_k[:, None] * (3 * W) + block_column[None, :]
        reset = dot(a, tl.load(b), reset, PRECISION)
        candidate = dot(a, tl.load(b + W), candidate, PRECISION)
        update = dot(a, tl.load(b + 2 * W), update, PRECISION)
        if tile * BN == block * W:
            tl.store(hid_act + offs, a, mask=mask)
    bias += block * 3 * W + block_column
    gates += at[:, None] * (3 * D) + block * 3 * W + block_column[None, :]
    reset = store_rounded(gates, mask, reset + tl.load(bias)[None, :].to(tl.float32))
    candidate += tl.load(bias + W)[None, :].to(tl.float32)
    candidate = store_rounded(gates + W, mask, candidate)
    update += tl.load(bias + 2 * W)[None, :].to(tl.float32)
    update = store_rounded(gates + 2 * W, mask, update)
    offs = at[:, None] * D + columns[None, :]
    prev = tl.load(prev_deter + offs, mask=mask, other=0.0).to(tl.float32)
    candidate = tanh(tl.sigmoid(reset) * candidate)
    update = tl.sigmoid(update - 1)
    new = store_rounded(deter + offs, mask, update * candidate + (1 - update) * prev)
    if t + 1 < length:
        first = load_is_first(is_first, t + 1, length, batch, rows)
        store_rounded(prev_deter + offs + batch * D, mask, tl.where(first, 0.0, new))
    if tile == 0:
        tl.store(inv_rms + at * 4 + 2, inv_rms2, mask=rows < batch)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def inputs_forward(
    deter, weight, in0_bias, tokens, is_first, in0_pre, obs_pre, in0_partials,
    obs_partials, t, length, batch,
    D: tl.constexpr, U: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the layers that read the new deter: in0_pre of the next step, obs_pre.

    `weight` has the rows of in0_weight, then those of obs_weight.
    """
    tile = tl.program_id(0)
    rows, mask, at, input_at = row_tile(t, length, batch, BM)
    units = tile * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    inputs = deter + at[:, None] * D
    acc = dot_rows(acc, inputs, weight, units, mask, D, 1, D, BK, PRECISION)
    if tile * BN < U:
        if t + 1 < length:
            first = load_is_first(is_first, t + 1, length, batch, rows)
            acc = tl.where(first, 0.0, acc)
            acc += tl.load(in0_bias + units)[None, :].to(tl.float32)
            after = (at[:, None] + batch) * U + units[None, :]
            value = store_rounded(in0_pre + after, mask, acc)
            store_partial(in0_partials, tile, rows, batch, value * value)
    else:
        obs_units = (units - U)[None, :]
        token_offs = input_at * U + obs_units
        acc += tl.load(tokens + token_offs, mask=mask, other=0.0).to(tl.float32)
        value = store_rounded(obs_pre + at[:, None] * U + obs_units, mask, acc)
        store_partial(obs_partials, tile - U // BN, rows, batch, value * value)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def logits_forward(
    obs_pre, scale, obs_partials, weight, bias, noise, is_first, logits, stoch,
    prev_stoch, samples, obs_act, inv_rms, t, length, batch, eps, unimix,
    U: tl.constexpr, S: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    PADDED: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, PADDED_K: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute logits and samples of some categorical variables."""
    BN: tl.constexpr = BS * PADDED_K
    L: tl.constexpr = S * K
    tile = tl.program_id(0)
    rows, mask, at, input_at = row_tile(t, length, batch, BM)
    columns, valid = class_tile(S, K, BS, PADDED_K)
    squares = sum_partials(obs_partials, rows, batch, TILES, PADDED)
    inv_rms3 = tl.rsqrt(squares / U + eps)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, U, BK):
        offs_k = k + tl.arange(0, BK)
        offs = at[:, None] * U + offs_k[None, :]
        a = norm_act(obs_pre, scale, offs, offs_k, mask, inv_rms3)
        b = weight + columns[None, :] * U + offs_k[:, None]
        acc = dot(a, tl.load(b, mask=valid[None, :], other=0.0), acc, PRECISION)
        if tile == 0:
            tl.store(obs_act + offs, a, mask=mask)
    acc += tl.load(bias + columns, mask=valid, other=0.0)[None, :].to(tl.float32)
    offs = at[:, None] * L + columns[None, :]
    mask_valid = mask & valid[None, :]
    value = store_rounded(logits + offs, mask_valid, acc)
    value = tl.where(valid[None, :], value, float("-inf"))
    exps, total = softmax_terms(value, BM, BS, PADDED_K)
    probs = (1 - unimix) * exps / total + unimix / K
    input_at = input_at * L + columns[None, :]
    noise_values = tl.load(noise + input_at, mask=mask_valid, other=float("inf"))
    sample = tl.argmax(probs / tl.reshape(noise_values, (BM, BS, PADDED_K)), 2)
    one_hot = tl.arange(0, PADDED_K)[None, None, :] == sample[:, :, None]
    one_hot = tl.reshape(one_hot.to(tl.float32), (BM, BN))
    store_rounded(stoch + offs, mask_valid, one_hot)
    variables = tile * BS + tl.arange(0, BS)
    sample_offs = samples + rows[:, None] * S + variables[None, :]
    tl.store(sample_offs, sample, mask=mask & (variables < S)[None, :])
    if t + 1 < length:
        first = load_is_first(is_first, t + 1, length, batch, rows)
        masked = tl.where(first, 0.0, one_hot)
        store_rounded(prev_stoch + offs + batch * L, mask_valid, masked)
    if tile == 0:
        tl.store(inv_rms + at * 4 + 3, inv_rms3, mask=rows < batch)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def in1_forward(
    samples, weight, bias, is_first, in1_pre, in1_partials, t, length, batch,
    U: tl.constexpr, S: tl.constexpr, K: tl.constexpr, PADDED_S: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute in1_pre of the next step: sum the weight rows of the sampled classes."""
    row, tile = tl.program_id(0), tl.program_id(1)
    variables = tl.arange(0, PADDED_S)
    units = tile * BN + tl.arange(0, BN)
    label = tl.load(samples + row * S + variables, mask=variables < S, other=0)
    offs = (variables * K + label)[:, None] * U + units[None, :]
    value = tl.load(weight + offs, mask=(variables < S)[:, None], other=0.0)
    total = tl.sum(value.to(tl.float32), 0)
    first = tl.load(is_first + row * length + t + 1)
    total = tl.where(first != 0, 0.0, total) + tl.load(bias + units).to(tl.float32)
    total = total.to(in1_pre.dtype.element_ty)
    tl.store(in1_pre + ((t + 1) * batch + row) * U + units, total)
    total = total.to(tl.float32)
    tl.store(in1_partials + tile * batch + row, tl.sum(total * total, 0))
