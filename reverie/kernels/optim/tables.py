"""Many tensors of different sizes as one piece of work for a kernel.

Each program works on one chunk of one tensor, which it finds in tables of addresses:
parameters, what an optimizer remembers of them, their half-precision copies, and the
gradients of this update.
"""

from __future__ import annotations

import itertools
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def store_copy(address, kind, at, x, mask):
    """Write a half-precision copy, if there is to be one."""
    if kind == 1:
        to_bfloat = address.to(tl.pointer_type(tl.bfloat16)) + at
        tl.store(to_bfloat, x.to(tl.bfloat16), mask)
    elif kind == 2:
        to_half = address.to(tl.pointer_type(tl.float16)) + at
        tl.store(to_half, x.to(tl.float16), mask)


class Tables:
    """Where to find everything about some parameters.

    `leaves` are what the loss is differentiated by: the parameters themselves, or
    copies of them that are to follow. Gradients are of their dtype, unless all are said
    to be `full` precision.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        leaves: list[Tensor],
        mu: list[Tensor],
        nu: list[Tensor],
        full: bool = False,
    ):
        self.tensors, device = tensors, tensors[0].device
        chunks, firsts = [], [0]
        for i, tensor in enumerate(tensors):
            chunks += [(i, start) for start in range(0, tensor.numel(), CHUNK)]
            firsts.append(len(chunks))
        copies = [
            (leaf.data_ptr(), KINDS[leaf.dtype]) if leaf is not tensor else (0, FLOAT)
            for leaf, tensor in zip(leaves, tensors, strict=True)
        ]

        def table(rows: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(rows, dtype=dtype, device=device)

        self.chunks, self.firsts = table(chunks), table(firsts)
        self.most = max(end - first for first, end in itertools.pairwise(firsts))
        self.sizes = table([tensor.numel() for tensor in tensors])
        state = zip(tensors, mu, nu, copies, strict=True)
        self.fixed = table(
            [(p.data_ptr(), m.data_ptr(), n.data_ptr(), c[0]) for p, m, n, c in state]
        )
        kinds = [KINDS[torch.float32 if full else x.dtype] for x in leaves]
        self.kinds = table(
            [(kind, copy[1]) for kind, copy in zip(kinds, copies, strict=True)]
        )
        self.sums = torch.zeros(len(chunks), 2, device=device)
        self.grads = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        self._spare: Tensor | None = None
        self._recorded: list[tuple[Tensor, list[Tensor]]] = []

    @property
    def grid(self) -> tuple[int]:
        return (len(self.chunks),)

    def measure(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Point at these gradients; the norm of each of them, and of each parameter."""
        self._point_at(grads)
        _measure[self.grid](
            *(self.chunks, self.fixed, self.grads, self.kinds, self.sizes, self.sums),
            CHUNK,
        )
        return self.gathered()

    def gathered(self) -> tuple[Tensor, Tensor]:
        """The roots of the two sums that a kernel left for each chunk, by tensor."""
        count = len(self.tensors)
        norms = torch.empty(2, count, device=self.sums.device)
        _gather[(count,)](self.sums, self.firsts, norms, count, self.most, 256)
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
            self.grads.device.type == "cuda"
            and torch.cuda.is_current_stream_capturing()
        ):
            staging, self._spare = self._spare, None
            assert staging is not None, "an update must come before a recording"
            self._recorded.append((staging, self._held))
        else:
            staging = self._staging()
            self._spare = self._spare if self._spare is not None else self._staging()
        self.grads.copy_(staging.copy_(where), non_blocking=True)

    def _staging(self) -> Tensor:
        pinned = self.grads.device.type == "cuda"
        return torch.empty(len(self.tensors), dtype=torch.int64, pin_memory=pinned)


def _laid_out_as(grad: Tensor, tensor: Tensor) -> Tensor:
    """The gradient in the memory order of its parameter."""
    if grad.stride() == tensor.stride():
        return grad
    return torch.empty_like(tensor, dtype=grad.dtype).copy_(grad)
