"""Launch the persistent posterior scan: one CUDA kernel forward and one backward.

A kernel handles all time steps of 16 rows of the batch. Larger batches are divided into
groups of 16 rows, one launch each; the caller pads the batch to a multiple of 16.
`exchange.cu` explains how the kernels work.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from math import prod

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.scan import tensors

ROWS = 16
"""The batch size must be a multiple of this."""
THREAD_BLOCKS, THREADS = 128, 256
"""Thread blocks of a launch, and threads of a block."""
DETER, UNITS, GRU_BLOCKS, STOCH, CLASSES = 2048, 256, 8, 32, 16
"""Sizes of the preset `size12m`, the only ones that the kernels support."""
LOGITS = STOCH * CLASSES
SHARED_BYTES = {
    "scan_forward": 8 * ROWS * 40 * 4 + LOGITS * 34 * 2,
    "scan_backward": 8 * ROWS * (24 + 24 + 56) * 4,
}
"""Dynamic shared memory of both kernels in bytes (the arrays named `dynamic`)."""
VECTOR_WIDTHS = [DETER, DETER, 3 * DETER, *[UNITS] * 5, LOGITS]
"""Widths of the fields of `VectorGrads`, which the backward kernel concatenates."""
ROW_SUM_STRIDE = 32
"""Stride of the rows in sums over all thread blocks, in words of 4 bytes."""
MPS_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
"""Environment variable that connects a process to NVIDIA MPS."""
UNSET = -1
"""Initial value of exchanged words (all bits set); thread blocks poll for a change."""

fallback = nvrtc.Fallback("the posterior scan")
"""Enabled if the kernels cannot be compiled or launched."""


def is_supported(scan: tensors.ForwardPass) -> bool:
    """True if there are kernels for these sizes, this dtype and this GPU.

    The kernels do not compute the gradient of the initial state. They need nearly all
    multiprocessors at once, so they are not used if other processes may share the GPU
    (MPS).
    """
    weights, inputs, _ = scan
    like = inputs.actions
    state_grad = inputs.deter.requires_grad or inputs.stoch.requires_grad
    return (
        like.is_cuda
        and like.dtype == torch.bfloat16
        and inputs.noise.dtype == torch.float32
        and not (state_grad and torch.is_grad_enabled())
        and MPS_VARIABLE not in os.environ
        and weights.gru_weight.shape == (GRU_BLOCKS, UNITS, 3 * UNITS)
        and weights.obs_weight.shape == (UNITS, DETER)
        and inputs.noise.shape[2:] == (STOCH, CLASSES)
        and not fallback.enabled
        and load_kernels(like.device) is not None
    )


@functools.cache
def load_kernels(device: torch.device) -> dict[str, nvrtc.Kernel] | None:
    """Compile both kernels for `device`; None if they cannot run there."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 9 or properties.multi_processor_count < THREAD_BLOCKS:
        return None
    try:
        handles = nvrtc.load(read_source(), list(SHARED_BYTES), device)
        pairs = zip(handles, SHARED_BYTES.items(), strict=True)
        return {
            name: nvrtc.Kernel(handle, THREAD_BLOCKS, THREADS, shared, cooperative=True)
            for handle, (name, shared) in pairs
        }
    except nvrtc.Unavailable as error:
        fallback.enable(error)
        return None


def read_source() -> str:
    """Return the CUDA source of both kernels."""
    names = ("persistent/exchange", "persistent/forward", "persistent/backward")
    files = (f"scan/{name}.cu" for name in ("numbers", "arguments", *names))
    return nvrtc.read_source({}, *files)


def run_forward(scan: tensors.ForwardPass) -> tensors.SavedActivations:
    """Run all steps and return their activations, `(groups, T, ROWS, width)`."""
    weights, inputs, settings = scan
    batch, length = inputs.is_first.shape
    groups, like, w = batch // ROWS, inputs.actions, weights
    widths = tensors.activation_widths(weights)
    shapes = {name: (groups, length, ROWS, x) for name, x in widths.items()}
    names = ("deter", "hid_pre", "in1_pre", "shared_input")
    exchanged = {name: shapes.pop(name) for name in names}
    saved = tensors.SavedActivations(
        inv_rms=torch.empty(groups, length, ROWS, 4, device=like.device),
        **_allocate_unset(like.device, torch.bfloat16, exchanged),
        **{name: like.new_empty(shape) for name, shape in shapes.items()},
    )
    actions = rearrange(inputs.actions, "(n r) t u -> n t r u", r=ROWS)
    saved.shared_input[..., 2 * UNITS :] = actions
    for state, prev, weight, bias, pre in (
        (inputs.deter, saved.prev_deter, w.in0_weight, w.in0_bias, saved.in0_pre),
        (inputs.stoch, saved.prev_stoch, w.in1_weight, w.in1_bias, saved.in1_pre),
    ):
        first = state.masked_fill(inputs.is_first[:, :1], 0)
        prev[:, 0] = first.view(groups, ROWS, -1)
        pre[:, 0] = F.linear(first, weight, bias).view(groups, ROWS, -1)
    sequences = {
        "projected_actions": tensors.project_actions(weights, inputs),
        "tokens": inputs.tokens,
        "noise": inputs.noise,
        "is_first": inputs.is_first,
    }
    exchanged_words = {
        "input_partials": (groups, length, GRU_BLOCKS, ROWS, 2 * UNITS),
        "square_sums": (groups, length, ROWS, ROW_SUM_STRIDE),
        "samples": (groups, length, ROWS, STOCH),
    }
    buffers = {
        **saved._asdict(),
        **{name: _group_rows(x) for name, x in sequences.items()},
        **_allocate_unset(like.device, torch.float32, exchanged_words),
    }
    numbers = {"eps": settings.eps, "unimix": settings.unimix}
    _launch("scan_forward", weights, buffers, numbers)
    return saved


def run_backward(scan: tensors.BackwardPass) -> tensors.ScanGrads:
    """Compute the gradients of all activations, from the last step to the first."""
    weights, saved, is_first, *_, settings = scan
    groups, length = saved.deter.shape[:2]
    device = saved.deter.device

    def shapes(widths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {name: (groups, length, ROWS, width) for name, width in widths.items()}

    exchanged = {"dobs": UNITS, "din0": UNITS, "dgates": 3 * DETER, "dhid_norm": DETER}
    partial_sums = {
        "obs_partials": (groups, length, ROWS, THREAD_BLOCKS // ROWS, UNITS),
        "input_partials": (groups, length, GRU_BLOCKS, ROWS, 2 * UNITS),
        "product_sums": (groups, length, ROWS, ROW_SUM_STRIDE),
    }
    written = shapes({"din1": UNITS, "dhid": DETER, "dlogits": LOGITS})
    buffers = {
        **saved._asdict(),
        "is_first": _group_rows(is_first),
        **{name: _group_rows(getattr(scan, name)) for name in tensors.OUTPUT_GRADS},
        **_allocate_unset(device, torch.bfloat16, shapes(exchanged)),
        **_allocate_unset(device, torch.float32, partial_sums),
        **{name: saved.deter.new_empty(shape) for name, shape in written.items()},
        "vector_sums": torch.empty(groups, ROWS, sum(VECTOR_WIDTHS), device=device),
    }
    _launch("scan_backward", weights, buffers, {"unimix": settings.unimix})
    names = ("din0", "din1", "dhid", "dgates", "dobs", "dlogits")
    vectors = torch.split(buffers["vector_sums"].sum((0, 1)), VECTOR_WIDTHS)
    activations = (buffers[name] for name in names)
    return tensors.ScanGrads._make(
        (*activations, tensors.VectorGrads(*vectors), None, None)
    )


def _group_rows(x: Tensor) -> Tensor:
    """Split the batch into groups of ROWS; flatten the axes after the time axis."""
    batch, length = x.shape[:2]
    return x.contiguous().view(batch // ROWS, ROWS, length, -1)


def _allocate_unset(
    device: torch.device, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Allocate tensors filled with UNSET, all in one buffer, by one kernel."""
    per_word = 4 // dtype.itemsize
    counts = [prod(shape) // per_word for shape in shapes.values()]
    words = torch.full((sum(counts),), UNSET, dtype=torch.int32, device=device)
    pieces = zip(torch.split(words, counts), shapes.items(), strict=True)
    return {name: x.view(dtype).view(shape) for x, (name, shape) in pieces}


def _launch(
    name: str,
    weights: tensors.ScanWeights,
    buffers: Mapping[str, Tensor],
    numbers: Mapping[str, int | float],
) -> None:
    """Launch a kernel for every group of rows, the first axis of all `buffers`.

    The arguments are in the order of `ForwardArguments` and `BackwardArguments` in the
    CUDA source.
    """
    stride, inner = weights.obs_weight.stride()  # may be part of a wider matrix
    is_aligned = inner == 1 and stride % 2 == 0
    weights = tensors.ScanWeights._make(
        x if is_aligned and x is weights.obs_weight else x.contiguous() for x in weights
    )
    numbers = {
        "length": buffers["deter"].shape[1],
        "obs_stride": weights.obs_weight.stride(0),
        **numbers,
    }
    kernels = load_kernels(buffers["deter"].device)
    assert kernels is not None
    for group in range(len(buffers["deter"])):
        pointers = {key: tensor[group] for key, tensor in buffers.items()}
        kernels[name](nvrtc.make_arguments({**weights._asdict(), **pointers}, numbers))
