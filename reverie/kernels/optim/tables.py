"""Tables of addresses, with which one kernel handles many tensors of different sizes.

Each program of a kernel handles one chunk of one tensor and finds its data in tables:
parameters, moments, low-precision weights, and the gradients of this update.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from reverie.kernels.jit import jit

CHUNK = 4096
"""Elements per program."""

COLUMNS = 5
"""Addresses per tensor: parameter, mu, nu, low-precision weight, nu_max."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How kernels are passed the dtype of a tensor."""


@jit
def load_as_float32(address, dtype, at, mask):
    """Load values of any of the `DTYPES`."""
    if dtype == 0:
        x = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask, 0.0)
    elif dtype == 1:
        x = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask, 0.0).to(
            tl.float32
        )
    else:
        x = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask, 0.0).to(
            tl.float32
        )
    return x


@jit
def store_low_precision(address, dtype, at, x, mask):
    """Store a bfloat16 or float16 copy; nothing for float32, which has no copy."""
    if dtype == 1:
        to_bfloat = address.to(tl.pointer_type(tl.bfloat16)) + at
        tl.store(to_bfloat, x.to(tl.bfloat16), mask)
    elif dtype == 2:
        to_half = address.to(tl.pointer_type(tl.float16)) + at
        tl.store(to_half, x.to(tl.float16), mask)


@jit
def _sum_squares(
    chunks,
    addresses,
    grads,
    dtypes,
    sizes,
    sums,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum the squares of gradient and parameter over one chunk."""
    chunk = tl.program_id(0)
    tensor, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    at = start + tl.arange(0, CHUNK)
    mask = at < tl.load(sizes + tensor)
    grad = load_as_float32(
        tl.load(grads + tensor), tl.load(dtypes + 2 * tensor), at, mask
    )
    address = tl.load(addresses + COLUMNS * tensor)
    parameter = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask, 0.0)
    tl.store(sums + 2 * chunk, tl.sum(grad * grad))
    tl.store(sums + 2 * chunk + 1, tl.sum(parameter * parameter))


@jit
def _root_of_sums(
    sums, firsts, norms, tensors, MOST: tl.constexpr, WIDTH: tl.constexpr
):
    """Add up both sums of the chunks of one tensor, in order; store the roots."""
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


class Tables:
    """Addresses of parameters, their moments, low-precision weights and gradients.

    `leaves` are the tensors that get gradients: the parameters themselves or their
    low-precision copies. Gradients have their dtype, unless `float32_grads` is set.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        leaves: list[Tensor],
        moments: list[list[Tensor]],
        float32_grads: bool = False,
    ):
        self.tensors, device = tensors, tensors[0].device
        chunks, firsts = [], [0]
        for i, tensor in enumerate(tensors):
            chunks += [(i, start) for start in range(0, tensor.numel(), CHUNK)]
            firsts.append(len(chunks))

        def table(rows: Any) -> Tensor:
            return torch.tensor(rows, dtype=torch.int64, device=device)

        self.chunks, self.firsts = table(chunks), table(firsts)
        self.most_chunks = max(end - first for first, end in itertools.pairwise(firsts))
        self.sizes = table([tensor.numel() for tensor in tensors])
        addresses, dtypes = [], []
        for i, (tensor, leaf) in enumerate(zip(tensors, leaves, strict=True)):
            mu, nu, *others = (moment[i].data_ptr() for moment in moments)
            copy = leaf.data_ptr() if leaf is not tensor else 0
            addresses.append((tensor.data_ptr(), mu, nu, copy, *(others or (0,))))
            copy_dtype = leaf.dtype if leaf is not tensor else torch.float32
            grad_dtype = torch.float32 if float32_grads else leaf.dtype
            dtypes.append((DTYPES[grad_dtype], DTYPES[copy_dtype]))
        self.addresses, self.dtypes = table(addresses), table(dtypes)
        self.sums = torch.zeros(len(chunks), 2, device=device)
        self.grads = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        self._spare_buffer: Tensor | None = None
        self._captured: list[tuple[Tensor, list[Tensor]]] = []

    @property
    def grid(self) -> tuple[int]:
        return (len(self.chunks),)

    def norms(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Norms of each gradient and each parameter; stores the gradient addresses."""
        self._store_addresses(grads)
        _sum_squares[self.grid](
            self.chunks,
            self.addresses,
            self.grads,
            self.dtypes,
            self.sizes,
            self.sums,
            COLUMNS,
            CHUNK,
        )
        return self.norms_from_sums()

    def norms_from_sums(self) -> tuple[Tensor, Tensor]:
        """Roots of both sums of squares that a kernel stored per chunk, by tensor."""
        count = len(self.tensors)
        norms = torch.empty(2, count, device=self.sums.device)
        _root_of_sums[(count,)](
            self.sums, self.firsts, norms, count, self.most_chunks, 256
        )
        return norms[0], norms[1]

    def _store_addresses(self, grads: list[Tensor]) -> None:
        """Copy the addresses of this update's gradients to the device.

        During CUDA graph capture the copy becomes part of the graph, so its pinned
        source buffer is then kept unchanged.
        """
        self._grads = [
            _with_strides_of(tensor, grad)
            for grad, tensor in zip(grads, self.tensors, strict=True)
        ]
        addresses = torch.tensor([grad.data_ptr() for grad in self._grads])
        if (
            self.grads.device.type == "cuda"
            and torch.cuda.is_current_stream_capturing()
        ):
            buffer, self._spare_buffer = self._spare_buffer, None
            assert buffer is not None, "run an update before capturing one"
            self._captured.append((buffer, self._grads))
        else:
            buffer = self._host_buffer()
            if self._spare_buffer is None:
                self._spare_buffer = self._host_buffer()
        self.grads.copy_(buffer.copy_(addresses), non_blocking=True)

    def _host_buffer(self) -> Tensor:
        pinned = self.grads.device.type == "cuda"
        return torch.empty(len(self.tensors), dtype=torch.int64, pin_memory=pinned)


def _with_strides_of(tensor: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the memory order of its parameter."""
    if grad.stride() == tensor.stride():
        return grad
    return torch.empty_like(tensor, dtype=grad.dtype).copy_(grad)
