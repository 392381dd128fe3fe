"""Triton functions shared by the kernels of the posterior scan.

A program computes a tile of `BM` rows and `BN` columns (or `BS` categorical variables)
and reads `BK` inputs per iteration (`BW` of deter, `BU` of units). Norm and activation
of the inputs, or the gradient of the norm, are applied while the inputs are loaded. An
RMS norm needs a sum over the whole row: the kernel that writes a tile also writes the
partial sum of that tile, and the kernel that reads the row adds up the partial sums
(tiles, batch) in a fixed order: `TILES` sums, padded to `PADDED`, a power of two. A
suffix 0 or 1 of these names means in0 or in1. `PRECISION` is that of matrix products.

Saved activations and gradients are (time, row, width), indexed by `at` = time * batch +
row. Inputs and incoming gradients are (row, time, width), indexed by `input_at` = row *
length + time. `D U W L S K` are sizes: deter, units, width of a block, logits,
categorical variables and classes. `inv_rms` has four columns: in0, in1, hid and obs. A
suffix 0 to 3 of `inv_rms` or `mean` is the number of the column.
"""

from __future__ import annotations

import triton.language as tl

from reverie.kernels.launch import jit

# fmt: off


@jit
def silu(x):
    return x * tl.sigmoid(x)


@jit
def silu_grad(x):
    gate = tl.sigmoid(x)
    return gate * (1 + x * (1 - gate))


@jit
def tanh(x):
    """Return tanh in terms of the sigmoid, which every Triton backend supports."""
    return 2 * tl.sigmoid(2 * x) - 1


@jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    return tl.dot(a, b, acc, input_precision=PRECISION)


@jit
def dot_rows(
    acc, inputs, weight, columns, mask, K: tl.constexpr, INPUT_STRIDE: tl.constexpr,
    OUTPUT_STRIDE: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add the product of rows of K inputs with columns of a weight to `acc`."""
    for k in range(0, K, BK):
        offs_k = k + tl.arange(0, BK)
        a = tl.load(inputs + offs_k[None, :], mask=mask, other=0.0)
        offs = offs_k[:, None] * INPUT_STRIDE + columns[None, :] * OUTPUT_STRIDE
        acc = dot(a, tl.load(weight + offs), acc, PRECISION)
    return acc


@jit
def row_tile(t, length, batch, BM: tl.constexpr):
    """Return the rows of this tile, their mask, and their indices `at`, `input_at`."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    return rows, rows[:, None] < batch, t * batch + rows, (rows * length + t)[:, None]


@jit
def class_tile(S: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr):
    """Return columns of `BS` variables, and a mask.

    `BK` is here the number of classes, padded to a power of two.
    """
    column = tl.arange(0, BS * BK)
    variable, label = tl.program_id(0) * BS + column // BK, column % BK
    return variable * K + label, (variable < S) & (label < K)


@jit
def softmax_terms(logits, BM: tl.constexpr, BS: tl.constexpr, PADDED_K: tl.constexpr):
    """Return numerator and denominator of the softmax, as (row, variable, class)."""
    logits = tl.reshape(logits, (BM, BS, PADDED_K))
    exps = tl.exp(logits - tl.max(logits, 2)[:, :, None])
    return exps, tl.sum(exps, 2)[:, :, None]


@jit
def load_is_first(is_first, t, length, batch, rows):
    """Return is_first of step `t` as a column of booleans, one for each row."""
    flags = tl.load(is_first + rows * length + t, mask=rows < batch, other=0)
    return flags[:, None] != 0


@jit
def sum_partials(partials, rows, batch, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Add up the partial sums (tiles, batch) of each row."""
    tile = tl.arange(0, PADDED)
    mask = (tile[None, :] < COUNT) & (rows[:, None] < batch)
    offs = tile[None, :] * batch + rows[:, None]
    return tl.sum(tl.load(partials + offs, mask=mask, other=0.0), 1)


@jit
def store_partial(partials, tile, rows, batch, values):
    """Store the sum of a tile's values over its columns."""
    tl.store(partials + tile * batch + rows, tl.sum(values, 1), mask=rows < batch)


@jit
def store_rounded(pointers, mask, acc):
    """Store values and return the rounded values."""
    value = acc.to(pointers.dtype.element_ty)
    tl.store(pointers, value, mask=mask)
    return value.to(tl.float32)


@jit
def norm_act(pre, scale, offs, columns, mask, inv_rms):
    """Return norm and activation of a tile, in the dtype of `pre`."""
    x = tl.load(pre + offs, mask=mask, other=0.0)
    gain = tl.load(scale + columns)
    y = (x.to(tl.float32) * inv_rms[:, None] * gain[None, :]).to(x.dtype)
    return silu(y.to(tl.float32)).to(x.dtype)


@jit
def norm_grad(dnorm, pre, scale, dnorm_offs, pre_offs, columns, mask, inv_rms, mean):
    """Return the gradient of a norm's input, given the gradient of its output.

    `mean` is the row's mean of output gradient * scale * normalized input. The result
    has the dtype of `pre`.
    """
    x = tl.load(pre + pre_offs, mask=mask, other=0.0)
    normed = x.to(tl.float32) * inv_rms[:, None]
    gain = tl.load(scale + columns)[None, :]
    dout = tl.load(dnorm + dnorm_offs, mask=mask, other=0.0).to(tl.float32)
    return (inv_rms[:, None] * (dout * gain - normed * mean[:, None])).to(x.dtype)


@jit
def store_norm_output_grad(
    dact, pre, pre_offs, scale, columns, inv_rms, dnorm, partials, tile, rows, batch,
):
    """Store the gradient of a norm's output, given the gradient of the activation.

    Also store the tile's partial sum for `mean` of `norm_grad`.
    """
    mask = rows[:, None] < batch
    inv_rms = tl.load(inv_rms, mask=rows < batch, other=0.0)
    x = tl.load(pre + pre_offs, mask=mask, other=0.0)
    normed = x.to(tl.float32) * inv_rms[:, None]
    gain = tl.load(scale + columns)[None, :]
    grad = store_rounded(dnorm, mask, dact * silu_grad(normed * gain))
    store_partial(partials, tile, rows, batch, grad * gain * normed)
