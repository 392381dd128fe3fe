"""Send objects, pytrees of tensors and batches between rank 0 and the other ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from reverie.distributed.collective import SequenceRange, rank, world_size
from reverie.distributed.heartbeat import progress

ALIGNMENT = 16
"""Tensors in a packed message begin at multiples of this many bytes, because
`Tensor.view(dtype)` needs an offset that is a multiple of the element size."""


def broadcast(value: Any, group: Any) -> Any:
    """Return the object of rank 0 on all ranks."""
    values = [value]
    with progress.waiting():
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def gather_objects(value: Any, group: Any) -> list[Any]:
    """Return the objects of all ranks on rank 0, and an empty list on the others."""
    values: list[Any] = [None] * world_size() if rank() == 0 else []
    with progress.waiting():
        dist.gather_object(value, values or None, dst=0, group=group)
    return values


def broadcast_tree(tree: Any, group: Any) -> Any:
    """Return the pytree of rank 0 on all ranks, with tensors in host memory.

    Tensors are sent one by one, not pickled: the state of an agent may be large.
    """
    leaves, spec = pytree.tree_flatten(tree)
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    header = [  # shape and dtype in place of each tensor
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    header, is_tensor, spec = broadcast((header, is_tensor, spec), group)
    received = []
    for index, entry in enumerate(header):
        if not is_tensor[index]:
            received.append(entry)
            continue
        if rank() == 0:
            value = leaves[index].detach().cpu().contiguous()
        else:
            value = torch.empty(entry[0], dtype=entry[1])
        if value.numel():
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0, group=group)
        received.append(value)
    return pytree.tree_unflatten(received, spec)


class BatchLayout:
    """Keys, dtypes and shapes (without the batch axis) of the tensors of a batch.

    Converts between these tensors and one flat tensor of bytes, which is sent as a
    single message.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        self.fields = [(key, x.dtype, x.shape[1:]) for key, x in tensors.items()]

    def nbytes(self, batch_size: int) -> int:
        """Return the bytes of a message with this number of sequences."""
        return sum(
            self._padded_nbytes(dtype, shape, batch_size)
            for _, dtype, shape in self.fields
        )

    def pack(self, tensors: dict[str, Tensor]) -> Tensor:
        """Copy the tensors of a batch into one flat message."""
        first = next(iter(tensors.values()))
        batch_size, device = len(first), first.device
        flat = torch.empty(self.nbytes(batch_size), dtype=torch.uint8, device=device)
        for key, view in self.unpack(flat, batch_size).items():
            view.copy_(tensors[key])
        return flat

    def unpack(self, flat: Tensor, batch_size: int) -> dict[str, Tensor]:
        """Return the tensors of a message as views of its memory."""
        tensors, start = {}, 0
        for key, dtype, shape in self.fields:
            size = batch_size * shape.numel() * dtype.itemsize
            part = flat[start : start + size].view(dtype)
            tensors[key] = part.view(batch_size, *shape)
            start += self._padded_nbytes(dtype, shape, batch_size)
        return tensors

    @staticmethod
    def _padded_nbytes(dtype: torch.dtype, shape: torch.Size, batch_size: int) -> int:
        """Return the bytes of a tensor, rounded up to a multiple of `ALIGNMENT`."""
        size = batch_size * shape.numel() * dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def scatter_batch(
    tensors: dict[str, Tensor], ranges: list[SequenceRange]
) -> dict[str, Tensor]:
    """On rank 0: send each other rank its part of the batch; return rank 0's part."""
    layout, requests = BatchLayout(tensors), []
    for other in range(1, len(ranges)):
        part = slice(ranges[other].start, ranges[other].stop)
        message = layout.pack({key: x[part] for key, x in tensors.items()})
        # keep a reference to the message until it is sent
        requests.append((message, dist.isend(message, other)))
    for _, request in requests:
        assert request is not None
        with progress.waiting():
            request.wait()
    return {key: x[: ranges[0].stop] for key, x in tensors.items()}


def receive_batch(
    layout: BatchLayout, local: SequenceRange, device: torch.device
) -> dict[str, Tensor]:
    """On other ranks: receive the part of the batch that `scatter_batch` sent."""
    flat = torch.empty(layout.nbytes(local.size), dtype=torch.uint8, device=device)
    with progress.waiting():
        dist.recv(flat, 0)
    return layout.unpack(flat, local.size)


def gather_batch(
    tensors: dict[str, Tensor], ranges: list[SequenceRange]
) -> dict[str, Tensor]:
    """Concatenate the tensors of all ranks on rank 0; return {} on the other ranks."""
    layout = BatchLayout(tensors)
    if rank() > 0:
        message = layout.pack(tensors)
        with progress.waiting():
            dist.send(message, 0)
        return {}
    parts = [tensors]
    device = next(iter(tensors.values())).device
    for other in range(1, len(ranges)):
        flat = torch.empty(
            layout.nbytes(ranges[other].size), dtype=torch.uint8, device=device
        )
        with progress.waiting():
            dist.recv(flat, other)
        parts.append(layout.unpack(flat, ranges[other].size))
    return {key: torch.cat([part[key] for part in parts]) for key in tensors}
