"""AMSGrad in two passes over all parameters: one measures the gradients, one moves all.

As `optimizer.py`, for the optimizer of watchers.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reverie.kernels.optim.tables import CHUNK, Tables, load_number
from reverie.nets.optim.amsgrad import AMSGrad, AMSGradConfig


@triton.jit
@no_type_check
def _move(
    chunks,
    fixed,
    grads,
    kinds,
    sizes,
    records,
    numbers,
    beta1,
    beta2,
    eps,
    CHUNK: tl.constexpr,
):
    """Clip, follow momentum and magnitude, remember the largest, step; one chunk."""
    chunk = tl.program_id(0)
    tensor, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    at = start + tl.arange(0, CHUNK)
    mask = at < tl.load(sizes + tensor)
    gate, factor = tl.load(numbers), tl.load(numbers + 1)
    rate, root = tl.load(numbers + 2), tl.load(numbers + 3)

    grad = load_number(tl.load(grads + tensor), tl.load(kinds + 2 * tensor), at, mask)
    grad = tl.where(gate > 0, grad * factor, 0.0)
    row = fixed + 4 * tensor
    parameters = tl.load(row).to(tl.pointer_type(tl.float32)) + at
    means = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + at
    squares = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + at
    largests = tl.load(records + tensor).to(tl.pointer_type(tl.float32)) + at

    mean = tl.load(means, mask, 0.0) * (1 - (1 - beta1) * gate) + grad * (1 - beta1)
    tl.store(means, mean, mask)
    square = tl.load(squares, mask, 0.0) * (1 - (1 - beta2) * gate)
    square += grad * grad * (1 - beta2)
    tl.store(squares, square, mask)
    largest = tl.maximum(tl.load(largests, mask, 0.0), square)
    tl.store(largests, largest, mask)
    change = rate * mean / (tl.sqrt(largest) / root + eps)
    tl.store(parameters, tl.load(parameters, mask, 0.0) - change, mask)


class FusedAMSGrad(AMSGrad):
    """The same optimizer; see the top of this file."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        config: AMSGradConfig,
        scaling: bool = False,
    ):
        super().__init__(parameters, config, scaling)
        mean, square, largest = (
            self.moments[key] for key in ("mean", "square", "largest")
        )
        self._tables = Tables(self.tensors, self.tensors, mean, square)
        records = [tensor.data_ptr() for tensor in largest]
        self._records = torch.tensor(records, device=self.tensors[0].device)

    def _measure(self, grads: list[Tensor]) -> Tensor:
        return self._tables.measure(grads)[0]

    def _move(self, grads: list[Tensor], factor: Tensor, ok: Tensor) -> None:
        config, tables, gate = self.config, self._tables, ok.float()
        rate = config.lr * gate / self._debias(config.beta1)
        root = torch.sqrt(self._debias(config.beta2))
        _move[tables.grid](
            tables.chunks,
            tables.fixed,
            tables.grads,
            tables.kinds,
            tables.sizes,
            self._records,
            torch.stack([gate, factor, rate, root]),
            config.beta1,
            config.beta2,
            config.eps,
            CHUNK,
        )
