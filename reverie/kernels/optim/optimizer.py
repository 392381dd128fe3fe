"""The optimizer in two passes over all parameters.

The plain optimizer (`nets/optim`) reads and writes every tensor about fifteen times.
Here one kernel computes the norms of all gradients and parameters, and another one
clips, updates moments and parameters, and writes the low-precision weights. Each
program of a kernel handles one chunk of one tensor. It reads the addresses of its
parameters, moments, low-precision weights and gradients from `AddressTables`.

In a data-parallel update, another kernel first copies all gradients to one float32
buffer, which is added up over all ranks in one all-reduce.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from reverie.distributed.collective import all_reduce_, is_synchronized
from reverie.kernels.launch import jit
from reverie.kernels.optim.low_precision_weights import LowPrecisionWeights
from reverie.kernels.optim.step import prepare_step, total_norms
from reverie.nets.optim.laprop import LaProp
from reverie.nets.optim.optimizer import Optimizer, Scalar, Step

CHUNK = 4096
"""Elements per program."""

COLUMNS = 5
"""Addresses per tensor: parameter, mu, nu, low-precision weight, nu_max (AMSGrad)."""

ALIGNMENT = 32
"""Gradients in the buffer of a data-parallel update begin at multiples of this."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers that encode dtypes in kernel arguments."""


@jit
def load_as_float32(address, dtype, offsets, mask):
    """Load values whose dtype is one of the `DTYPES`."""
    if dtype == 0:
        x = tl.load(address.to(tl.pointer_type(tl.float32)) + offsets, mask, 0.0)
    elif dtype == 1:
        x = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + offsets, mask, 0.0).to(
            tl.float32
        )
    else:
        x = tl.load(address.to(tl.pointer_type(tl.float16)) + offsets, mask, 0.0).to(
            tl.float32
        )
    return x


@jit
def store_low_precision(address, dtype, offsets, x, mask):
    """Store a bfloat16 or float16 copy; for float32, which has no copy, do nothing."""
    if dtype == 1:
        to_bfloat = address.to(tl.pointer_type(tl.bfloat16)) + offsets
        tl.store(to_bfloat, x.to(tl.bfloat16), mask)
    elif dtype == 2:
        to_half = address.to(tl.pointer_type(tl.float16)) + offsets
        tl.store(to_half, x.to(tl.float16), mask)


@jit
def _load_grad_chunk(chunks, grads, dtypes, sizes, CHUNK: tl.constexpr):
    """Return the tensor, offsets, mask and gradient of the chunk of this program."""
    chunk = tl.program_id(0)
    tensor, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    offsets = start + tl.arange(0, CHUNK)
    mask = offsets < tl.load(sizes + tensor)
    grad = load_as_float32(
        tl.load(grads + tensor), tl.load(dtypes + 2 * tensor), offsets, mask
    )
    return tensor, offsets, mask, grad


@jit
def _copy_to_flat(
    chunks, grads, dtypes, sizes, starts, flat, CHUNK: tl.constexpr
):  # fmt: skip
    """Copy one chunk of one gradient to the flat buffer, as float32."""
    tensor, offsets, mask, grad = _load_grad_chunk(chunks, grads, dtypes, sizes, CHUNK)
    tl.store(flat + tl.load(starts + tensor) + offsets, grad, mask)


@jit
def _sum_squares(
    chunks, addresses, grads, dtypes, sizes, sums,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of gradient and parameter over one chunk; store both sums."""
    tensor, offsets, mask, grad = _load_grad_chunk(chunks, grads, dtypes, sizes, CHUNK)
    address = tl.load(addresses + COLUMNS * tensor)
    parameter = tl.load(address.to(tl.pointer_type(tl.float32)) + offsets, mask, 0.0)
    chunk = tl.program_id(0)
    tl.store(sums + 2 * chunk, tl.sum(grad * grad))
    tl.store(sums + 2 * chunk + 1, tl.sum(parameter * parameter))


@jit
def _norms_from_sums(
    sums, firsts, norms, tensors, MAX_CHUNKS: tl.constexpr, WIDTH: tl.constexpr
):
    """Store the norms of gradient and parameter of one tensor, from `_sum_squares`.

    `firsts` has the index of the first chunk of each tensor.
    """
    tensor = tl.program_id(0)
    first, end = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    sum0 = tl.zeros((WIDTH,), tl.float32)
    sum1 = tl.zeros((WIDTH,), tl.float32)
    for base in range(0, MAX_CHUNKS, WIDTH):
        offsets = first + base + tl.arange(0, WIDTH)
        sum0 += tl.load(sums + 2 * offsets, offsets < end, 0.0)
        sum1 += tl.load(sums + 2 * offsets + 1, offsets < end, 0.0)
    tl.store(norms + tensor, tl.sqrt(tl.sum(sum0)))
    tl.store(norms + tensors + tensor, tl.sqrt(tl.sum(sum1)))


class AddressTables:
    """Addresses of parameters, their moments, low-precision weights and gradients.

    `leaves` are the tensors that get gradients: the parameters or their low-precision
    copies. Gradients have the dtype of the leaves, unless `float32_grads` is set.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        leaves: list[Tensor],
        moments: list[list[Tensor]],
        float32_grads: bool = False,
    ):
        self.tensors, device = tensors, tensors[0].device
        chunks = []  # per chunk: index of its tensor, and its first element
        firsts = [0]  # per tensor: index of its first chunk
        for i, tensor in enumerate(tensors):
            chunks += [(i, start) for start in range(0, tensor.numel(), CHUNK)]
            firsts.append(len(chunks))

        def table(rows: Any) -> Tensor:
            return torch.tensor(rows, dtype=torch.int64, device=device)

        self.chunks, self.firsts = table(chunks), table(firsts)
        self.max_chunks = max(end - first for first, end in itertools.pairwise(firsts))
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
        self.sums = torch.zeros(len(chunks), 2, device=device)  # of squares, per chunk
        self.grad_addresses = table([0] * len(tensors))
        self.flat: FlatGrads | None = None
        self._spare_buffer: Tensor | None = None
        # host buffers and gradients of captured graphs, which must not be freed
        self._captured: list[tuple[Tensor, list[Tensor]]] = []

    @property
    def grid(self) -> tuple[int]:
        return (len(self.chunks),)

    def grad_tables(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tables with the addresses and dtypes of these gradients."""
        if self.flat is not None and grads is self.flat.grads:
            return self.flat.addresses, self.flat.dtypes
        return self.grad_addresses, self.dtypes

    def add_up(self, loss: Scalar, grads: list[Tensor]) -> tuple[Scalar, list[Tensor]]:
        """Return the sums of loss and gradients over all ranks."""
        if self.flat is None:  # in the first update, which is not captured
            self.flat = FlatGrads(self.tensors, self.dtypes)
        flat = self.flat
        self._store_addresses(grads)
        _copy_to_flat[self.grid](
            *(self.chunks, self.grad_addresses, self.dtypes, self.sizes),
            *(flat.starts, flat.buffer, CHUNK),
        )
        flat.buffer[0].copy_(loss)
        all_reduce_(flat.buffer)
        return flat.buffer[0].clone(), flat.grads

    def norms(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the norms of each gradient and of each parameter.

        Also writes the addresses of the gradients to their table, which the update
        kernel reads later.
        """
        grad_addresses, dtypes = self.grad_tables(grads)
        if grad_addresses is self.grad_addresses:
            self._store_addresses(grads)
        _sum_squares[self.grid](
            *(self.chunks, self.addresses, grad_addresses, dtypes),
            *(self.sizes, self.sums, COLUMNS, CHUNK),
        )
        return self.norms_from_sums()

    def norms_from_sums(self) -> tuple[Tensor, Tensor]:
        """Return two norms per tensor, from the sums of squares stored per chunk."""
        count = len(self.tensors)
        norms = torch.empty(2, count, device=self.sums.device)
        _norms_from_sums[(count,)](
            self.sums, self.firsts, norms, count, self.max_chunks, 256
        )
        return norms[0], norms[1]

    def _store_addresses(self, grads: list[Tensor]) -> None:
        """Copy the addresses of this update's gradients to the device.

        A captured CUDA graph repeats this copy in every replay, so the pinned buffer it
        reads from is never reused. Pinned memory cannot be allocated during capture, so
        the buffer is allocated before (`_spare_buffer`).
        """
        self._grads = [
            _match_strides(grad, tensor)
            for grad, tensor in zip(grads, self.tensors, strict=True)
        ]
        addresses = torch.tensor([grad.data_ptr() for grad in self._grads])
        if (
            self.grad_addresses.device.type == "cuda"
            and torch.cuda.is_current_stream_capturing()
        ):
            buffer, self._spare_buffer = self._spare_buffer, None
            assert buffer is not None, "run an update before capturing one"
            self._captured.append((buffer, self._grads))
        else:
            buffer = self._host_buffer()
            if self._spare_buffer is None:
                self._spare_buffer = self._host_buffer()
        self.grad_addresses.copy_(buffer.copy_(addresses), non_blocking=True)

    def _host_buffer(self) -> Tensor:
        pinned = self.grad_addresses.device.type == "cuda"
        return torch.empty(len(self.tensors), dtype=torch.int64, pin_memory=pinned)


class FlatGrads:
    """One float32 buffer for the loss and all gradients of an optimizer.

    The first element is the loss. `grads` are views of the buffer with the shapes and
    strides of the parameters.
    """

    def __init__(self, tensors: list[Tensor], dtypes: Tensor):
        starts, end = [], ALIGNMENT
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT  # rounded up
        device = tensors[0].device
        self.buffer = torch.zeros(end, device=device)
        self.grads = [
            self.buffer.as_strided(tensor.shape, tensor.stride(), start)
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        self.starts = torch.tensor(starts, device=device)
        self.addresses = torch.tensor([x.data_ptr() for x in self.grads], device=device)
        self.dtypes = dtypes.clone()
        self.dtypes[:, 0] = DTYPES[torch.float32]


def _match_strides(grad: Tensor, tensor: Tensor) -> Tensor:
    """Return the gradient with the strides of its parameter."""
    if grad.stride() == tensor.stride():
        return grad
    return torch.empty_like(tensor, dtype=grad.dtype).copy_(grad)


@jit
def _update(
    chunks, addresses, grads, dtypes, sizes, clips, decays, scalars, sums, beta1, beta2,
    eps,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Clip the gradient, update moments and parameters of one chunk of one tensor.

    The formulas are those of the `update` methods in `nets/optim`. For LaProp, store
    the sums of squares of the parameters and of their changes in `sums`.
    """
    chunk = tl.program_id(0)
    tensor, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    offsets = start + tl.arange(0, CHUNK)
    mask = offsets < tl.load(sizes + tensor)
    gate, rate = tl.load(scalars), tl.load(scalars + 1)  # gate: 0 to skip the update
    mu_correction, nu_correction = tl.load(scalars + 2), tl.load(scalars + 3)

    grad = load_as_float32(
        tl.load(grads + tensor), tl.load(dtypes + 2 * tensor), offsets, mask
    )
    grad = tl.where(gate > 0, grad, 0.0) * tl.load(clips + tensor)
    row = addresses + COLUMNS * tensor
    parameters = tl.load(row).to(tl.pointer_type(tl.float32)) + offsets
    mus = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + offsets
    nus = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + offsets

    # Do not reorder loads and stores: the compiler's choice of fused multiply-adds
    # depends on their order, and with it the last bits of the result.
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
    else:  # AMSGrad
        nu_maxs = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + offsets
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
    store_low_precision(copy, dtype, offsets, parameter, mask)
    if RULE == "laprop":
        tl.store(sums + 2 * chunk, tl.sum(change * change))
        tl.store(sums + 2 * chunk + 1, tl.sum(parameter * parameter))


class FusedOptimizer(Optimizer):
    """`Optimizer` with fused kernels; other arguments are those of `Optimizer`.

    Gradients have the dtype of the weights that the layers compute with. With
    `float32_grads` they are converted to float32, so that they can be accumulated.
    """

    def __init__(
        self,
        *args: Any,
        low_precision: LowPrecisionWeights | None = None,
        float32_grads: bool = False,
        **options: Any,
    ):
        super().__init__(*args, **options)
        if low_precision:
            self.leaves = [low_precision.leaf(tensor) for tensor in self.tensors]
        self.float32_grads = self.scaling or float32_grads
        self._tables = AddressTables(
            self.tensors, self.leaves, list(self.moments.values()), self.float32_grads
        )
        decay = self.rule.weight_decay()
        decays = [decay * (name in self.decayed) for name in self.names]
        self._decays = torch.tensor(decays, device=self.tensors[0].device)

    def gradients(self, loss: Scalar) -> list[Tensor]:
        grads = super().gradients(loss)
        return [grad.float() for grad in grads] if self.float32_grads else grads

    def _add_up(self, loss: Scalar, grads: list[Tensor]) -> tuple[Scalar, list[Tensor]]:
        if not is_synchronized():
            return loss, grads
        return self._tables.add_up(loss, grads)

    def _norms(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self._tables.norms(grads)

    def _prepare(self, loss: Scalar, norms: Tensor, weight_norms: Tensor) -> Step:
        self._packed: Tensor | None = None  # scalars of the update in one tensor
        if self.scaling or not isinstance(self.rule, LaProp):
            return super()._prepare(loss, norms, weight_norms)
        step, self._packed = prepare_step(self, loss, norms, weight_norms)
        return step

    def _update(self, grads: list[Tensor], step: Step) -> tuple[Scalar, Scalar] | None:
        config, tables, scalars = self.config, self._tables, self._packed
        if scalars is None:
            scalars = torch.stack([step.gate, *step.scalars])
        nesterov = getattr(config, "nesterov", False)
        _update[tables.grid](
            *(tables.chunks, tables.addresses, *tables.grad_tables(grads)),
            *(tables.sizes, step.clip, self._decays, scalars),
            *(tables.sums, config.beta1, config.beta2, config.eps),
            *(self.rule.NAME, nesterov, COLUMNS, CHUNK),
        )
        return total_norms(tables.sums) if self.rule.NAME == "laprop" else None
