"""Weights, inputs, saved activations and gradients of the posterior scan.

All implementations of the scan take and return these tuples. Inputs are laid out
(B, T, ...). Saved activations and their gradients are laid out (T, B, ...), so that one
step is a contiguous matrix, and all steps are a matrix of T * B rows.

The layers of `RSSMDynamics` have short names here: `in0` and `in1` (dynin0 and dynin1,
the dense layers that read deter and stoch), `hid` (dynhid0, the block-diagonal hidden
layer), `gru` (dyngru, the gates of the block GRU), `obs` (obs0, the posterior layer)
and `logit` (obslogit).

Sizes: `B` batch, `T` time steps, `D` width of deter, `S` categorical variables of stoch
with `K` classes each, `L` all logits (S * K), `U` width of the dense layers, `G` blocks
of the GRU, and `W` width of one block (D / G).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor


class ScanWeights(NamedTuple):
    """Weights of the recurrent layers, or their gradients.

    Weights and biases are in the compute dtype, norm scales in float32 or wider.
    """

    in0_weight: Float[Tensor, "U D"]
    in0_bias: Tensor
    in0_scale: Tensor
    in1_weight: Float[Tensor, "U L"]
    in1_bias: Tensor
    in1_scale: Tensor
    hid_weight: Float[Tensor, "G W+3*U W"]
    """Input rows: the block of deter, then in0, in1 and the action embedding."""
    hid_bias: Tensor
    hid_scale: Tensor
    gru_weight: Float[Tensor, "G W 3*W"]
    """Output columns: the reset gate, the candidate and the update gate."""
    gru_bias: Tensor
    obs_weight: Float[Tensor, "U D"]
    """The columns for deter; the product with the other columns is in `tokens`."""
    obs_scale: Tensor
    logit_weight: Float[Tensor, "L U"]
    logit_bias: Tensor


class VectorGrads(NamedTuple):
    """Gradients of biases and norm scales, summed over all steps and rows.

    The persistent backward kernel writes them to one array, in this order.
    """

    hid_scale: Tensor
    hid_bias: Tensor
    gru_bias: Tensor
    in0_scale: Tensor
    in0_bias: Tensor
    in1_scale: Tensor
    in1_bias: Tensor
    obs_scale: Tensor
    logit_bias: Tensor


class ScanInputs(NamedTuple):
    """Initial state and sequence inputs of the scan."""

    deter: Float[Tensor, "B D"]
    stoch: Float[Tensor, "B L"]
    actions: Float[Tensor, "B T U"]
    """Action embeddings."""
    tokens: Float[Tensor, "B T U"]
    """Contribution of the observation embedding to `obs`, including the bias."""
    is_first: Bool[Tensor, "B T"]
    noise: Float[Tensor, "B T S K"]
    """Exponential noise: the sample is argmax(probs / noise)."""


class ScanSettings(NamedTuple):
    """Constants of the scan; `eps` is the epsilon of the RMS norms."""

    classes: int
    unimix: float
    eps: float


class SavedActivations(NamedTuple):
    """Outputs of the forward pass, and activations that the backward pass needs.

    Suffixes: `pre` for outputs of a layer before norm and activation, `act` for those
    after. The persistent scan splits the batch into groups of rows: (groups, T, rows,
    ...).
    """

    deter: Float[Tensor, "*n D"]
    stoch: Float[Tensor, "*n L"]
    logits: Float[Tensor, "*n L"]
    prev_deter: Float[Tensor, "*n D"]
    """State before each step, zero where `is_first` is true."""
    prev_stoch: Float[Tensor, "*n L"]
    in0_pre: Float[Tensor, "*n U"]
    in1_pre: Float[Tensor, "*n U"]
    hid_pre: Float[Tensor, "*n D"]
    gates: Float[Tensor, "*n 3*D"]
    obs_pre: Float[Tensor, "*n U"]
    inv_rms: Float[Tensor, "*n 4"]
    """Reciprocal root mean square of in0_pre, in1_pre, hid_pre and obs_pre."""
    shared_input: Float[Tensor, "*n 3*U"]
    """Inputs of all blocks of `hid`: activations of in0 and in1, action embedding."""
    hid_act: Float[Tensor, "*n D"]
    obs_act: Float[Tensor, "*n U"]


class ScanGrads(NamedTuple):
    """Result of the backward pass; leading axes as in `SavedActivations`."""

    in0_pre: Float[Tensor, "*n U"]
    in1_pre: Float[Tensor, "*n U"]
    hid_pre: Float[Tensor, "*n D"]
    gates: Float[Tensor, "*n 3*D"]
    obs_pre: Float[Tensor, "*n U"]
    logits: Float[Tensor, "*n L"]
    vectors: VectorGrads
    deter: Float[Tensor, "B D"] | None
    """Gradient of the initial state, None if the implementation does not compute it."""
    stoch: Float[Tensor, "B L"] | None


class ForwardPass(NamedTuple):
    """Arguments of the forward pass."""

    weights: ScanWeights
    inputs: ScanInputs
    settings: ScanSettings


class BackwardPass(NamedTuple):
    """Arguments of the backward pass, with the gradients of the three outputs."""

    weights: ScanWeights
    saved: SavedActivations
    is_first: Bool[Tensor, "B T"]
    grad_deter: Float[Tensor, "B T D"]
    grad_stoch: Float[Tensor, "B T L"]
    grad_logits: Float[Tensor, "B T L"]
    settings: ScanSettings


OUTPUT_GRADS = ("grad_deter", "grad_stoch", "grad_logits")
"""Fields of `BackwardPass` with the gradients of the outputs."""


def project_actions(weights: ScanWeights, inputs: ScanInputs) -> Float[Tensor, "B T D"]:
    """Return the contribution of the actions, with the bias, to hid_pre."""
    rows = inputs.actions.flatten(0, 1)
    batch, length = inputs.is_first.shape
    projected = torch.addmm(weights.hid_bias, rows, action_rows(weights))
    return projected.view(batch, length, -1)


def allocate_saved(weights: ScanWeights, inputs: ScanInputs) -> SavedActivations:
    """Allocate the activations of all steps; set only the action embeddings."""
    batch, length = inputs.is_first.shape
    widths = activation_widths(weights).items()
    saved = SavedActivations(
        inv_rms=weights.obs_scale.new_empty(length, batch, 4),
        **{k: inputs.actions.new_empty(length, batch, width) for k, width in widths},
    )
    actions = inputs.actions.transpose(0, 1)
    saved.shared_input[..., -actions.shape[-1] :] = actions
    return saved


def activation_widths(weights: ScanWeights) -> dict[str, int]:
    """Return the widths of the saved activations without `inv_rms`."""
    units, deter = weights.obs_weight.shape
    return {
        **dict.fromkeys(("deter", "prev_deter", "hid_pre", "hid_act"), deter),
        **dict.fromkeys(("stoch", "logits", "prev_stoch"), len(weights.logit_weight)),
        **dict.fromkeys(("in0_pre", "in1_pre", "obs_pre", "obs_act"), units),
        **{"gates": 3 * deter, "shared_input": 3 * units},
    }


def action_rows(weights: ScanWeights) -> Float[Tensor, "U D"]:
    """Return the rows of `hid_weight` for the action embedding, of all blocks."""
    units = weights.obs_weight.shape[0]
    return rearrange(weights.hid_weight[:, -units:], "g i o -> i (g o)")
