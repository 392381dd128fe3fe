"""All-reduce and all-gather over the ranks of a data-parallel run.

Every rank trains on some sequences of the global batch. Code that needs a statistic of
the whole batch calls a function of this file with the tensor of its own sequences:

    mean = all_reduce_with_grad(x.sum(0)) / global_count(len(x))  # batch norm
    negatives = all_gather_with_grad(embed)                       # contrastive losses
    loss = mean_contribution(x)               # the sum over ranks is the global mean

Collectives run only inside `synchronized`, which all ranks enter for an update.
Elsewhere (on one device, in a policy, in the report of rank 0) every function returns
its input, without a copy and without a host sync. So layers and losses call them
unconditionally.

Gradients: the loss of the run is the sum of the losses of all ranks. The backward pass
of `all_reduce_with_grad` and `all_gather_with_grad` adds the gradients of all ranks, as
the gradient of this sum requires.

CUDA graphs: an update can be captured with its collectives if the ranks use NCCL. All
ranks capture in the same call and replay together. If one of them cannot capture, none
of them uses a graph (`agree`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from reverie.api import Metrics
from reverie.distributed.heartbeat import progress


class SequenceRange(NamedTuple):
    """Sequences `start` to `stop` (exclusive) of the `total` ones of a global batch."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class _SyncState:
    """State of a `synchronized` block."""

    def __init__(self) -> None:
        self.sequences: list[SequenceRange] = []  # by rank; empty before `set_batch`


_sync: _SyncState | None = None  # None if collectives are not active

captured_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
"""CUDA graphs that contain collectives. `Group.close` calls their method `reset`,
because NCCL closes a connection only after all graphs that use it are destroyed."""


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if _has_group() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if _has_group() else 1


def split_batch(total: int, ranks: int) -> list[SequenceRange]:
    """Divide a batch among ranks; sizes differ by at most one."""
    small, extra = divmod(total, ranks)
    stops = [small * (i + 1) + min(i + 1, extra) for i in range(ranks)]
    starts = [0, *stops[:-1]]
    return [SequenceRange(a, b, total) for a, b in zip(starts, stops, strict=True)]


@contextmanager
def synchronized(single: bool = False) -> Iterator[None]:
    """Context that all ranks enter together, in which collectives are active.

    With `single`, they are also active in a process group of one rank, so that their
    time can be measured.
    """
    global _sync
    assert _sync is None, "synchronized blocks cannot be nested"
    is_active = _has_group() and (single or world_size() > 1)
    _sync = _SyncState() if is_active else None
    try:
        yield
    finally:
        _sync = None


def set_batch(total: int) -> SequenceRange:
    """Set the number of sequences of the global batch; return those of this rank.

    Called by the batch iterator (feed) for every batch, in a `synchronized` block.
    """
    if _sync is None:
        return SequenceRange(0, total, total)
    _sync.sequences = split_batch(total, world_size())
    return _sync.sequences[rank()]


def local_sequences() -> SequenceRange | None:
    """Return the sequences of this rank; None if this process has the whole batch."""
    return _sync.sequences[rank()] if _sync and _sync.sequences else None


def is_synchronized() -> bool:
    """True in a `synchronized` block with active collectives."""
    return _sync is not None


def can_capture() -> bool:
    """True if a CUDA graph can contain the collectives that are active now."""
    return _sync is None or "nccl" in dist.get_backend_config()


def agree(value: bool) -> bool:
    """True if `value` is True on all ranks; waits for them."""
    if _sync is None:
        return value
    flag = torch.tensor([int(value)])
    with progress.waiting(collective=True):
        dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def global_count(local_count: int) -> int:
    """Return the number of entries on all ranks; `local_count` is that of this rank.

    `local_count` must be a multiple of the number of sequences of this rank, such as
    B * T.
    """
    local = local_sequences()
    if local is None:
        return local_count
    return _per_sequence(local_count, local) * local.total


def mean_contribution(x: Tensor) -> Tensor:
    """Return a scalar whose sum over ranks is the mean of `x` over the global batch.

    `x` has the values of the sequences of this rank, or is a scalar that is identical
    on all ranks, such as a loss computed from gathered tensors.
    """
    local = local_sequences()
    return x.mean() if local is None else x.mean() * (local.size / local.total)


def all_reduce_with_grad(x: Tensor) -> Tensor:
    """Return the elementwise sum over ranks; differentiable."""
    if _sync is None:
        return x
    summed: Tensor = _AllReduce.apply(x)  # type: ignore[no-untyped-call]
    return summed


def all_gather_with_grad(x: Tensor) -> Tensor:
    """Concatenate the tensors of all ranks along the first axis; differentiable.

    The order is that of the global batch. After `set_batch`, the length of the axis
    must be a multiple of the number of sequences of this rank; before, the ranks may
    have any lengths, which are exchanged first.
    """
    if _sync is None:
        return x
    gathered: Tensor = _AllGather.apply(x)  # type: ignore[no-untyped-call]
    return gathered


@torch.no_grad()
def all_gather(x: Tensor) -> Tensor:
    """Same as `all_gather_with_grad`, but not differentiable."""
    if _sync is None:
        return x
    counts = _lengths(x)
    longest = max(counts)
    sent = x.detach().contiguous()
    if len(x) < longest:
        sent = torch.cat([sent, x.new_zeros((longest - len(x), *x.shape[1:]))])
    if x.dtype == torch.bool:
        sent = sent.view(torch.uint8)
    gathered = sent.new_empty((len(counts) * longest, *x.shape[1:]))
    with progress.waiting(collective=True):
        dist.all_gather(list(torch.split(gathered, longest)), sent)
    if min(counts) < longest:
        parts = zip(torch.split(gathered, longest), counts, strict=True)
        gathered = torch.cat([part[:count] for part, count in parts])
    return gathered.view(x.dtype)


@torch.no_grad()
def all_reduce_(x: Tensor) -> None:
    """Replace a tensor by the elementwise sum over ranks."""
    if _sync is None:
        return
    with progress.waiting(collective=True):
        dist.all_reduce(x)


@torch.no_grad()
def all_reduce_coalesced(tensors: list[Tensor]) -> list[Tensor]:
    """Return the elementwise sums of several tensors over ranks, in one all-reduce."""
    if _sync is None:
        return tensors
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    flat = torch.cat([x.reshape(-1).to(dtype) for x in tensors])
    all_reduce_(flat)
    parts = zip(torch.split(flat, [x.numel() for x in tensors]), tensors, strict=True)
    return [part.view(x.shape).to(x.dtype) for part, x in parts]


@torch.no_grad()
def average_metrics(metrics: Metrics) -> Metrics:
    """Average the scalar tensors over ranks, weighted by the number of sequences.

    A mean over the sequences of a rank becomes the mean over the global batch. Metrics
    that are not means (minimum, maximum, standard deviation) must already be identical
    on all ranks: compute them from gathered tensors.
    """
    local = local_sequences()
    if local is None:
        return metrics
    # group by dtype, because one kernel can stack many tensors of the same dtype
    names: dict[torch.dtype, list[str]] = {}
    for key, x in metrics.items():
        if isinstance(x, Tensor) and not x.ndim:
            names.setdefault(x.dtype, []).append(key)
    if not names:
        return metrics
    values = [
        torch.stack([metrics[key] for key in keys]).double() for keys in names.values()
    ]
    total = torch.cat(values) * (local.size / local.total)
    all_reduce_(total)
    parts = torch.split(total, [len(keys) for keys in names.values()])
    averages = {
        key: x
        for part, (dtype, keys) in zip(parts, names.items(), strict=True)
        for key, x in zip(keys, part.to(dtype).unbind(), strict=True)
    }
    return {**metrics, **averages}


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _per_sequence(length: int, local: SequenceRange) -> int:
    """Return the number of entries per sequence, such as the number of time steps."""
    per_sequence, rest = divmod(length, local.size)
    assert not rest, f"{length} is not a multiple of {local.size} sequences"
    return per_sequence


def _lengths(x: Tensor) -> list[int]:
    """Return the length of the first axis of `x` on each rank."""
    assert _sync is not None
    if _sync.sequences:
        per_sequence = _per_sequence(len(x), _sync.sequences[rank()])
        return [per_sequence * each.size for each in _sync.sequences]
    count = torch.tensor([len(x)])
    counts = [torch.empty_like(count) for _ in range(world_size())]
    with progress.waiting(collective=True):
        dist.all_gather(counts, count)
    return [int(count) for count in counts]


class _AllReduce(torch.autograd.Function):
    """Sum over ranks; in the backward pass, the sum of the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_reduce(grad)


class _AllGather(torch.autograd.Function):
    """Concatenation over ranks.

    In the backward pass, gradients are summed over ranks, and each rank gets those of
    its own entries.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        counts = _lengths(x)
        ctx.start, ctx.count = sum(counts[: rank()]), len(x)
        return all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_reduce(grad)[ctx.start : ctx.start + ctx.count]


def _all_reduce(x: Tensor) -> Tensor:
    """Same as `all_reduce_with_grad`, but not differentiable."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    all_reduce_(total)
    return total
