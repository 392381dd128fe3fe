"""Gradients that are computed after the backward loop, for all steps at once.

The backward kernels of a step write gradients of the norms' outputs. From these, this
module computes the gradients of the norms' inputs and scales, and of the biases.

Activations are time-major, (T, B, width): all steps together are a matrix with T * B
rows, so that a kernel handles the rows of all steps without a loop over time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reverie.kernels.launch import jit
from reverie.kernels.scan import tensors
from reverie.kernels.scan.stepwise import StepGrads


def finish_gradients(scan: tensors.BackwardPass, grads: StepGrads) -> tensors.ScanGrads:
    """Compute the remaining gradients: activations, biases, scales, initial state."""
    weights, saved, is_first = scan.weights, scan.saved, scan.is_first
    units, inv_rms = saved.in0_pre.shape[-1], saved.inv_rms
    din0, in0_scale, in0_bias = _norm_input_grad(
        grads.in_norm, saved.in0_pre, weights.in0_scale, inv_rms, 0
    )
    din1, in1_scale, in1_bias = _norm_input_grad(
        grads.in_norm[..., units:], saved.in1_pre, weights.in1_scale, inv_rms, 1
    )
    dhid, hid_scale, hid_bias = _norm_input_grad(
        grads.hid_norm, saved.hid_pre, weights.hid_scale, inv_rms, 2
    )
    dobs, obs_scale, _ = _norm_input_grad(
        grads.obs_norm, saved.obs_pre, weights.obs_scale, inv_rms, 3
    )
    # the initial state has no gradient where the first step begins an episode
    first = is_first[:, :1]
    ddeter = grads.deter + (din0[0] @ weights.in0_weight).float().masked_fill(first, 0)
    dstoch = (din1[0] @ weights.in1_weight).masked_fill(first, 0)
    vectors = tensors.VectorGrads(
        hid_scale=hid_scale,
        hid_bias=hid_bias,
        gru_bias=grads.gates.flatten(0, 1).sum(0),
        in0_scale=in0_scale,
        in0_bias=in0_bias,
        in1_scale=in1_scale,
        in1_bias=in1_bias,
        obs_scale=obs_scale,
        logit_bias=grads.logits.flatten(0, 1).sum(0),
    )
    activations = (din0, din1, dhid, grads.gates, dobs, grads.logits)
    return tensors.ScanGrads(*activations, vectors, ddeter, dstoch)


def _norm_input_grad(
    dnorm: Tensor, pre: Tensor, scale: Tensor, inv_rms: Tensor, norm_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a norm's input, its scale and the bias before it.

    `norm_index` is the column of this norm in `inv_rms`, which has those of all norms.
    """
    width, rows = pre.shape[-1], pre.shape[0] * pre.shape[1]
    stride = dnorm.stride(1)  # larger than the width if `dnorm` is a slice of columns
    dpre, dscale, dbias = torch.empty_like(pre), *scale.new_empty(2, width)
    _row_gradients[(rows,)](
        *(dnorm, pre, scale, inv_rms, dpre, norm_index, width, stride),
        min(1024, triton.next_power_of_2(width)),
    )
    _column_sums[(triton.cdiv(width, 64),)](
        *(dnorm, pre, inv_rms, dpre, dscale, dbias),
        *(norm_index, rows, width, stride, 32, 64),
    )
    return dpre, dscale, dbias


# fmt: off


@jit
def _load_normed(pre, dnorm, pre_offs, dnorm_offs, mask, inv_rms):
    """Return normalized inputs of a norm, and gradients of its outputs."""
    normed = tl.load(pre + pre_offs, mask=mask, other=0.0).to(tl.float32) * inv_rms
    return normed, tl.load(dnorm + dnorm_offs, mask=mask, other=0.0).to(tl.float32)


@jit
def _row_gradients(
    dnorm, pre, scale, inv_rms, dpre, norm_index,
    F: tl.constexpr, STRIDE: tl.constexpr, BK: tl.constexpr,
):
    """Compute the gradient of a norm's input, one row per program.

    F is the width of a row, BK the number of columns per iteration.
    """
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inv_rms + row * 4 + norm_index)
    products = tl.zeros((BK,), tl.float32)  # of normalized input and its gradient
    for k in range(0, F, BK):
        col = k + tl.arange(0, BK)
        mask = col < F
        normed, dout = _load_normed(
            pre, dnorm, row * F + col, row * STRIDE + col, mask, inverse
        )
        products += dout * tl.load(scale + col, mask=mask, other=0.0) * normed
    mean = tl.sum(products, 0) / F
    for k in range(0, F, BK):
        col = k + tl.arange(0, BK)
        mask = col < F
        normed, dout = _load_normed(
            pre, dnorm, row * F + col, row * STRIDE + col, mask, inverse
        )
        gain = tl.load(scale + col, mask=mask, other=0.0)
        grad = inverse * (dout * gain - normed * mean)
        tl.store(dpre + row * F + col, grad.to(dpre.dtype.element_ty), mask=mask)


@jit
def _column_sums(
    dnorm, pre, inv_rms, dpre, dscale, dbias, norm_index,
    ROWS: tl.constexpr, F: tl.constexpr, STRIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):
    """Compute the gradients of scale and bias: sums over the rows of all steps."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    scale_sums = tl.zeros((BM, BN), tl.float32)
    bias_sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, ROWS, BM):
        row = start + tl.arange(0, BM)
        mask = (row < ROWS)[:, None] & (col < F)[None, :]
        inverse = tl.load(inv_rms + row * 4 + norm_index, mask=row < ROWS, other=0.0)
        row = row[:, None].to(tl.int64)
        offs = row * F + col[None, :]
        normed, dout = _load_normed(
            pre, dnorm, offs, row * STRIDE + col[None, :], mask, inverse[:, None]
        )
        scale_sums += dout * normed
        bias_sums += tl.load(dpre + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dscale + col, tl.sum(scale_sums, 0), mask=col < F)
    tl.store(dbias + col, tl.sum(bias_sums, 0), mask=col < F)
