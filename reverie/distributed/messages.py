"""Messages between rank 0 and the other ranks: objects, trees of tensors, batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from reverie.distributed.collective import SequenceRange, rank, world_size
from reverie.distributed.heartbeat import progress

ALIGNMENT = 16
"""Tensors in a packed message begin at multiples of this many bytes."""


def broadcast(value: Any, group: Any) -> Any:
    """Return the object of rank 0 on all ranks."""
    box = [value]
    with progress.waiting():
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def gather_objects(value: Any, group: Any) -> list[Any]:
    """Return the objects of all ranks on rank 0, and an empty list on the others."""
    values: list[Any] = [None] * world_size() if rank() == 0 else []
    with progress.waiting():
        dist.gather_object(value, values or None, dst=0, group=group)
    return values


def broadcast_tree(tree: Any, group: Any) -> Any:
    """Return the tree of rank 0 on all ranks, with tensors in host memory.

    Tensors are sent one by one, not pickled: the state of an agent may be large.
    """
    leaves, spec = pytree.tree_flatten(tree)
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    header = [  # shape and dtype of tensors; other leaves as they are
        (leaf.shape, leaf.dtype) if sent_alone else leaf
        for leaf, sent_alone in zip(leaves, is_tensor, strict=True)
    ]
    header, is_tensor, spec = broadcast((header, is_tensor, spec), group)
    received = []
    for index, (leaf, sent_alone) in enumerate(zip(header, is_tensor, strict=True)):
        if not sent_alone:
            received.append(leaf)
            continue
        if rank() == 0:
            value = leaves[index].detach().cpu().contiguous()
        else:
            value = torch.empty(leaf[0], dtype=leaf[1])
        if value.numel():
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0, group=group)
        received.append(value)
    return pytree.tree_unflatten(received, spec)


class Layout:
    """Keys, dtypes and shapes (without the first axis) of the tensors of a message."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.fields = [(key, x.dtype, x.shape[1:]) for key, x in tensors.items()]

    def nbytes(self, length: int) -> int:
        """Return the size of a message whose tensors have this length."""
        return sum(
            self._padded(dtype, shape, length) for _, dtype, shape in self.fields
        )

    def pack(self, tensors: dict[str, Tensor]) -> Tensor:
        """Copy tensors into one flat message."""
        first = next(iter(tensors.values()))
        length = len(first)
        flat = torch.empty(self.nbytes(length), dtype=torch.uint8, device=first.device)
        for key, view in self.unpack(flat, length).items():
            view.copy_(tensors[key])
        return flat

    def unpack(self, flat: Tensor, length: int) -> dict[str, Tensor]:
        """Return the tensors of a message; they share its memory."""
        tensors, start = {}, 0
        for key, dtype, shape in self.fields:
            size = length * shape.numel() * dtype.itemsize
            part = flat[start : start + size].view(dtype)
            tensors[key] = part.view(length, *shape)
            start += self._padded(dtype, shape, length)
        return tensors

    @staticmethod
    def _padded(dtype: torch.dtype, shape: torch.Size, length: int) -> int:
        size = length * shape.numel() * dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def scatter_batch(
    tensors: dict[str, Tensor], ranges: list[SequenceRange]
) -> dict[str, Tensor]:
    """On rank 0: send each other rank its part of the batch; return rank 0's part."""
    layout, requests = Layout(tensors), []
    for other in range(1, len(ranges)):
        part = slice(ranges[other].start, ranges[other].stop)
        message = layout.pack({key: x[part] for key, x in tensors.items()})
        requests.append((message, dist.isend(message, other)))
    for _, request in requests:
        assert request is not None
        with progress.waiting():
            request.wait()
    return {key: x[: ranges[0].stop] for key, x in tensors.items()}


def receive_batch(
    layout: Layout, own: SequenceRange, device: torch.device
) -> dict[str, Tensor]:
    """Return the part of this rank, which rank 0 sent by `scatter_batch`."""
    flat = torch.empty(layout.nbytes(own.size), dtype=torch.uint8, device=device)
    with progress.waiting():
        dist.recv(flat, 0)
    return layout.unpack(flat, own.size)


def gather_to_main(
    tensors: dict[str, Tensor], ranges: list[SequenceRange]
) -> dict[str, Tensor]:
    """Concatenate the tensors of all ranks on rank 0; return {} on the other ranks."""
    layout = Layout(tensors)
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
