"""Code shared by the scans in `triton` and `streamed`, which launch kernels for every
time step.

Their backward kernels write gradients of the norms' outputs; `triton/gradients.py`
computes the other gradients after the loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.scan.tensors import SavedActivations, ScanInputs, ScanWeights


class StepGrads(NamedTuple):
    """Gradients written by the backward kernels.

    Their order is that of `BackwardArguments` in `streamed/backward.cu`. The suffix
    `norm` marks gradients of the output of an RMS norm, before the SiLU.
    """

    logits: Float[Tensor, "T B L"]
    gates: Float[Tensor, "T B 3*D"]
    obs_norm: Float[Tensor, "T B U"]
    hid_norm: Float[Tensor, "T B D"]
    in_norm: Float[Tensor, "T B 2*U"]
    """Those of in0 and in1, concatenated."""
    deter: Float[Tensor, "B D"]
    """Gradient of the previous deter, passed from step to step."""


def allocate_step_grads(saved: SavedActivations) -> StepGrads:
    """Allocate the gradients of all steps; the gradient of deter starts at zero."""
    length, batch, units = saved.in0_pre.shape
    return StepGrads(
        logits=torch.empty_like(saved.logits),
        gates=torch.empty_like(saved.gates),
        obs_norm=torch.empty_like(saved.obs_pre),
        hid_norm=torch.empty_like(saved.hid_pre),
        in_norm=saved.in0_pre.new_empty(length, batch, 2 * units),
        deter=torch.zeros_like(saved.deter[0], dtype=torch.float32),
    )


def write_first_inputs(
    weights: ScanWeights, inputs: ScanInputs, saved: SavedActivations
) -> None:
    """Write the state before the first step, and in0_pre and in1_pre of that step."""
    first = inputs.is_first[:, :1]
    saved.prev_deter[0] = inputs.deter.masked_fill(first, 0)
    saved.prev_stoch[0] = inputs.stoch.masked_fill(first, 0)
    for bias, state, weight, out in (
        (weights.in0_bias, saved.prev_deter, weights.in0_weight, saved.in0_pre),
        (weights.in1_bias, saved.prev_stoch, weights.in1_weight, saved.in1_pre),
    ):
        torch.addmm(bias, state[0], weight.T, out=out[0])


def tile_square_sums(x: Float[Tensor, "B F"], columns: int) -> Float[Tensor, "B tiles"]:
    """Sum the squares of each row over tiles of `columns`."""
    return x.float().square().view(len(x), -1, columns).sum(-1)


def stack_in0_obs(weights: ScanWeights) -> Float[Tensor, "X D"]:
    """Return the weights of the two layers that read deter as one matrix."""
    return torch.cat([weights.in0_weight, weights.obs_weight])


def has_contiguous_weights(weights: ScanWeights) -> bool:
    """True if all weights are contiguous, except `obs_weight`, which is copied."""
    fields = weights._asdict().items()
    return all(x.is_contiguous() for name, x in fields if name != "obs_weight")
