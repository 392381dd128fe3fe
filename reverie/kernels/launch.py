"""Helpers that launch Triton kernels: availability, grid sizes, autograd calls.

Triton kernels run on CUDA, and on a CPU only in Triton's interpreter
(`TRITON_INTERPRET=1`), which is slow and meant for tests.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from reverie.nets.blocks import Linear

if TYPE_CHECKING:  # for mypy, it is only a decorator
    from typing import no_type_check as jit
else:

    def jit(function: Any) -> Any:
        """Compile a Triton function, whose code is not type-checked."""
        return triton.jit(inspect.unwrap(function))  # tests wrap it with type checks


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_launch(device: torch.device, dtype: torch.dtype) -> bool:
    """True if Triton kernels can be used on such tensors."""
    supported = device.type == "cuda" or bool(triton.knobs.runtime.interpret)
    return supported and dtype in DTYPES


def padded_linear(layer: Linear, x: Tensor) -> Tensor:
    """Apply a linear layer whose outputs are zero-padded to a multiple of eight.

    A matrix product with an odd number of columns, and its gradients, are several times
    slower than one whose rows begin at aligned addresses.
    """
    weight, bias = layer.cast(x.dtype)
    padding = -len(bias) % 8
    if padding:
        weight, bias = F.pad(weight, (0, 0, 0, padding)), F.pad(bias, (0, padding))
    return F.linear(x, weight, bias)


def apply_autograd(function: Any, *inputs: Any) -> Tensor:
    """Call `function.apply`, which PyTorch leaves untyped."""
    result: Tensor = function.apply(*inputs)
    return result


def block_size(width: int) -> int:
    """Return the power of two, at least 16, that holds `width` columns."""
    return max(16, int(triton.next_power_of_2(width)))


def tile_shape(width: int, elements: int = 1024) -> tuple[int, int]:
    """Return rows and columns of a tile of rows of `width`, about `elements` in all."""
    columns = block_size(width)
    return max(1, elements // columns), columns


def num_programs(device: torch.device, tiles: int, per_sm: int = 4) -> int:
    """Return how many programs share `tiles` of work and keep a partial sum each.

    The number depends only on the device, so results are reproducible.
    """
    return max(1, min(tiles, per_sm * _num_sms(device)))


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
