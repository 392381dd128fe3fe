"""The optimizer in two passes over all parameters.

The plain one (`nets/optim.py`) reads and writes every tensor some fifteen times. Here
one kernel measures all gradients and parameters, and one moves them: it clips, follows
magnitude and momentum, changes the parameters and writes their half-precision copies.
Each program works on one chunk of one tensor, which it finds in tables of addresses.
"""

from __future__ import annotations

import itertools
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reverie.nets.fast.shadow import Shadows
from reverie.nets.optim import OptConfig, Optimizer

CHUNK = 4096
"""Elements one program works on."""

FLOAT, BFLOAT, HALF = 0, 1, 2
KINDS = {torch.float32: FLOAT, torch.bfloat16: BFLOAT, torch.float16: HALF}


@triton.jit
@no_type_check
def load_number(address, kind, at, mask):
    """Numbers of any kind, as float32."""
    if kind == 0:
        x = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask, 0.0)
    elif kind == 1:
        x = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask, 0.0).to(
            tl.float32
        )
    else:
        x = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask, 0.0).to(
            tl.float32
        )
    return x


@triton.jit
@no_type_check
def _measure(chunks, fixed, grads, kinds, sizes, sums, CHUNK: tl.constexpr):
    """Squares of gradient and parameter, summed over one chunk."""
    chunk = tl.program_id(0)
    tensor, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    at = start + tl.arange(0, CHUNK)
    mask = at < tl.load(sizes + tensor)
    grad = load_number(tl.load(grads + tensor), tl.load(kinds + 2 * tensor), at, mask)
    address = tl.load(fixed + 4 * tensor)
    parameter = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask, 0.0)
    tl.store(sums + 2 * chunk, tl.sum(grad * grad))
    tl.store(sums + 2 * chunk + 1, tl.sum(parameter * parameter))


@triton.jit
@no_type_check
def _gather(sums, firsts, norms, tensors, MOST: tl.constexpr, WIDTH: tl.constexpr):
    """Add up the chunks of one tensor, in order."""
    tensor = tl.program_id(0)
    first, end = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    left = tl.zeros((WIDTH,), tl.float32)
    right = tl.zeros((WIDTH,), tl.float32)
    for base in range(0, MOST, WIDTH):
        at = first + base + tl.arange(0, WIDTH)
        left += tl.load(sums + 2 * at, at < end, 0.0)
        right += tl.load(sums + 2 * at + 1, at < end, 0.0)
    tl.store(norms + tensor, tl.sqrt(tl.sum(left)))
    tl.store(norms + tensors + tensor, tl.sqrt(tl.sum(right)))


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
    if kind == 1:
        to_bfloat = copy.to(tl.pointer_type(tl.bfloat16)) + at
        tl.store(to_bfloat, parameter.to(tl.bfloat16), mask)
    elif kind == 2:
        to_half = copy.to(tl.pointer_type(tl.float16)) + at
        tl.store(to_half, parameter.to(tl.float16), mask)
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
        device = self.tensors[0].device
        chunks, firsts = [], [0]
        for i, tensor in enumerate(self.tensors):
            chunks += [(i, start) for start in range(0, tensor.numel(), CHUNK)]
            firsts.append(len(chunks))
        copies = [
            (leaf.data_ptr(), KINDS[leaf.dtype]) if leaf is not tensor else (0, FLOAT)
            for leaf, tensor in zip(self.leaves, self.tensors, strict=True)
        ]

        def table(rows: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(rows, dtype=dtype, device=device)

        decay = [config.wd * (i in self.decays) for i in range(len(self.tensors))]
        self._chunks, self._firsts = table(chunks), table(firsts)
        self._most = max(end - first for first, end in itertools.pairwise(firsts))
        self._sizes = table([tensor.numel() for tensor in self.tensors])
        self._decays = table(decay, torch.float32)
        state = zip(self.tensors, self.mu, self.nu, copies, strict=True)
        self._fixed = table(
            [(p.data_ptr(), m.data_ptr(), n.data_ptr(), c[0]) for p, m, n, c in state]
        )
        kinds = [KINDS[torch.float32 if scaling else x.dtype] for x in self.leaves]
        self._kinds = table(
            [(kind, copy[1]) for kind, copy in zip(kinds, copies, strict=True)]
        )
        self._sums = torch.zeros(len(chunks), 2, device=device)
        self._grads = torch.zeros(len(self.tensors), dtype=torch.int64, device=device)
        self._spare: Tensor | None = None
        self._recorded: list[tuple[Tensor, list[Tensor]]] = []

    def _measure(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        self._point_at(grads)
        _measure[(len(self._chunks),)](
            self._chunks,
            self._fixed,
            self._grads,
            self._kinds,
            self._sizes,
            self._sums,
            CHUNK,
        )
        return self._gathered()

    def _move(
        self, grads: list[Tensor], clip: Tensor, lr: Tensor, ok: Tensor
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        gate = ok.float()
        debias = [self._debias(beta) for beta in (config.beta1, config.beta2)]
        _move[(len(self._chunks),)](
            self._chunks,
            self._fixed,
            self._grads,
            self._kinds,
            self._sizes,
            clip,
            self._decays,
            torch.stack([gate, lr * gate, *debias]),
            self._sums,
            config.beta1,
            config.beta2,
            config.eps,
            config.nesterov,
            CHUNK,
        )
        moved, sizes = self._gathered()
        return torch.linalg.vector_norm(moved), torch.linalg.vector_norm(sizes)

    def _gathered(self) -> tuple[Tensor, Tensor]:
        count = len(self.tensors)
        norms = torch.empty(2, count, device=self._sums.device)
        _gather[(count,)](self._sums, self._firsts, norms, count, self._most, 256)
        return norms[0], norms[1]

    def _point_at(self, grads: list[Tensor]) -> None:
        """Write down where this update's gradients are.

        While a graph is recorded, the copy of the addresses becomes part of it, so the
        memory they are copied from is then kept as it is for good.
        """
        self._held = [
            _laid_out_as(grad, tensor)
            for grad, tensor in zip(grads, self.tensors, strict=True)
        ]
        where = torch.tensor([grad.data_ptr() for grad in self._held])
        if (
            self._grads.device.type == "cuda"
            and torch.cuda.is_current_stream_capturing()
        ):
            staging, self._spare = self._spare, None
            assert staging is not None, "an update must come before a recording"
            self._recorded.append((staging, self._held))
        else:
            staging = self._staging()
            self._spare = self._spare if self._spare is not None else self._staging()
        self._grads.copy_(staging.copy_(where), non_blocking=True)

    def _staging(self) -> Tensor:
        pinned = self._grads.device.type == "cuda"
        return torch.empty(len(self.tensors), dtype=torch.int64, pin_memory=pinned)


def _laid_out_as(grad: Tensor, tensor: Tensor) -> Tensor:
    """The gradient in the memory order of its parameter."""
    if grad.stride() == tensor.stride():
        return grad
    return torch.empty_like(tensor, dtype=grad.dtype).copy_(grad)
