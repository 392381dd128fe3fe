"""The optimizer on a CPU, for small models: one tensor with all parameters.

A small model has many small tensors, and each operation of the plain optimizer is
repeated for every tensor. Here gradients and parameters are copied to one matrix each,
in which every parameter begins in a new row. The update rule runs on these matrices,
and the new parameters are copied back. Moments are stored in this layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reverie.api import StateDict
from reverie.nets.optim.optimizer import (
    Optimizer,
    PerTensor,
    Scalar,
    Step,
)

COLUMNS = 64
"""Elements per row. The last row of a parameter is padded with zeros."""

MAX_SIZE = 2**20
"""Maximum number of parameters. More of them do not fit into the cache."""


class FlatMatrix:
    """A matrix with the elements of several tensors; `views` have their shapes.

    `rows` is the matrix to use, by default a new one.
    """

    def __init__(self, tensors: list[Tensor], rows: Tensor | None = None):
        counts = [-(-tensor.numel() // COLUMNS) for tensor in tensors]  # rounded up
        self.rows = torch.zeros(sum(counts), COLUMNS) if rows is None else rows
        starts = [COLUMNS * sum(counts[:i]) for i in range(len(counts))]
        flat = self.rows.flatten()
        self.views = [
            flat.as_strided(tensor.shape, tensor.stride(), start)
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        self.tensor_of_row = torch.arange(len(tensors)).repeat_interleave(
            torch.tensor(counts)
        )

    def norms(self) -> PerTensor:
        """Return the norm of each tensor."""
        squares = torch.linalg.vector_norm(self.rows, dim=1).square_()
        sums = torch.zeros(len(self.views))
        return sums.index_add_(0, self.tensor_of_row, squares).sqrt_()


class FlatOptimizer(Optimizer):
    """`Optimizer` that updates all parameters at once; has the same arguments.

    `supports` returns for which optimizers it can be used.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._grads, self._weights = (FlatMatrix(self.tensors) for _ in range(2))
        # an optimizer with one parameter, whose rule updates all of them
        self._flat = Optimizer({"all": self._weights.rows}, self.config, decayed=())
        self.moments = {
            key: FlatMatrix(self.tensors, rows).views
            for key, (rows,) in self._flat.moments.items()
        }

    @staticmethod
    def supports(opt: Optimizer) -> bool:
        """True if the rule treats all parameters of this optimizer alike.

        `eps` must be positive, because the gradient of the padding is zero.
        """
        return (
            opt.size <= MAX_SIZE
            and opt.config.eps > 0
            and not (opt.rule.weight_decay() and opt.decayed)
            and all(x.dtype == torch.float32 for x in opt.tensors)
            and all(_is_dense(x) for x in opt.tensors)
        )

    def state_dict(self) -> StateDict:
        """Return the state; moments are copies, because views share their memory."""
        state = super().state_dict()
        moments = {
            key: {name: value.clone() for name, value in state[key].items()}
            for key in self.moments
        }
        return {**state, **moments}

    def _norms(self, grads: list[Tensor]) -> tuple[PerTensor, PerTensor]:
        torch._foreach_copy_(self._grads.views, grads)
        torch._foreach_copy_(self._weights.views, self.tensors)
        norms = self._grads.norms()
        if not self.rule.CLIPS_PER_TENSOR:
            return norms, norms
        return norms, self._weights.norms()

    def _update(self, grads: list[Tensor], step: Step) -> tuple[Scalar, Scalar] | None:
        clip = step.clip[self._grads.tensor_of_row, None]
        # `zeros_like`, because 0 * inf is not 0
        rows = self._grads.rows
        rows = rows.mul_(clip) if step.ok else torch.zeros_like(rows)
        result = self.rule.update(self._flat, [rows], step.gate, step.scalars)
        torch._foreach_copy_(self.tensors, self._weights.views)
        return result


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements fill their memory without gaps."""
    return tensor.numel() == 1 + sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
