"""The optimizer in two passes over all parameters.

The plain one (`nets/optim/laprop.py`) reads and writes every tensor some fifteen
times. Here one kernel measures all gradients and parameters, and one moves them: it
clips, follows magnitude and momentum, changes the parameters and writes their
half-precision copies.
Each program works on one chunk of one tensor (`tables.py`).
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reverie.kernels.optim.low_precision_weights import Shadows
from reverie.kernels.optim.tables import CHUNK, Tables, load_number, store_copy
from reverie.nets.optim.laprop import OptConfig, Optimizer


@triton.jit
@no_type_check
def _move(
    chunks,
    fixed,
    grads,
    kinds,
    sizes,
    clips,
    decays,
    numbers,
    sums,
    beta1,
    beta2,
    eps,
    NESTEROV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Clip, follow magnitude and momentum, step; all for one chunk."""
    chunk = tl.program_id(0)
    tensor, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    at = start + tl.arange(0, CHUNK)
    mask = at < tl.load(sizes + tensor)
    gate, rate = tl.load(numbers), tl.load(numbers + 1)
    debias1, debias2 = tl.load(numbers + 2), tl.load(numbers + 3)

    grad = load_number(tl.load(grads + tensor), tl.load(kinds + 2 * tensor), at, mask)
    grad = tl.where(gate > 0, grad, 0.0) * tl.load(clips + tensor)
    row = fixed + 4 * tensor
    parameters = tl.load(row).to(tl.pointer_type(tl.float32)) + at
    momenta = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + at
    magnitudes = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + at

    nu = tl.load(magnitudes, mask, 0.0)
    nu = nu * (1 - (1 - beta2) * gate) + grad * grad * ((1 - beta2) * gate)
    tl.store(magnitudes, nu, mask)
    grad = grad / (tl.sqrt(nu / debias2) + eps)
    mu = tl.load(momenta, mask, 0.0)
    mu = mu * (1 - (1 - beta1) * gate) + grad * ((1 - beta1) * gate)
    tl.store(momenta, mu, mask)
    if NESTEROV:
        step = mu * (beta1 / debias1) + grad * ((1 - beta1) / debias1)
    else:
        step = mu / debias1
    parameter = tl.load(parameters, mask, 0.0)
    step = -(step + tl.load(decays + tensor) * parameter) * rate
    step = tl.where(mask, step, 0.0)
    parameter += step
    tl.store(parameters, parameter, mask)

    copy, kind = tl.load(row + 3), tl.load(kinds + 2 * tensor + 1)
    store_copy(copy, kind, at, parameter, mask)
    tl.store(sums + 2 * chunk, tl.sum(step * step))
    tl.store(sums + 2 * chunk + 1, tl.sum(parameter * parameter))


class FusedOptimizer(Optimizer):
    """The same optimizer; see the top of this file."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        config: OptConfig,
        scaling: bool = False,
        shadows: Shadows | None = None,
    ):
        super().__init__(parameters, config, scaling)
        leaf = shadows.leaf if shadows else lambda parameter: parameter
        self.leaves = [leaf(tensor) for tensor in self.tensors]
        self._tables = Tables(self.tensors, self.leaves, self.mu, self.nu, scaling)
        decay = [config.wd * (i in self.decays) for i in range(len(self.tensors))]
        self._decays = torch.tensor(decay, device=self.tensors[0].device)

    def _measure(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self._tables.measure(grads)

    def _move(
        self, grads: list[Tensor], clip: Tensor, lr: Tensor, ok: Tensor
    ) -> tuple[Tensor, Tensor]:
        config, tables = self.config, self._tables
        gate = ok.float()
        debias = [self._debias(beta) for beta in (config.beta1, config.beta2)]
        _move[tables.grid](
            tables.chunks,
            tables.fixed,
            tables.grads,
            tables.kinds,
            tables.sizes,
            clip,
            self._decays,
            torch.stack([gate, lr * gate, *debias]),
            tables.sums,
            config.beta1,
            config.beta2,
            config.eps,
            config.nesterov,
            CHUNK,
        )
        moved, sizes = tables.gathered()
        return torch.linalg.vector_norm(moved), torch.linalg.vector_norm(sizes)
