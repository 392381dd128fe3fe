"""Posterior scan: a fast version of `RSSMDynamics.observe` over a whole sequence.

The loop over time contains only recurrent layers. Before it, actions and observations
are projected for all steps at once; after the backward loop, the gradient of each
weight is one matrix product over all B * T rows.

There are three implementations of the loop, each with `run_forward` and `run_backward`:
- `persistent`: one CUDA kernel for all steps, for the sizes of the preset `size12m` on
  compute capability 9;
- `streamed`: five CUDA kernels per step, for other sizes on compute capability 9;
- `triton`: five Triton kernels per step, for every GPU.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from reverie.kernels import nvrtc
from reverie.kernels.scan.persistent import launch as persistent
from reverie.kernels.scan.streamed import launch as streamed
from reverie.kernels.scan.tensors import (
    BackwardPass,
    ForwardPass,
    SavedActivations,
    ScanGrads,
    ScanInputs,
    ScanSettings,
    ScanWeights,
    action_rows,
)
from reverie.kernels.scan.triton import launch as triton


def select_implementation(scan: ForwardPass) -> ModuleType | None:
    """Return the fastest implementation for these sizes and this device, if any."""
    if persistent.is_supported(scan):
        return persistent
    if streamed.is_fastest(scan) and streamed.is_supported(scan):
        return streamed
    return triton if triton.is_supported(scan) else None


def posterior_scan(
    implementation: ModuleType, scan: ForwardPass
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T S K"], Float[Tensor, "B T S K"]]:
    """Return deter, sampled stoch and posterior logits of every step.

    Samples have straight-through gradients. If a CUDA kernel cannot be launched, the
    Triton implementation is used instead.
    """
    batch = len(scan.inputs.is_first)
    inputs = _pad_batch(scan.inputs, implementation.ROWS)
    deter, stoch, logits = _PosteriorScan.apply(  # type: ignore[no-untyped-call]
        implementation, scan.settings, *inputs, *scan.weights
    )
    shape = inputs.noise.shape
    return deter[:batch], stoch.view(shape)[:batch], logits.view(shape)[:batch]


def _pad_batch(inputs: ScanInputs, rows: int) -> ScanInputs:
    """Pad the batch to a multiple of `rows`: noise with ones, the rest with zeros."""
    missing = -len(inputs.is_first) % rows
    if not missing:
        return inputs
    return ScanInputs._make(
        F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=x is inputs.noise)
        for x in inputs
    )


class _PosteriorScan(torch.autograd.Function):
    """Run the loops of an implementation; `flat` are the inputs, then the weights."""

    @staticmethod
    def forward(
        ctx: Any, implementation: ModuleType, settings: ScanSettings, *flat: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = ScanInputs(*flat[: len(ScanInputs._fields)])
        weights = ScanWeights(*flat[len(inputs) :])
        scan = ForwardPass(weights, inputs, settings)
        try:
            saved = implementation.run_forward(scan)
        except nvrtc.Unavailable as error:
            implementation.fallback.enable(error)
            implementation = triton
            saved = triton.run_forward(scan)
        ctx.implementation, ctx.settings = implementation, settings
        ctx.save_for_backward(inputs.is_first, *saved, *weights)
        batch = len(inputs.is_first)
        deter, stoch, logits = (_batch_first(x, batch).contiguous() for x in saved[:3])
        return deter, stoch, logits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_deter: Tensor, grad_stoch: Tensor, grad_logits: Tensor
    ) -> tuple[Any, ...]:
        is_first, *flat = ctx.saved_tensors
        saved = SavedActivations(*flat[: len(SavedActivations._fields)])
        weights, batch = ScanWeights(*flat[len(saved) :]), len(is_first)
        scan = BackwardPass(
            *(weights, saved, is_first, grad_deter, grad_stoch, grad_logits),
            ctx.settings,
        )
        result: ScanGrads
        try:
            result = ctx.implementation.run_backward(scan)
        except nvrtc.Unavailable as error:
            ctx.implementation.fallback.enable(error)
            # the Triton implementation needs (T, B, ...), without groups of rows
            rows = (x.reshape(-1, *x.shape[-3:]).transpose(0, 1) for x in saved)
            saved = SavedActivations(*(x.flatten(1, 2) for x in rows))
            result = triton.run_backward(scan._replace(saved=saved))
        pairs = zip(weight_gradients(weights, saved, result), weights, strict=True)
        weight_grads = [grad.to(weight.dtype) for grad, weight in pairs]
        dtype = saved.deter.dtype
        initial = result.deter, result.stoch
        state_grads = [x if x is None else x.to(dtype) for x in initial]
        action_grads = _batch_first(result.hid_pre @ action_rows(weights).T, batch)
        token_grads = _batch_first(result.obs_pre, batch)
        input_grads = (*state_grads, action_grads, token_grads, None, None)
        return (None, None, *input_grads, *weight_grads)


def _batch_first(x: Float[Tensor, "*n T R F"], batch: int) -> Float[Tensor, "B T F"]:
    """Reorder axes from (T, B), or (groups, T, rows of a group), to (B, T)."""
    rows = x.reshape(-1, *x.shape[-3:]).transpose(1, 2)
    return rows.reshape(batch, *rows.shape[2:])


def weight_gradients(
    weights: ScanWeights, saved: SavedActivations, grads: ScanGrads
) -> ScanWeights:
    """Compute the gradient of every weight, each for all steps at once."""
    blocks, width = weights.gru_weight.shape[:2]
    din0, din1, dhid, dgates, dobs, dlogits = (x.flatten(0, -2) for x in grads[:6])
    rows = SavedActivations(*(x.flatten(0, -2) for x in saved))
    dhid_blocks = rearrange(dhid, "n (g o) -> g n o", g=blocks)
    dhid_weight = torch.empty_like(weights.hid_weight)
    prev_deter = rearrange(rows.prev_deter, "n (g i) -> g i n", g=blocks)
    torch.bmm(prev_deter, dhid_blocks, out=dhid_weight[:, :width])
    shared_input = rows.shared_input.T.expand(blocks, -1, -1)
    torch.bmm(shared_input, dhid_blocks, out=dhid_weight[:, width:])
    dgru_weight = torch.bmm(
        rearrange(rows.hid_act, "n (g i) -> g i n", g=blocks),
        rearrange(dgates, "n (g o) -> g n o", g=blocks),
    )
    return ScanWeights(
        in0_weight=din0.T @ rows.prev_deter,
        in1_weight=din1.T @ rows.prev_stoch,
        hid_weight=dhid_weight,
        gru_weight=dgru_weight,
        obs_weight=dobs.T @ rows.deter,
        logit_weight=dlogits.T @ rows.obs_act,
        **grads.vectors._asdict(),
    )
