"""Adam in two passes over all parameters: one measures the gradients, one moves all.

As `optimizer.py`, for the optimizer of Δ-IRIS.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reverie.kernels.optim.low_precision_weights import Shadows
from reverie.kernels.optim.tables import CHUNK, Tables, load_number, store_copy
from reverie.nets.optim.adam import Adam, AdamConfig


@triton.jit
@no_type_check
def _move(
    chunks,
    fixed,
    grads,
    kinds,
    sizes,
    decays,
    numbers,
    beta1,
    beta2,
    eps,
    CHUNK: tl.constexpr,
):
    """Clip, follow momentum and magnitude, decay and step; all for one chunk."""
    chunk = tl.program_id(0)
    tensor, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    at = start + tl.arange(0, CHUNK)
    mask = at < tl.load(sizes + tensor)
    gate, factor, rate = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    debias = tl.load(numbers + 3)

    grad = load_number(tl.load(grads + tensor), tl.load(kinds + 2 * tensor), at, mask)
    grad = tl.where(gate > 0, grad, 0.0) * factor
    row = fixed + 4 * tensor
    parameters = tl.load(row).to(tl.pointer_type(tl.float32)) + at
    momenta = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + at
    magnitudes = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + at

    mu = tl.load(momenta, mask, 0.0)
    mu = mu * (1 - (1 - beta1) * gate) + grad * ((1 - beta1) * gate)
    tl.store(momenta, mu, mask)
    nu = tl.load(magnitudes, mask, 0.0)
    nu = nu * (1 - (1 - beta2) * gate) + grad * grad * ((1 - beta2) * gate)
    tl.store(magnitudes, nu, mask)
    parameter = tl.load(parameters, mask, 0.0)
    parameter *= 1 - tl.load(decays + tensor) * gate
    parameter -= rate * mu / (tl.sqrt(nu / debias) + eps)
    tl.store(parameters, parameter, mask)
    copy, kind = tl.load(row + 3), tl.load(kinds + 2 * tensor + 1)
    store_copy(copy, kind, at, parameter, mask)


class FusedAdam(Adam):
    """The same optimizer; see the top of this file.

    Gradients are as precise as what computes with the parameters; `full` makes all of
    them float32, for those who add them up.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        config: AdamConfig,
        decays: Iterable[str] = (),
        shadows: Shadows | None = None,
        full: bool = False,
    ):
        decays = set(decays)
        super().__init__(parameters, config, decays)
        leaf = shadows.leaf if shadows else lambda parameter: parameter
        self.leaves = [leaf(tensor) for tensor in self.tensors]
        self.full = full
        self._tables = Tables(self.tensors, self.leaves, self.mu, self.nu, full)
        rates = [config.lr * config.wd * (name in decays) for name in self.names]
        self._rates = torch.tensor(rates, device=self.tensors[0].device)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        grads = super().gradients(loss)
        return [grad.float() for grad in grads] if self.full else grads

    def _measure(self, grads: list[Tensor]) -> Tensor:
        return self._tables.measure(grads)[0]

    def _move(self, grads: list[Tensor], factor: Tensor, ok: Tensor) -> None:
        config, tables, gate = self.config, self._tables, ok.float()
        rate = config.lr * gate / self._debias(config.beta1)
        _move[tables.grid](
            tables.chunks,
            tables.fixed,
            tables.grads,
            tables.kinds,
            tables.sizes,
            self._rates,
            torch.stack([gate, factor, rate, self._debias(config.beta2)]),
            config.beta1,
            config.beta2,
            config.eps,
            CHUNK,
        )
