"""Helpers that launch Triton kernels: availability, grid sizes, autograd calls.

Triton kernels run on CUDA, and on a CPU only in Triton's interpreter
(`TRITON_INTERPRET=1`), which is slow and meant for tests.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from reverie.nets.blocks import Linear

if TYPE_CHECKING:  # mypy does not check the code of Triton kernels
    from typing import no_type_check as jit
else:

    def jit(function: Any) -> Any:
        """Decorator of Triton kernels, and of functions that they call."""
        # tests wrap functions in run-time type checks, which Triton cannot compile
        return triton.jit(inspect.unwrap(function))


# Triton 3.9 warns if this is not set, and later versions change the default: results
# must not depend on the version.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the Triton kernels support."""


def can_launch(device: torch.device, dtype: torch.dtype) -> bool:
    """True if Triton kernels support tensors of this dtype on this device."""
    supported = device.type == "cuda" or bool(triton.knobs.runtime.interpret)
    return supported and dtype in DTYPES


def supports_large_tiles(device: torch.device) -> bool:
    """True if matrix products with large tiles fit into the device's shared memory.

    GPUs below compute capability 8.0 have at most 64 KB per thread block, and need more
    for the same tile, because they read both factors of a product from shared memory.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def padded_linear(layer: Linear, x: Tensor) -> Tensor:
    """Apply a linear layer; pad its outputs with zeros to a multiple of eight.

    A matrix product whose number of columns is not a multiple of eight is several times
    slower, because its rows begin at unaligned addresses.
    """
    weight, bias = layer.cast(x.dtype)
    padding = -len(bias) % 8
    if not padding:
        return F.linear(x, weight, bias)
    cache = _padded_weights.get()
    key = id(layer), x.dtype
    if cache is None or torch.is_grad_enabled() or key not in cache:
        weight, bias = F.pad(weight, (0, 0, 0, padding)), F.pad(bias, (0, padding))
        if cache is not None and not torch.is_grad_enabled():
            cache[key] = weight, bias
    else:
        weight, bias = cache[key]
    return F.linear(x, weight, bias)


_padded_weights: ContextVar[dict[Any, tuple[Tensor, Tensor]] | None] = ContextVar(
    "padded_weights", default=None
)
"""Padded weights by layer and dtype; None outside of `cached_padded_weights`."""


@contextmanager
def cached_padded_weights() -> Iterator[None]:
    """Context in which `padded_linear` pads the weights of each layer only once.

    For loops without gradients, in which the weights do not change.
    """
    token = _padded_weights.set({})
    try:
        yield
    finally:
        _padded_weights.reset(token)


def apply_autograd(function: Any, *inputs: Any) -> Tensor:
    """Call `function.apply` (which has no type annotations) and return its tensor."""
    result: Tensor = function.apply(*inputs)
    return result


def block_size(width: int) -> int:
    """Return the smallest power of two that is at least `width` and at least 16.

    Tiles of `tl.dot` must have at least 16 rows and columns.
    """
    return max(16, int(triton.next_power_of_2(width)))


def tile_shape(width: int, elements: int = 1024) -> tuple[int, int]:
    """Return (rows, columns) of a tile with whole rows and about `elements` values."""
    columns = block_size(width)
    return max(1, elements // columns), columns


def num_programs(device: torch.device, tiles: int, per_sm: int = 4) -> int:
    """Return the number of programs among which `tiles` are divided.

    At most `per_sm` for each streaming multiprocessor (SM). The number depends only on
    the arguments, so that sums over tiles are reproducible.
    """
    return max(1, min(tiles, per_sm * _num_sms(device)))


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
