"""What every hand-written kernel asks before it starts: may it, and how wide.

The kernels are Triton's. They run on CUDA, and on a CPU only under Triton's interpreter
(`TRITON_INTERPRET=1`), which is slow and meant for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_launch(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels take such tensors; if not, the plain part does the work."""
    here = device.type == "cuda" or bool(triton.knobs.runtime.interpret)
    return here and dtype in DTYPES


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
