"""What every hand-written kernel asks before it starts: may it, and how wide.

The kernels are Triton's. They run on CUDA, and on a CPU only under Triton's interpreter
(`TRITON_INTERPRET=1`), which is slow and meant for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from reverie.nets.blocks import Linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_launch(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels take such tensors; if not, the plain part does the work."""
    here = device.type == "cuda" or bool(triton.knobs.runtime.interpret)
    return here and dtype in DTYPES


def padded_linear(layer: Linear, x: Tensor) -> Tensor:
    """A dense layer, with zeros after its outputs up to a multiple of eight.

    A product with an odd number of columns, and its gradients, are several times slower
    than one whose rows begin at aligned addresses.
    """
    weight, bias = layer.cast(x.dtype)
    more = -len(bias) % 8
    if more:
        weight, bias = F.pad(weight, (0, 0, 0, more)), F.pad(bias, (0, more))
    return F.linear(x, weight, bias)


def differentiable(function: Any, *inputs: Any) -> Tensor:
    """Call an autograd function, which PyTorch leaves without a type."""
    result: Tensor = function.apply(*inputs)
    return result


def programs(device: torch.device, tiles: int, per_processor: int = 4) -> int:
    """How many programs share `tiles` of work, where each keeps a partial sum.

    The count depends on the device alone, so that sums are the same in every run.
    """
    return max(1, min(tiles, per_processor * _processors(device)))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
