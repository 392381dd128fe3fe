"""Launch the streamed posterior scan: five CUDA kernels per step, forward and backward.

The weights are too large to stay in registers as in the persistent scan, so each kernel
streams them from memory, and starts loading them while the previous kernel still runs.
`tile.cu` explains how the kernels work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.scan import stepwise, tensors
from reverie.kernels.scan.triton.gradients import finish_gradients

ROWS = 1
"""The batch size must be a multiple of this."""
THREADS, WARPS = 256, 8
"""Threads and warps of a thread block."""
UNIT_COLUMNS = 8
"""Columns of a tile of the layers in0 and obs."""
WINDOW = 32
"""Inputs of a layer that a warp reads at once."""
FORWARD = ("forward_hidden", "forward_gates", "forward_inputs", "forward_logits")
"""Kernels of a step, in the order of their launches; "forward_in1" ends all but the
last step."""
BACKWARD = (
    *("backward_logits", "backward_obs", "backward_gates"),
    *("backward_hidden", "backward_inputs"),
)
"""Kernels of a step of the backward pass, in the order of their launches."""

BLOCK_COLUMNS, WEIGHT_LOADS, BLOCKS_PER_SM = 32, 28, 1
"""Columns of a tile of the block-diagonal layers `hid` and `gru`, weight loads that a
thread has in flight, and thread blocks per multiprocessor. These values are the fastest
at every size on an H200: 64 steps of 16 rows, forward and backward, take 4.4 ms at
size50m, 8.0 ms at size100m and 11.9 ms at size200m (presets). With the values 16, 12
and 2 they take 5.0, 9.8 and 15.1 ms."""
MAX_BLOCK_WIDTH = 1024
"""Largest width of a GRU block for which the streamed kernels are faster than the
Triton kernels at a batch size of 16 (Triton takes 7.2, 12.1 and 15.5 ms for the sizes
above). For larger batches, the streamed kernels are faster at every width."""

fallback = nvrtc.Fallback("the posterior scan")
"""Enabled if the kernels cannot be compiled or launched."""


class LayerSizes(NamedTuple):
    """Sizes that the kernels are compiled for."""

    deter: int
    units: int
    gru_blocks: int
    stoch: int
    classes: int

    @property
    def in1_tile_columns(self) -> int:
        """Units of in1 that one thread block computes."""
        return 64 if self.units % 64 == 0 else 32


def is_fastest(scan: tensors.ForwardPass) -> bool:
    """True if the kernels are faster than Triton's, as measured on an H200."""
    is_narrow = scan.weights.gru_weight.shape[1] <= MAX_BLOCK_WIDTH
    return is_narrow or len(scan.inputs.is_first) > 16


def is_supported(scan: tensors.ForwardPass) -> bool:
    """True if there are kernels for these sizes, this dtype and this GPU."""
    weights, inputs, settings = scan
    like, sizes = inputs.actions, _layer_sizes(weights, settings.classes)
    return (
        like.is_cuda
        and like.dtype == torch.bfloat16
        and inputs.noise.dtype == weights.obs_scale.dtype == torch.float32
        and sizes.units % WINDOW == 0
        and sizes.deter % (sizes.gru_blocks * WINDOW) == 0
        and sizes.stoch * sizes.classes % WINDOW == 0
        and sizes.classes % 8 == 0
        and stepwise.has_contiguous_weights(weights)
        and not fallback.enabled
        and load_kernels(sizes, like.device) is not None
    )


@functools.cache
def load_kernels(
    sizes: LayerSizes, device: torch.device
) -> dict[str, Callable[..., None]] | None:
    """Compile all kernels for these sizes; None if they cannot run on `device`."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    unit_tiles, block_tiles = sizes.units // UNIT_COLUMNS, sizes.deter // BLOCK_COLUMNS
    # number of thread blocks (0: given at launch), and columns of a tile
    launches = {
        "forward_hidden": (block_tiles, BLOCK_COLUMNS),
        "forward_gates": (block_tiles, 3 * BLOCK_COLUMNS),
        "forward_inputs": (2 * unit_tiles, UNIT_COLUMNS),
        "forward_logits": (sizes.stoch, sizes.classes),
        "forward_in1": (0, UNIT_COLUMNS),
        "backward_logits": (sizes.stoch, sizes.classes),
        "backward_obs": (unit_tiles, UNIT_COLUMNS),
        "backward_gates": (block_tiles, BLOCK_COLUMNS),
        "backward_hidden": (block_tiles, BLOCK_COLUMNS),
        "backward_inputs": (2 * unit_tiles + block_tiles, BLOCK_COLUMNS),
    }
    try:
        handles = nvrtc.load(read_source(sizes), list(launches), device)
        pairs = zip(handles, launches.items(), strict=True)
        return {
            name: nvrtc.Kernel(handle, blocks, THREADS, _shared_bytes(width))
            for handle, (name, (blocks, width)) in pairs
        }
    except nvrtc.Unavailable as error:
        fallback.enable(error)
        return None


def read_source(sizes: LayerSizes) -> str:
    """Return the CUDA source of all kernels for these sizes."""
    constants = {name.upper(): size for name, size in sizes._asdict().items()}
    constants |= {"IN1_COLUMNS": sizes.in1_tile_columns}
    constants |= {"UNIT_COLUMNS": UNIT_COLUMNS}
    constants |= {"BLOCK_COLUMNS": BLOCK_COLUMNS, "WEIGHT_LOADS": WEIGHT_LOADS}
    constants["BLOCKS_PER_SM"] = BLOCKS_PER_SM
    names = ("streamed/tile", "streamed/forward", "streamed/backward")
    files = (f"scan/{name}.cu" for name in ("numbers", "arguments", *names))
    return nvrtc.read_source(constants, *files)


def run_forward(scan: tensors.ForwardPass) -> tensors.SavedActivations:
    """Run all steps and return their activations."""
    weights, inputs, settings = scan
    batch, length = inputs.is_first.shape
    sizes, device = _layer_sizes(weights, settings.classes), inputs.is_first.device
    saved = tensors.allocate_saved(weights, inputs)
    stepwise.write_first_inputs(weights, inputs, saved)
    hid_inputs = sizes.deter // sizes.gru_blocks + 2 * sizes.units  # without actions
    buffers = {  # the copies must stay alive until the last launch
        **weights._asdict(),
        **saved._asdict(),
        "hid_rows": weights.hid_weight[:, :hid_inputs].transpose(1, 2).contiguous(),
        "gru_rows": weights.gru_weight.transpose(1, 2).contiguous(),
        "in0_obs_rows": stepwise.stack_in0_obs(weights),
        "in1_columns": weights.in1_weight.T.contiguous(),
        "projected_actions": tensors.project_actions(weights, inputs),
        "tokens": inputs.tokens.contiguous(),
        "noise": inputs.noise.contiguous(),
        "is_first": inputs.is_first.contiguous(),
        "in0_partials": stepwise.tile_square_sums(saved.in0_pre[0], UNIT_COLUMNS),
        "in1_partials": stepwise.tile_square_sums(
            saved.in1_pre[0], sizes.in1_tile_columns
        ),
        **_allocate_partials(sizes, inputs.is_first, "hid_partials", "obs_partials"),
        "samples": torch.empty(batch, sizes.stoch, dtype=torch.int32, device=device),
    }
    numbers = {
        **{"t": 0, "length": length, "batch": batch},
        **{"eps": settings.eps, "unimix": settings.unimix},
    }
    arguments = nvrtc.make_arguments(buffers, numbers)
    kernels = load_kernels(sizes, device)
    assert kernels is not None
    for t in range(length):
        arguments.t = t
        for name in FORWARD:
            # The first kernel must not overlap with the kernels that copy the weights,
            # because it loads weights before it waits for the previous kernel.
            kernels[name](arguments, overlap=t > 0 or name != FORWARD[0])
        if t + 1 < length:
            blocks = batch * sizes.units // sizes.in1_tile_columns
            kernels["forward_in1"](arguments, blocks, overlap=True)
    return saved


def run_backward(scan: tensors.BackwardPass) -> tensors.ScanGrads:
    """Compute the gradients of all activations, from the last step to the first."""
    weights, saved, is_first, *_, settings = scan
    batch, length = is_first.shape
    sizes = _layer_sizes(weights, settings.classes)
    step_grads = stepwise.allocate_step_grads(saved)
    partials = ("in0_partials", "in1_partials", "hid_partials", "obs_partials")
    buffers = {  # the copies must stay alive until the last launch
        **weights._asdict(),
        **saved._asdict(),
        "in1_columns": weights.in1_weight.T.contiguous(),
        "logit_columns": weights.logit_weight.T.contiguous(),
        "in0_obs_columns": torch.cat([weights.in0_weight.T, weights.obs_weight.T], 1),
        **{name: getattr(scan, name).contiguous() for name in tensors.OUTPUT_GRADS},
        "is_first": is_first.contiguous(),
        **{f"d{name}": x for name, x in step_grads._asdict().items()},
        **_allocate_partials(sizes, is_first, *partials),
    }
    numbers = {"t": 0, "length": length, "batch": batch, "unimix": settings.unimix}
    arguments = nvrtc.make_arguments(buffers, numbers)
    kernels = load_kernels(sizes, is_first.device)
    assert kernels is not None
    for t in reversed(range(length)):
        arguments.t = t
        for name in BACKWARD:
            overlap = t + 1 < length or name != BACKWARD[0]
            kernels[name](arguments, overlap=overlap)
    return finish_gradients(scan, step_grads)


def _layer_sizes(weights: tensors.ScanWeights, classes: int) -> LayerSizes:
    """Return the sizes of the layers, from the shapes of their weights."""
    units, deter = weights.obs_weight.shape
    stoch = weights.logit_weight.shape[0] // classes
    return LayerSizes(deter, units, weights.gru_weight.shape[0], stoch, classes)


def _allocate_partials(
    sizes: LayerSizes, like: Tensor, *names: str
) -> dict[str, Tensor]:
    """Allocate partial sums of rows, (batch, tiles); `like` has one entry per row."""
    unit_tiles = sizes.units // UNIT_COLUMNS
    counts = {"hid_partials": sizes.deter // BLOCK_COLUMNS}
    return {
        name: torch.empty(len(like), counts.get(name, unit_tiles), device=like.device)
        for name in names
    }


def _shared_bytes(columns: int) -> int:
    """Return the bytes of shared memory for the sums of all warps (see `Tile`)."""
    pitch = columns + (24 - columns % 16) % 16  # row stride, `Tile::PITCH`
    return WARPS * 16 * pitch * 4
