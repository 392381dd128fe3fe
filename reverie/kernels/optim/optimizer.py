"""The optimizer in two passes over all parameters.

The plain optimizer (`nets/optim`) reads and writes every tensor about fifteen times.
Here one kernel computes the norms of all gradients and parameters, and another one
clips, updates moments and parameters, and writes the low-precision weights. Each
program of a kernel handles one chunk of one tensor (`tables.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton.language as tl
from torch import Tensor

from reverie.kernels.jit import jit
from reverie.kernels.optim.low_precision_weights import LowPrecisionWeights
from reverie.kernels.optim.tables import (
    CHUNK,
    COLUMNS,
    Tables,
    load_as_float32,
    store_low_precision,
)
from reverie.nets.optim.optimizer import Optimizer, OptimizerConfig, Scalar


@jit
def _update(
    chunks,
    addresses,
    grads,
    dtypes,
    sizes,
    clips,
    decays,
    scalars,
    sums,
    beta1,
    beta2,
    eps,
    RULE: tl.constexpr,
    NESTEROV: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Clip the gradient, update moments and parameters: one chunk of one tensor.

    The formulas are those of the `update` methods in `nets/optim`.
    """
    chunk = tl.program_id(0)
    tensor, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    at = start + tl.arange(0, CHUNK)
    mask = at < tl.load(sizes + tensor)
    gate, rate = tl.load(scalars), tl.load(scalars + 1)
    mu_correction, nu_correction = tl.load(scalars + 2), tl.load(scalars + 3)

    grad = load_as_float32(
        tl.load(grads + tensor), tl.load(dtypes + 2 * tensor), at, mask
    )
    grad = tl.where(gate > 0, grad, 0.0) * tl.load(clips + tensor)
    row = addresses + COLUMNS * tensor
    parameters = tl.load(row).to(tl.pointer_type(tl.float32)) + at
    mus = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + at
    nus = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + at

    # The order of loads and stores is part of the result: the compiler selects by it
    # which products it fuses with an addition.
    if RULE == "laprop":
        nu = tl.load(nus, mask, 0.0)
        nu = nu * (1 - (1 - beta2) * gate) + grad * grad * ((1 - beta2) * gate)
        tl.store(nus, nu, mask)
        grad = grad / (tl.sqrt(nu / nu_correction) + eps)
        mu = tl.load(mus, mask, 0.0)
        mu = mu * (1 - (1 - beta1) * gate) + grad * ((1 - beta1) * gate)
        tl.store(mus, mu, mask)
        if NESTEROV:
            change = mu * (beta1 / mu_correction) + grad * ((1 - beta1) / mu_correction)
        else:
            change = mu / mu_correction
        parameter = tl.load(parameters, mask, 0.0)
        change = -(change + tl.load(decays + tensor) * parameter) * rate
        change = tl.where(mask, change, 0.0)
        parameter += change
    elif RULE == "adam":
        mu = tl.load(mus, mask, 0.0)
        mu = mu * (1 - (1 - beta1) * gate) + grad * ((1 - beta1) * gate)
        tl.store(mus, mu, mask)
        nu = tl.load(nus, mask, 0.0)
        nu = nu * (1 - (1 - beta2) * gate) + grad * grad * ((1 - beta2) * gate)
        tl.store(nus, nu, mask)
        parameter = tl.load(parameters, mask, 0.0)
        parameter *= 1 - tl.load(decays + tensor) * gate
        parameter -= rate * mu / (tl.sqrt(nu / nu_correction) + eps)
    else:
        nu_maxs = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + at
        mu = tl.load(mus, mask, 0.0) * (1 - (1 - beta1) * gate) + grad * (1 - beta1)
        tl.store(mus, mu, mask)
        nu = tl.load(nus, mask, 0.0) * (1 - (1 - beta2) * gate)
        nu += grad * grad * (1 - beta2)
        tl.store(nus, nu, mask)
        nu_max = tl.maximum(tl.load(nu_maxs, mask, 0.0), nu)
        tl.store(nu_maxs, nu_max, mask)
        change = rate * mu / (tl.sqrt(nu_max) / nu_correction + eps)
        parameter = tl.load(parameters, mask, 0.0) - change
    tl.store(parameters, parameter, mask)

    copy, dtype = tl.load(row + 3), tl.load(dtypes + 2 * tensor + 1)
    store_low_precision(copy, dtype, at, parameter, mask)
    if RULE == "laprop":
        tl.store(sums + 2 * chunk, tl.sum(change * change))
        tl.store(sums + 2 * chunk + 1, tl.sum(parameter * parameter))


class FusedOptimizer(Optimizer):
    """`Optimizer` with the two kernels.

    Gradients have the dtype of the weights that the layers compute with. With
    `float32_grads` they are converted to float32, in order to be accumulated.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        config: OptimizerConfig,
        decayed: Iterable[str] | None = None,
        scaling: bool = False,
        low_precision: LowPrecisionWeights | None = None,
        float32_grads: bool = False,
    ):
        super().__init__(parameters, config, decayed, scaling)
        if low_precision:
            self.leaves = [low_precision.leaf(tensor) for tensor in self.tensors]
        self.float32_grads = scaling or float32_grads
        moments = list(self.moments.values())
        self._tables = Tables(self.tensors, self.leaves, moments, self.float32_grads)
        decay = self.rule.weight_decay()
        decays = [decay * (name in self.decayed) for name in self.names]
        self._decays = torch.tensor(decays, device=self.tensors[0].device)

    def gradients(self, loss: Scalar) -> list[Tensor]:
        grads = super().gradients(loss)
        return [grad.float() for grad in grads] if self.float32_grads else grads

    def _norms(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self._tables.norms(grads)

    def _update(
        self, grads: list[Tensor], clip: Tensor, lr: Scalar | float, ok: Tensor
    ) -> tuple[Scalar, Scalar] | None:
        config, tables, gate = self.config, self._tables, ok.float()
        scalars = self.rule.scalars(lr, gate, self.step)
        _update[tables.grid](
            tables.chunks,
            tables.addresses,
            tables.grads,
            tables.dtypes,
            tables.sizes,
            clip,
            self._decays,
            torch.stack([gate, *scalars]),
            tables.sums,
            config.beta1,
            config.beta2,
            config.eps,
            self.rule.NAME,
            getattr(config, "nesterov", False),
            COLUMNS,
            CHUNK,
        )
        if self.rule.NAME != "laprop":
            return None
        change, weights = tables.norms_from_sums()
        return torch.linalg.vector_norm(change), torch.linalg.vector_norm(weights)
