"""Launch the Triton kernels of the posterior scan: five per step, forward and backward.

Supports all sizes whose widths are multiples of 16, in float32, bfloat16 and float16,
on every GPU that Triton supports.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from reverie.kernels.launch import can_launch
from reverie.kernels.scan import stepwise, tensors
from reverie.kernels.scan.triton import backward, forward
from reverie.kernels.scan.triton.gradients import finish_gradients

ROWS = 1
"""The batch size must be a multiple of this."""
MIN_TILE = 16
"""Smallest dimension of a matrix product in Triton."""
LOAD_BYTES = 24 * 1024
"""Approximate bytes that a program loads per iteration of a matrix product."""
OPTIONS = {"num_stages": 4, "num_warps": 4}
"""Launch options of all kernels."""
MAX_BLOCK_COLUMNS = 32
"""Maximum number of columns of a tile of the block-diagonal layers."""


class TileSizes(NamedTuple):
    """Sizes of the layers, and of the tiles that a program computes."""

    deter: int
    units: int
    block_width: int
    stoch: int
    classes: int
    rows: int
    """Rows of a tile."""
    block_columns: int
    """Columns of a tile of the block-diagonal layers `hid` and `gru`."""
    unit_columns: int
    """Columns of a tile of the layers in0 and obs."""
    in1_columns: int
    """Columns of a tile of in1."""
    precision: str
    """Precision of matrix products, `input_precision` of `tl.dot`."""
    itemsize: int
    """Bytes per weight."""

    def depth(self, width: int, columns: int) -> int:
        """Return how many of `width` inputs a program reads per iteration."""
        # limited to the largest power of two for which the loads fit into LOAD_BYTES
        limit = LOAD_BYTES // (self.itemsize * (self.rows + columns))
        return max(MIN_TILE, _largest_divisor(width, 1 << limit.bit_length() - 1))

    @property
    def logits(self) -> int:
        """Number of all logits."""
        return self.stoch * self.classes

    @property
    def padded_classes(self) -> int:
        """Number of classes, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.classes))

    @property
    def variables(self) -> int:
        """Categorical variables of a tile of the logits."""
        return max(1, MIN_TILE // self.padded_classes)


def is_supported(scan: tensors.ForwardPass) -> bool:
    """True if the kernels support these sizes, this dtype and this device."""
    weights, inputs, _ = scan
    stoch, classes = inputs.noise.shape[2:]
    widths = (*weights.obs_weight.shape, *weights.gru_weight.shape[1:], stoch * classes)
    return (
        can_launch(inputs.actions.device, inputs.actions.dtype)
        and inputs.noise.dtype == weights.obs_scale.dtype == torch.float32
        and all(width % MIN_TILE == 0 for width in widths)
        and stepwise.has_contiguous_weights(weights)
    )


def run_forward(scan: tensors.ForwardPass) -> tensors.SavedActivations:
    """Run all steps and return their activations."""
    weights, inputs, settings = scan
    w, sizes = weights, _tile_sizes(weights, settings, inputs.is_first)
    saved = tensors.allocate_saved(w, inputs)
    projected = tensors.project_actions(w, inputs)
    batch, length = inputs.is_first.shape
    in0_obs, in1_transposed = stepwise.stack_in0_obs(w), w.in1_weight.T.contiguous()
    tokens, noise = inputs.tokens.contiguous(), inputs.noise.contiguous()
    is_first = inputs.is_first.contiguous().view(torch.uint8)
    partials = _partial_sums(sizes, is_first)
    samples = torch.empty(batch, sizes.stoch, dtype=torch.int32, device=is_first.device)
    stepwise.write_first_inputs(w, inputs, saved)
    for sums, pre in ((partials.in0, saved.in0_pre), (partials.in1, saved.in1_pre)):
        sums.copy_(stepwise.tile_square_sums(pre[0], sizes.units // len(sums)).T)
    row_tiles = triton.cdiv(batch, sizes.rows)
    block_grid = (sizes.deter // sizes.block_columns, row_tiles)
    logit_grid = (triton.cdiv(sizes.stoch, sizes.variables), row_tiles)
    width, units, deter = sizes.block_width, sizes.units, sizes.deter
    eps, rows, precision = settings.eps, sizes.rows, sizes.precision
    for t in range(length):
        step = (t, length, batch)
        forward.hidden_forward[block_grid](
            *(saved.prev_deter, saved.in0_pre, saved.in1_pre, w.in0_scale, w.in1_scale),
            *(partials.in0, partials.in1, projected, w.hid_weight, saved.hid_pre),
            *(partials.hid, saved.shared_input, saved.inv_rms, *step, eps),
            *(deter, units, width, *_tile_counts(partials.in0)),
            *_tile_counts(partials.in1),
            *(rows, sizes.block_columns, sizes.depth(width, sizes.block_columns)),
            *(sizes.depth(units, sizes.block_columns), precision),
            **OPTIONS,
        )
        forward.gates_forward[block_grid](
            *(saved.hid_pre, w.hid_scale, partials.hid, w.gru_weight, w.gru_bias),
            *(saved.prev_deter, is_first, saved.gates, saved.deter, saved.hid_act),
            *(saved.inv_rms, *step, eps, deter, width, *_tile_counts(partials.hid)),
            *(rows, sizes.block_columns, sizes.depth(width, 3 * sizes.block_columns)),
            precision,
            **OPTIONS,
        )
        forward.inputs_forward[(2 * units // sizes.unit_columns, row_tiles)](
            *(saved.deter, in0_obs, w.in0_bias, tokens, is_first),
            *(saved.in0_pre, saved.obs_pre, partials.in0, partials.obs, *step),
            *(deter, units, rows, sizes.unit_columns),
            *(sizes.depth(deter, sizes.unit_columns), precision),
            **OPTIONS,
        )
        forward.logits_forward[logit_grid](
            *(saved.obs_pre, w.obs_scale, partials.obs, w.logit_weight, w.logit_bias),
            *(noise, is_first, saved.logits, saved.stoch, saved.prev_stoch, samples),
            *(saved.obs_act, saved.inv_rms, *step, eps, settings.unimix),
            *(units, sizes.stoch, sizes.classes, *_tile_counts(partials.obs)),
            *(rows, sizes.variables, sizes.padded_classes),
            *(sizes.depth(units, sizes.variables * sizes.padded_classes), precision),
            **OPTIONS,
        )
        if t + 1 < length:
            forward.in1_forward[(batch, units // sizes.in1_columns)](
                *(samples, in1_transposed, w.in1_bias, is_first, saved.in1_pre),
                *(partials.in1, *step, units, sizes.stoch, sizes.classes),
                *(triton.next_power_of_2(sizes.stoch), sizes.in1_columns),
                **OPTIONS,
            )
    return saved


def run_backward(scan: tensors.BackwardPass) -> tensors.ScanGrads:
    """Compute the gradients of all activations, from the last step to the first."""
    weights, saved, is_first, *grads, settings = scan
    w, sizes = weights, _tile_sizes(weights, settings, is_first)
    batch, length = is_first.shape
    in0_obs, flags = stepwise.stack_in0_obs(w), is_first.contiguous().view(torch.uint8)
    partials = _partial_sums(sizes, is_first)
    # in the backward pass, tiles of in1 have `unit_columns` columns, as those of in0
    partials = partials._replace(in1=torch.empty_like(partials.in0))
    grad_deter, grad_stoch, grad_logits = (x.contiguous() for x in grads)
    d = stepwise.allocate_step_grads(saved)  # `d.logits` is the gradient of the logits
    row_tiles = triton.cdiv(batch, sizes.rows)
    block_grid = (sizes.deter // sizes.block_columns, row_tiles)
    logit_grid = (triton.cdiv(sizes.stoch, sizes.variables), row_tiles)
    width, units, deter = sizes.block_width, sizes.units, sizes.deter
    logits, rows, precision = sizes.logits, sizes.rows, sizes.precision
    for t in reversed(range(length)):
        step = (t, length, batch)
        backward.logits_backward[logit_grid](
            *(d.in_norm, saved.in1_pre, w.in1_scale, partials.in1, saved.inv_rms),
            *(flags, w.in1_weight, saved.logits, grad_stoch, grad_logits, d.logits),
            *(*step, settings.unimix, units, sizes.stoch, sizes.classes),
            *(*_tile_counts(partials.in1), rows, sizes.variables, sizes.padded_classes),
            *(sizes.depth(units, sizes.variables * sizes.padded_classes), precision),
            **OPTIONS,
        )
        backward.norm_output_backward[(units // sizes.unit_columns, row_tiles)](
            *(d.logits, w.logit_weight, saved.obs_pre, w.obs_scale),
            *(saved.inv_rms, d.obs_norm, partials.obs, *step),
            # norm of obs: NORM, F, W, K, ROW, INPUT_STRIDE, OUTPUT_STRIDE
            *(3, units, units, logits, logits, units, 1, rows, sizes.unit_columns),
            *(sizes.depth(logits, sizes.unit_columns), precision),
            **OPTIONS,
        )
        backward.gates_backward[block_grid](
            *(d.obs_norm, saved.obs_pre, w.obs_scale, partials.obs),
            *(d.in_norm, saved.in0_pre, w.in0_scale, partials.in0, saved.inv_rms),
            *(flags, in0_obs, grad_deter, saved.gates, saved.prev_deter),
            *(d.deter, d.gates, *step, deter, units, width),
            *(*_tile_counts(partials.obs), *_tile_counts(partials.in0)),
            *(rows, sizes.block_columns, sizes.depth(units, sizes.block_columns)),
            precision,
            **OPTIONS,
        )
        backward.norm_output_backward[block_grid](
            *(d.gates, w.gru_weight, saved.hid_pre, w.hid_scale),
            *(saved.inv_rms, d.hid_norm, partials.hid, *step),
            # norm of hid: NORM, F, W, K, ROW, INPUT_STRIDE, OUTPUT_STRIDE
            *(2, deter, width, 3 * width, 3 * deter, 1, 3 * width),
            *(rows, sizes.block_columns, sizes.depth(3 * width, sizes.block_columns)),
            precision,
            **OPTIONS,
        )
        backward.inputs_backward[
            ((2 * units + deter) // sizes.unit_columns, row_tiles)
        ](
            *(d.hid_norm, saved.hid_pre, w.hid_scale, partials.hid, saved.inv_rms),
            *(flags, w.hid_weight, saved.in0_pre, saved.in1_pre),
            *(w.in0_scale, w.in1_scale, d.in_norm, partials.in0, partials.in1),
            *(d.deter, *step, deter, units, width, *_tile_counts(partials.hid)),
            *(rows, sizes.unit_columns, sizes.depth(width, sizes.unit_columns)),
            precision,
            **OPTIONS,
        )
    return finish_gradients(scan, d)


class _PartialSums(NamedTuple):
    """Sums over the columns of each tile, `(tiles, batch)`."""

    in0: Tensor
    in1: Tensor
    hid: Tensor
    obs: Tensor


def _tile_sizes(
    weights: tensors.ScanWeights, settings: tensors.ScanSettings, is_first: Tensor
) -> TileSizes:
    """Return the sizes of the layers, and tile sizes that fit them."""
    units, deter = weights.obs_weight.shape
    width, logits = weights.gru_weight.shape[1], weights.logit_weight.shape[0]
    is_float32 = weights.obs_weight.dtype == torch.float32
    return TileSizes(
        deter,
        units,
        width,
        logits // settings.classes,
        settings.classes,
        rows=min(64, max(MIN_TILE, triton.next_power_of_2(len(is_first)))),
        block_columns=_largest_divisor(width, MAX_BLOCK_COLUMNS),
        unit_columns=MIN_TILE,
        in1_columns=_largest_divisor(units, 64),
        precision="ieee" if is_float32 else "tf32",
        itemsize=weights.obs_weight.itemsize,
    )


def _partial_sums(sizes: TileSizes, like: Tensor) -> _PartialSums:
    """Allocate the partial sums for a batch of `len(like)` rows."""
    counts = (
        sizes.units // sizes.unit_columns,
        sizes.units // sizes.in1_columns,
        sizes.deter // sizes.block_columns,
        sizes.units // sizes.unit_columns,
    )
    return _PartialSums(
        *(torch.empty(count, len(like), device=like.device) for count in counts)
    )


def _tile_counts(partials: Tensor) -> tuple[int, int]:
    """Return the number of tiles, exact and rounded up to a power of two."""
    return len(partials), triton.next_power_of_2(len(partials))


def _largest_divisor(width: int, limit: int) -> int:
    """Return the largest power of two that divides `width`, at most `limit`."""
    return min(limit, width & -width)
