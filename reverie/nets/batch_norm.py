"""Batch norm with the statistics of the global batch in data-parallel updates.

In a data-parallel update, mean and variance are computed from the rows of all ranks,
and gradients flow back to all ranks. Otherwise this is PyTorch's batch norm.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.distributed.collective import (
    all_reduce_with_grad,
    global_count,
    local_sequences,
)


def _synchronized_batch_norm(
    x: Float[Tensor, "n c *any"], norm: nn.BatchNorm1d | nn.BatchNorm2d
) -> Float[Tensor, "n c *any"]:
    """Normalize by the statistics of all ranks; update the running statistics."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    dims = [axis for axis in range(x.ndim) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    value = x if x.dtype == torch.float64 else x.float()
    count = global_count(len(x)) * x[0, 0].numel()
    mean = all_reduce_with_grad(value.sum(dims)) / count
    centered = value - mean.view(shape)
    var = all_reduce_with_grad(centered.square().sum(dims)) / count
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean.to(norm.running_mean), norm.momentum)
        unbiased = var * (count / max(1, count - 1))
        norm.running_var.lerp_(unbiased.to(norm.running_var), norm.momentum)
    normed = centered * torch.rsqrt(var + norm.eps).view(shape)
    return (normed * norm.weight.view(shape) + norm.bias.view(shape)).to(x.dtype)


class BatchNorm1d(nn.BatchNorm1d):
    def forward(self, x: Float[Tensor, "n c *any"]) -> Float[Tensor, "n c *any"]:
        if not self.training or local_sequences() is None:  # no data-parallel update
            return super().forward(x)
        return _synchronized_batch_norm(x, self)


class BatchNorm2d(nn.BatchNorm2d):
    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        if not self.training or local_sequences() is None:  # no data-parallel update
            return super().forward(x)
        return _synchronized_batch_norm(x, self)
