"""What every hand-written kernel asks before it starts: may it, and how wide.

The kernels are Triton's. They run on CUDA, and on a CPU only under Triton's interpreter
(`TRITON_INTERPRET=1`), which is slow and meant for tests.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_launch(*tensors: Tensor) -> bool:
    """Whether kernels take these tensors; if not, the plain part does the work."""
    return all(
        (x.is_cuda or triton.knobs.runtime.interpret) and x.dtype in DTYPES
        for x in tensors
    )


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
