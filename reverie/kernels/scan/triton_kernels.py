"""The Triton kernels of one step of the posterior scan: five forth, five back.

A step is a chain of small products with norms between them. Each kernel computes a tile
of columns for a tile of rows: it prepares its inputs while it reads them (norm and
activation forth, the norm's gradient back) and finishes its outputs before it writes
them (gates, choices). A norm needs a sum over the whole row, so whoever writes a
tile also writes that tile's share of the sum, and whoever reads adds up the shares, in
a fixed order.

Tensors are (time, row, width), `spot` is time * batch + row; what comes from outside is
(row, time, width), `given` is row * length + time. Capital letters are what a kernel is
compiled for: `D U W L S K` deter, units, width of a block, logits, choices and classes,
`BM BN BK` the tile's rows, columns and inputs at a time.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

# long lists of arguments read better filled
# fmt: off


@no_type_check
@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@no_type_check
@triton.jit
def _silu_slope(x):
    gate = tl.sigmoid(x)
    return gate * (1 + x * (1 - gate))


@no_type_check
@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@no_type_check
@triton.jit
def _add_shares(shares, rows, batch, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """The sum over each row from its tiles' shares, (tiles, batch)."""
    tile = tl.arange(0, PADDED)
    mask = (tile[None, :] < COUNT) & (rows[:, None] < batch)
    share = tl.load(
        shares + tile[None, :] * batch + rows[:, None], mask=mask, other=0.0
    )
    return tl.sum(share, 1)


@no_type_check
@triton.jit
def _activated(pre, scale, at, columns, mask, inverse):
    """Norm and activation of a tile, in the dtype of `pre`."""
    x = tl.load(pre + at, mask=mask, other=0.0)
    gain = tl.load(scale + columns)
    y = (x.to(tl.float32) * inverse[:, None] * gain[None, :]).to(x.dtype)
    return _silu(y.to(tl.float32)).to(x.dtype)


@no_type_check
@triton.jit
def _sloped(grad, pre, scale, at, there, columns, mask, inverse, mean):
    """The gradient before a norm, from that behind it, in the dtype of `pre`."""
    x = tl.load(pre + there, mask=mask, other=0.0)
    unit = x.to(tl.float32) * inverse[:, None]
    gain = tl.load(scale + columns)[None, :]
    up = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    return (inverse[:, None] * (up * gain - unit * mean[:, None])).to(x.dtype)


@no_type_check
@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    return tl.dot(a, b, acc, input_precision=PRECISION)


# ---- forth


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def hidden_kernel(
    deter, pre0, pre1, scale0, scale1, shares0, shares1, hoisted, weight, hid, shares,
    shared, inverse, t, length, batch, eps,
    D: tl.constexpr, U: tl.constexpr, W: tl.constexpr, TILES0: tl.constexpr,
    PADDED0: tl.constexpr, TILES1: tl.constexpr, PADDED1: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The hidden layer of the core: own block, both inputs, the action's share."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = rows[:, None] < batch
    here = t * batch + rows
    spot, given = here[:, None], (rows * length + t)[:, None]
    block = tile * BN // W
    columns = tile * BN + tl.arange(0, BN)
    inside = columns - block * W
    weight += block * (W + 3 * U) * W
    inverse0 = tl.rsqrt(_add_shares(shares0, rows, batch, TILES0, PADDED0) / U + eps)
    inverse1 = tl.rsqrt(_add_shares(shares1, rows, batch, TILES1, PADDED1) / U + eps)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, W, BW):
        read = k + tl.arange(0, BW)
        a = tl.load(deter + spot * D + block * W + read[None, :], mask=mask, other=0.0)
        b = tl.load(weight + read[:, None] * W + inside[None, :])
        acc = _dot(a, b, acc, PRECISION)
    for k in range(0, U, BU):
        read = k + tl.arange(0, BU)
        a = _activated(pre0, scale0, spot * U + read[None, :], read, mask, inverse0)
        b = tl.load(weight + (W + read)[:, None] * W + inside[None, :])
        acc = _dot(a, b, acc, PRECISION)
        if tile == 0:
            tl.store(shared + spot * (3 * U) + read[None, :], a, mask=mask)
    for k in range(0, U, BU):
        read = k + tl.arange(0, BU)
        a = _activated(pre1, scale1, spot * U + read[None, :], read, mask, inverse1)
        b = tl.load(weight + (W + U + read)[:, None] * W + inside[None, :])
        acc = _dot(a, b, acc, PRECISION)
        if tile == 0:
            tl.store(shared + spot * (3 * U) + U + read[None, :], a, mask=mask)
    at = spot * D + columns[None, :]
    given = given * D + columns[None, :]
    acc += tl.load(hoisted + given, mask=mask, other=0.0).to(tl.float32)
    value = acc.to(hid.dtype.element_ty)
    tl.store(hid + at, value, mask=mask)
    value = value.to(tl.float32)
    tl.store(shares + tile * batch + rows, tl.sum(value * value, 1), mask=rows < batch)
    if tile == 0:
        tl.store(inverse + here * 4, inverse0, mask=rows < batch)
        tl.store(inverse + here * 4 + 1, inverse1, mask=rows < batch)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def gates_kernel(
    hid, scale, shares, weight, bias, deter, reset, gates, deters, hidden, inverse, t,
    length, batch, eps,
    D: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
   
):
    """The three gates of some units, and their new state."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = rows[:, None] < batch
    here = t * batch + rows
    spot = here[:, None]
    block = tile * BN // W
    columns = tile * BN + tl.arange(0, BN)
    inside = columns - block * W
    weight += block * W * (3 * W)
    inverse2 = tl.rsqrt(_add_shares(shares, rows, batch, TILES, PADDED) / D + eps)
    r = tl.zeros((BM, BN), tl.float32)
    c = tl.zeros((BM, BN), tl.float32)
    u = tl.zeros((BM, BN), tl.float32)
    for k in range(0, W, BK):
        read = k + tl.arange(0, BK)
        at = spot * D + block * W + read[None, :]
        a = _activated(hid, scale, at, block * W + read, mask, inverse2)
        b = weight + read[:, None] * (3 * W) + inside[None, :]
        r = _dot(a, tl.load(b), r, PRECISION)
        c = _dot(a, tl.load(b + W), c, PRECISION)
        u = _dot(a, tl.load(b + 2 * W), u, PRECISION)
        if tile * BN == block * W:
            tl.store(hidden + at, a, mask=mask)
    dtype = gates.dtype.element_ty
    bias += block * 3 * W + inside
    r = (r + tl.load(bias)[None, :].to(tl.float32)).to(dtype)
    c = (c + tl.load(bias + W)[None, :].to(tl.float32)).to(dtype)
    u = (u + tl.load(bias + 2 * W)[None, :].to(tl.float32)).to(dtype)
    keep = gates + spot * (3 * D) + block * 3 * W + inside[None, :]
    tl.store(keep, r, mask=mask)
    tl.store(keep + W, c, mask=mask)
    tl.store(keep + 2 * W, u, mask=mask)
    at = spot * D + columns[None, :]
    before = tl.load(deter + at, mask=mask, other=0.0).to(tl.float32)
    fresh = _tanh(tl.sigmoid(r.to(tl.float32)) * c.to(tl.float32))
    share = tl.sigmoid(u.to(tl.float32) - 1)
    new = (share * fresh + (1 - share) * before).to(dtype)
    tl.store(deters + at, new, mask=mask)
    if t + 1 < length:
        start = tl.load(reset + rows * length + t + 1, mask=rows < batch, other=0)
        kept = tl.where(start[:, None] != 0, 0.0, new.to(tl.float32))
        tl.store(deter + at + batch * D, kept.to(dtype), mask=mask)
    if tile == 0:
        tl.store(inverse + here * 4 + 2, inverse2, mask=rows < batch)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def inputs_kernel(
    deters, weight, bias, tokens, reset, pre0, obs, shares0, shares3, t, length, batch,
    D: tl.constexpr, U: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """What reads the new state: dynin0 of the next step, and the posterior's layer."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = rows[:, None] < batch
    here = t * batch + rows
    spot, given = here[:, None], (rows * length + t)[:, None]
    units = tile * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        read = k + tl.arange(0, BK)
        a = tl.load(deters + spot * D + read[None, :], mask=mask, other=0.0)
        b = tl.load(weight + units[None, :] * D + read[:, None])
        acc = _dot(a, b, acc, PRECISION)
    if tile * BN < U:
        if t + 1 < length:
            start = tl.load(reset + rows * length + t + 1, mask=rows < batch, other=0)
            acc = tl.where(start[:, None] != 0, 0.0, acc)
            acc += tl.load(bias + units)[None, :].to(tl.float32)
            value = acc.to(pre0.dtype.element_ty)
            tl.store(pre0 + (spot + batch) * U + units[None, :], value, mask=mask)
            value = value.to(tl.float32)
            share = tl.sum(value * value, 1)
            tl.store(shares0 + tile * batch + rows, share, mask=rows < batch)
    else:
        at = spot * U + (units - U)[None, :]
        token = given * U + (units - U)[None, :]
        acc += tl.load(tokens + token, mask=mask, other=0.0).to(tl.float32)
        value = acc.to(obs.dtype.element_ty)
        tl.store(obs + at, value, mask=mask)
        value = value.to(tl.float32)
        share = tl.sum(value * value, 1)
        tl.store(shares3 + (tile - U // BN) * batch + rows, share, mask=rows < batch)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def posterior_kernel(
    obs, scale, shares, weight, bias, clocks, reset, logits, stochs, stoch, choices,
    seen, inverse, t, length, batch, eps, unimix,
    U: tl.constexpr, S: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    PADDED: tl.constexpr, BM: tl.constexpr, CHOICES: tl.constexpr,
    CLASSES: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
   
):
    """Some choices: their logits, and which clock rings first."""
    BN: tl.constexpr = CHOICES * CLASSES
    L: tl.constexpr = S * K
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = rows[:, None] < batch
    here = t * batch + rows
    spot, given = here[:, None], (rows * length + t)[:, None]
    column = tl.arange(0, BN)
    choice, label = tile * CHOICES + column // CLASSES, column % CLASSES
    valid = (choice < S) & (label < K)
    columns = choice * K + label
    inverse3 = tl.rsqrt(_add_shares(shares, rows, batch, TILES, PADDED) / U + eps)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, U, BK):
        read = k + tl.arange(0, BK)
        a = _activated(obs, scale, spot * U + read[None, :], read, mask, inverse3)
        b = tl.load(
            weight + columns[None, :] * U + read[:, None],
            mask=valid[None, :],
            other=0.0,
        )
        acc = _dot(a, b, acc, PRECISION)
        if tile == 0:
            tl.store(seen + spot * U + read[None, :], a, mask=mask)
    acc += tl.load(bias + columns, mask=valid, other=0.0)[None, :].to(tl.float32)
    value = acc.to(logits.dtype.element_ty)
    at = spot * L + columns[None, :]
    known = mask & valid[None, :]
    tl.store(logits + at, value, mask=known)
    value = tl.where(valid[None, :], value.to(tl.float32), float("-inf"))
    value = tl.reshape(value, (BM, CHOICES, CLASSES))
    exps = tl.exp(value - tl.max(value, 2)[:, :, None])
    probs = (1 - unimix) * exps / tl.sum(exps, 2)[:, :, None] + unimix / K
    given = given * L + columns[None, :]
    clock = tl.load(clocks + given, mask=known, other=float("inf"))
    score = probs / tl.reshape(clock, (BM, CHOICES, CLASSES))
    chosen = tl.argmax(score, 2)
    hot = tl.arange(0, CLASSES)[None, None, :] == chosen[:, :, None]
    hot = tl.reshape(hot.to(tl.float32), (BM, BN))
    tl.store(stochs + at, hot.to(stochs.dtype.element_ty), mask=known)
    which = tile * CHOICES + tl.arange(0, CHOICES)
    tl.store(
        choices + rows[:, None] * S + which[None, :],
        chosen,
        mask=mask & (which < S)[None, :],
    )
    if t + 1 < length:
        start = tl.load(reset + rows * length + t + 1, mask=rows < batch, other=0)
        kept = tl.where(start[:, None] != 0, 0.0, hot)
        tl.store(stoch + at + batch * L, kept.to(stoch.dtype.element_ty), mask=known)
    if tile == 0:
        tl.store(inverse + here * 4 + 3, inverse3, mask=rows < batch)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def choices_kernel(
    choices, weight, bias, reset, pre1, shares, t, length, batch,
    U: tl.constexpr, S: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr,
    BN: tl.constexpr,
):
    """dynin1 of the next step: one weight row per choice, added up."""
    row, tile = tl.program_id(0), tl.program_id(1)
    which = tl.arange(0, PADDED)
    units = tile * BN + tl.arange(0, BN)
    label = tl.load(choices + row * S + which, mask=which < S, other=0)
    at = (which * K + label)[:, None] * U + units[None, :]
    value = tl.load(weight + at, mask=(which < S)[:, None], other=0.0)
    total = tl.sum(value.to(tl.float32), 0)
    start = tl.load(reset + row * length + t + 1)
    total = tl.where(start != 0, 0.0, total) + tl.load(bias + units).to(tl.float32)
    total = total.to(pre1.dtype.element_ty)
    tl.store(pre1 + ((t + 1) * batch + row) * U + units, total)
    total = total.to(tl.float32)
    tl.store(shares + tile * batch + row, tl.sum(total * total, 0))


# ---- back; a name means the gradient of what is so named


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def choices_backward(
    grad_in, pre1, scale1, shares, inverse, reset, weight, logits, from_stochs,
    from_logits, to_logits, t, length, batch, unimix,
    U: tl.constexpr, S: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    PADDED: tl.constexpr, BM: tl.constexpr, CHOICES: tl.constexpr,
    CLASSES: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
   
):
    """Some choices, from dynin1 of the step after and from outside."""
    BN: tl.constexpr = CHOICES * CLASSES
    L: tl.constexpr = S * K
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = rows[:, None] < batch
    here = t * batch + rows
    spot, given = here[:, None], (rows * length + t)[:, None]
    column = tl.arange(0, BN)
    choice, label = tile * CHOICES + column // CLASSES, column % CLASSES
    valid = (choice < S) & (label < K)
    columns = choice * K + label
    known = mask & valid[None, :]
    at = spot * L + columns[None, :]
    grad = tl.zeros((BM, BN), tl.float32)
    if t + 1 < length:
        after = here + batch
        inverse1 = tl.load(inverse + after * 4 + 1, mask=rows < batch, other=0.0)
        mean = _add_shares(shares, rows, batch, TILES, PADDED) / U
        for k in range(0, U, BK):
            read = k + tl.arange(0, BK)
            there = after[:, None] * U + read[None, :]
            a = _sloped(
                grad_in + U,
                pre1,
                scale1,
                there + after[:, None] * U,
                there,
                read,
                mask,
                inverse1,
                mean,
            )
            b = tl.load(
                weight + read[:, None] * L + columns[None, :],
                mask=valid[None, :],
                other=0.0,
            )
            grad = _dot(a, b, grad, PRECISION)
        start = tl.load(reset + rows * length + t + 1, mask=rows < batch, other=0)
        grad = tl.where(start[:, None] != 0, 0.0, grad)
    given = given * L + columns[None, :]
    grad += tl.load(from_stochs + given, mask=known, other=0.0).to(tl.float32)
    value = tl.load(logits + at, mask=known, other=float("-inf")).to(tl.float32)
    value = tl.where(valid[None, :] & (value == value), value, float("-inf"))
    value = tl.where(mask, value, 0.0)
    value = tl.reshape(value, (BM, CHOICES, CLASSES))
    exps = tl.exp(value - tl.max(value, 2)[:, :, None])
    probs = exps / tl.sum(exps, 2)[:, :, None]
    grad = tl.reshape(grad, (BM, CHOICES, CLASSES))
    slope = (1 - unimix) * probs * (grad - tl.sum(grad * probs, 2)[:, :, None])
    slope = tl.reshape(slope, (BM, BN))
    slope += tl.load(from_logits + given, mask=known, other=0.0).to(tl.float32)
    tl.store(to_logits + at, slope.to(to_logits.dtype.element_ty), mask=known)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def posterior_backward(
    to_logits, weight, obs, scale, inverse, grad_obs, shares, t, length, batch,
    U: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Some units of the posterior's layer, behind its norm."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = rows[:, None] < batch
    here = t * batch + rows
    spot = here[:, None]
    units = tile * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, L, BK):
        read = k + tl.arange(0, BK)
        a = tl.load(to_logits + spot * L + read[None, :], mask=mask, other=0.0)
        b = tl.load(weight + read[:, None] * U + units[None, :])
        acc = _dot(a, b, acc, PRECISION)
    inverse3 = tl.load(inverse + here * 4 + 3, mask=rows < batch, other=0.0)
    at = spot * U + units[None, :]
    unit = tl.load(obs + at, mask=mask, other=0.0).to(tl.float32) * inverse3[:, None]
    gain = tl.load(scale + units)[None, :]
    grad = (acc * _silu_slope(unit * gain)).to(grad_obs.dtype.element_ty)
    tl.store(grad_obs + at, grad, mask=mask)
    product = tl.sum(grad.to(tl.float32) * gain * unit, 1)
    tl.store(shares + tile * batch + rows, product, mask=rows < batch)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def gates_backward(
    grad_obs, obs, scale3, shares3, grad_in, pre0, scale0, shares0, inverse, reset,
    weight, from_deters, gates, deter, carry, to_gates, t, length, batch,
    D: tl.constexpr, U: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr,
    PADDED: tl.constexpr, TILES0: tl.constexpr, PADDED0: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Some units' state, from all who read it, and their gates."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = rows[:, None] < batch
    here = t * batch + rows
    spot, given = here[:, None], (rows * length + t)[:, None]
    columns = tile * BN + tl.arange(0, BN)
    block = tile * BN // W
    acc = tl.zeros((BM, BN), tl.float32)
    if t + 1 < length:
        after = here + batch
        inverse0 = tl.load(inverse + after * 4, mask=rows < batch, other=0.0)
        mean0 = _add_shares(shares0, rows, batch, TILES0, PADDED0) / U
        for k in range(0, U, BK):
            read = k + tl.arange(0, BK)
            there = after[:, None] * U + read[None, :]
            a = _sloped(
                grad_in,
                pre0,
                scale0,
                there + after[:, None] * U,
                there,
                read,
                mask,
                inverse0,
                mean0,
            )
            b = tl.load(weight + read[:, None] * D + columns[None, :])
            acc = _dot(a, b, acc, PRECISION)
        start = tl.load(reset + rows * length + t + 1, mask=rows < batch, other=0)
        acc = tl.where(start[:, None] != 0, 0.0, acc)
    inverse3 = tl.load(inverse + here * 4 + 3, mask=rows < batch, other=0.0)
    mean3 = _add_shares(shares3, rows, batch, TILES, PADDED) / U
    for k in range(0, U, BK):
        read = k + tl.arange(0, BK)
        there = spot * U + read[None, :]
        a = _sloped(grad_obs, obs, scale3, there, there, read, mask, inverse3, mean3)
        b = tl.load(weight + (U + read)[:, None] * D + columns[None, :])
        acc = _dot(a, b, acc, PRECISION)
    at = spot * D + columns[None, :]
    own = rows[:, None] * D + columns[None, :]
    given = given * D + columns[None, :]
    grad = acc + tl.load(from_deters + given, mask=mask, other=0.0).to(tl.float32)
    grad += tl.load(carry + own, mask=mask, other=0.0)
    gate = spot * (3 * D) + block * 3 * W + (columns - block * W)[None, :]
    r = tl.sigmoid(tl.load(gates + gate, mask=mask, other=0.0).to(tl.float32))
    c = tl.load(gates + gate + W, mask=mask, other=0.0).to(tl.float32)
    u = tl.sigmoid(
        tl.load(gates + gate + 2 * W, mask=mask, other=0.0).to(tl.float32) - 1
    )
    before = tl.load(deter + at, mask=mask, other=0.0).to(tl.float32)
    fresh = _tanh(r * c)
    inside = grad * u * (1 - fresh * fresh)
    dtype = to_gates.dtype.element_ty
    tl.store(to_gates + gate, (inside * c * r * (1 - r)).to(dtype), mask=mask)
    tl.store(to_gates + gate + W, (inside * r).to(dtype), mask=mask)
    leak = grad * (fresh - before) * u * (1 - u)
    tl.store(to_gates + gate + 2 * W, leak.to(dtype), mask=mask)
    tl.store(carry + own, grad * (1 - u), mask=mask)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def hidden_backward(
    to_gates, weight, hid, scale, inverse, grad_hid, shares, t, length, batch,
    D: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Some units of the hidden layer, behind its norm."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = rows[:, None] < batch
    here = t * batch + rows
    spot = here[:, None]
    columns = tile * BN + tl.arange(0, BN)
    block = tile * BN // W
    weight += columns * (3 * W)  # a row of the weight is a unit of the hidden layer
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, 3 * W, BK):
        read = k + tl.arange(0, BK)
        at = spot * (3 * D) + block * 3 * W + read[None, :]
        a = tl.load(to_gates + at, mask=mask, other=0.0)
        b = tl.load(weight[None, :] + read[:, None])
        acc = _dot(a, b, acc, PRECISION)
    inverse2 = tl.load(inverse + here * 4 + 2, mask=rows < batch, other=0.0)
    at = spot * D + columns[None, :]
    unit = tl.load(hid + at, mask=mask, other=0.0).to(tl.float32) * inverse2[:, None]
    gain = tl.load(scale + columns)[None, :]
    grad = (acc * _silu_slope(unit * gain)).to(grad_hid.dtype.element_ty)
    tl.store(grad_hid + at, grad, mask=mask)
    product = tl.sum(grad.to(tl.float32) * gain * unit, 1)
    tl.store(shares + tile * batch + rows, product, mask=rows < batch)


@no_type_check
@triton.jit(do_not_specialize=["t", "length", "batch"])
def inputs_backward(
    grad_hid, hid, scale2, shares2, inverse, reset, weight, pre0, pre1, scale0, scale1,
    grad_in, shares0, shares1, carry, t, length, batch,
    D: tl.constexpr, U: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr,
    PADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Who fed the hidden layer: both inputs behind their norms, and deter itself."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = rows[:, None] < batch
    here = t * batch + rows
    spot = here[:, None]
    inverse2 = tl.load(inverse + here * 4 + 2, mask=rows < batch, other=0.0)
    mean = _add_shares(shares2, rows, batch, TILES, PADDED) / D
    acc = tl.zeros((BM, BN), tl.float32)
    if tile < 2 * U // BN:
        units = tile * BN + tl.arange(0, BN)
        for k in range(0, D, BK):
            read = k + tl.arange(0, BK)
            block = k // W
            there = spot * D + read[None, :]
            a = _sloped(grad_hid, hid, scale2, there, there, read, mask, inverse2, mean)
            line = (block * (W + 3 * U) + W + units) * W
            b = tl.load(weight + line[None, :] + (read - block * W)[:, None])
            acc = _dot(a, b, acc, PRECISION)
        if tile < U // BN:
            side = tl.load(inverse + here * 4, mask=rows < batch, other=0.0)
            x = tl.load(pre0 + spot * U + units[None, :], mask=mask, other=0.0)
            gain = tl.load(scale0 + units)[None, :]
            unit = x.to(tl.float32) * side[:, None]
            grad = (acc * _silu_slope(unit * gain)).to(grad_in.dtype.element_ty)
            product = tl.sum(grad.to(tl.float32) * gain * unit, 1)
            tl.store(shares0 + tile * batch + rows, product, mask=rows < batch)
            tl.store(grad_in + spot * (2 * U) + units[None, :], grad, mask=mask)
        else:
            side = tl.load(inverse + here * 4 + 1, mask=rows < batch, other=0.0)
            x = tl.load(pre1 + spot * U + (units - U)[None, :], mask=mask, other=0.0)
            gain = tl.load(scale1 + units - U)[None, :]
            unit = x.to(tl.float32) * side[:, None]
            grad = (acc * _silu_slope(unit * gain)).to(grad_in.dtype.element_ty)
            product = tl.sum(grad.to(tl.float32) * gain * unit, 1)
            at = (tile - U // BN) * batch + rows
            tl.store(shares1 + at, product, mask=rows < batch)
            tl.store(grad_in + spot * (2 * U) + units[None, :], grad, mask=mask)
    else:
        columns = (tile - 2 * U // BN) * BN + tl.arange(0, BN)
        block = (tile - 2 * U // BN) * BN // W
        line = (block * (W + 3 * U) + columns - block * W) * W
        for k in range(0, W, BK):
            read = k + tl.arange(0, BK)
            at = block * W + read
            there = spot * D + at[None, :]
            a = _sloped(grad_hid, hid, scale2, there, there, at, mask, inverse2, mean)
            b = tl.load(weight + line[None, :] + read[:, None])
            acc = _dot(a, b, acc, PRECISION)
        own = carry + rows[:, None] * D + columns[None, :]
        acc += tl.load(own, mask=mask, other=0.0)
        start = tl.load(reset + rows * length + t, mask=rows < batch, other=0)
        tl.store(own, tl.where(start[:, None] != 0, 0.0, acc), mask=mask)


# ---- after the loop


@no_type_check
@triton.jit
def norm_rows(
    grad, pre, scale, inverse, out, which,
    F: tl.constexpr, GRADS: tl.constexpr, BK: tl.constexpr,
):
    """The gradient before a norm, of one row (of all steps)."""
    row = tl.program_id(0).to(tl.int64)
    side = tl.load(inverse + row * 4 + which)
    total = tl.zeros((BK,), tl.float32)
    for k in range(0, F, BK):
        at = k + tl.arange(0, BK)
        mask = at < F
        unit = tl.load(pre + row * F + at, mask=mask, other=0.0).to(tl.float32) * side
        up = tl.load(grad + row * GRADS + at, mask=mask, other=0.0).to(tl.float32)
        total += up * tl.load(scale + at, mask=mask, other=0.0) * unit
    mean = tl.sum(total, 0) / F
    for k in range(0, F, BK):
        at = k + tl.arange(0, BK)
        mask = at < F
        unit = tl.load(pre + row * F + at, mask=mask, other=0.0).to(tl.float32) * side
        up = tl.load(grad + row * GRADS + at, mask=mask, other=0.0).to(tl.float32)
        slope = side * (up * tl.load(scale + at, mask=mask, other=0.0) - unit * mean)
        tl.store(out + row * F + at, slope.to(out.dtype.element_ty), mask=mask)


@no_type_check
@triton.jit
def norm_columns(
    grad, pre, inverse, out, scales, biases, which,
    ROWS: tl.constexpr, F: tl.constexpr, GRADS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Gradients of scale and bias: sums over the rows of all steps."""
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    scale, bias = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for start in range(0, ROWS, BM):
        row = start + tl.arange(0, BM)
        mask = (row < ROWS)[:, None] & (at < F)[None, :]
        side = tl.load(inverse + row * 4 + which, mask=row < ROWS, other=0.0)
        here = row[:, None].to(tl.int64) * F + at[None, :]
        unit = tl.load(pre + here, mask=mask, other=0.0).to(tl.float32) * side[:, None]
        from_ = row[:, None].to(tl.int64) * GRADS + at[None, :]
        scale += tl.load(grad + from_, mask=mask, other=0.0).to(tl.float32) * unit
        bias += tl.load(out + here, mask=mask, other=0.0).to(tl.float32)
    tl.store(scales + at, tl.sum(scale, 0), mask=at < F)
    tl.store(biases + at, tl.sum(bias, 0), mask=at < F)
