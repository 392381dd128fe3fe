"""Reusable host buffers for asynchronous copies to and from the device.

A `StagingBuffer` holds all arrays of a batch in one block of (pinned) memory, so that a
single copy transfers them. `StagingPool` reuses a few buffers. `AsyncWriteback` copies
tensors from the device to the host and passes completed copies to callbacks. The host
waits for the device only if it is `MAX_AHEAD` batches ahead, which bounds the memory
and the delay of write-backs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.api import Batch
from reverie.spaces import Arrays

MAX_AHEAD = 4
"""Number of batches that the host may be ahead of the device."""

ALIGN = 64
"""Alignment of the arrays in a staging buffer, in bytes."""


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class PackedBatch(dict[str, Any]):
    """A batch whose tensors are views of one block of memory."""

    def __init__(self, memory: Tensor, views: Batch) -> None:
        super().__init__(views)
        self.memory = memory
        self.gather_args: tuple[Tensor, Batch] | None = None
        """If the replay has a copy on the device (`DeviceCopy`): numbers of the rows to
        gather from it, and the output tensors."""


class StagingBuffer:
    """Arrays in one block of host memory, pinned for a CUDA device.

    The arrays have the keys, shapes and types of those in `like`.
    """

    def __init__(self, like: Arrays, pinned: bool) -> None:
        self._layout: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        size = 0
        for key, value in like.items():
            dtype = torch_dtype(value.dtype)
            self._layout[key] = (size, value.nbytes, dtype, value.shape)
            size += -(-value.nbytes // ALIGN) * ALIGN
        self.pinned = pinned
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.tensors = self.views(self.memory)
        self.arrays: Arrays = {k: view.numpy() for k, view in self.tensors.items()}

    def views(self, memory: Tensor) -> Batch:
        """Return the arrays as views of `memory`, which has the same layout."""
        return {
            key: memory[start : start + nbytes].view(dtype).view(shape)
            for key, (start, nbytes, dtype, shape) in self._layout.items()
        }

    def send(self, device: torch.device) -> PackedBatch:
        """Copy to the device; on CUDA, asynchronously on the current stream."""
        memory = torch.empty_like(self.memory, device=device)
        self.copy_to(memory)
        return PackedBatch(memory, self.views(memory))

    def copy_to(self, memory: Tensor) -> None:
        """Copy all arrays to a tensor of the same layout, as `send` does."""
        memory.copy_(self.memory, non_blocking=self.pinned)


class StagingPool:
    """Reuses staging buffers once the device has read them.

    `like` has arrays of the shapes to stage. `depth` is the maximum number of buffers.
    """

    def __init__(
        self, like: Arrays, device: torch.device, depth: int = MAX_AHEAD + 1
    ) -> None:
        self._device = device
        self._like = like
        self._depth = depth
        self._released: deque[tuple[StagingBuffer, Any]] = deque()

    def acquire(self) -> StagingBuffer:
        """Return a buffer to fill; call `release` after starting its copies."""
        event = self._released[0][1] if self._released else None
        is_free = bool(self._released) and (event is None or event.query())
        if len(self._released) < self._depth and not is_free:
            return StagingBuffer(self._like, self._device.type == "cuda")
        if event is not None:
            event.synchronize()
        return self._released.popleft()[0]

    def release(self, buffer: StagingBuffer) -> None:
        """Make a buffer available again once its copies are complete."""
        self._released.append((buffer, record_event(self._device)))


class AsyncWriteback:
    """Copies tensors to the host and passes each completed copy to a callback.

    Callbacks are called in order. `max_pending` is the number of copies that may be in
    flight; with 0, `enqueue` waits for its copy. On a CPU nothing is delayed.
    """

    def __init__(self, device: torch.device, max_pending: int = MAX_AHEAD) -> None:
        self._device = device
        self._max_pending = max_pending
        self._stream = make_stream(device)
        self._pending: deque[tuple[Callable[[Arrays], None], Batch, Any]] = deque()
        self._free_buffers: list[Batch] = []

    def enqueue(
        self, tensors: Mapping[str, Tensor], callback: Callable[[Arrays], None]
    ) -> None:
        """Copy the current values of the tensors; the callback gets them as arrays."""
        if self._stream is None:
            callback({k: v.detach().cpu().numpy() for k, v in tensors.items()})
            return
        # A copy on the device, because the caller may overwrite the tensors.
        copies = {key: value.detach().clone() for key, value in tensors.items()}
        buffer = self._pinned_buffer(copies)
        event = copy_on_stream(copies, buffer, self._stream)
        self._pending.append((callback, buffer, event))
        self.process(self._max_pending)

    def process(self, max_pending: int | None = None) -> None:
        """Call the callbacks of completed copies.

        Wait while more than `max_pending` copies are in flight: 0 waits for all copies,
        None never waits.
        """
        while self._pending:
            callback, buffer, event = self._pending[0]
            if not event.query():
                if max_pending is None or len(self._pending) <= max_pending:
                    return
                event.synchronize()
            self._pending.popleft()
            callback({key: value.numpy() for key, value in buffer.items()})
            self._free_buffers.append(buffer)

    def clear(self) -> None:
        """Discard all copies in flight."""
        for *_, event in self._pending:
            event.synchronize()
        self._pending.clear()

    def _pinned_buffer(self, tensors: Batch) -> Batch:
        """Return pinned memory of the same shapes, reused if possible."""
        shapes = {key: (value.shape, value.dtype) for key, value in tensors.items()}
        for i, buffer in enumerate(self._free_buffers):
            if {k: (v.shape, v.dtype) for k, v in buffer.items()} == shapes:
                return self._free_buffers.pop(i)
        return {
            key: torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
            for key, (shape, dtype) in shapes.items()
        }


def make_stream(device: torch.device) -> Any:
    """Create a CUDA stream for copies; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copy_on_stream(source: Batch, target: Batch, stream: Any) -> Any:
    """Copy on another stream, after the work queued on the current one.

    Returns the event that marks the end of the copies.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for key, value in source.items():
            target[key].copy_(value, non_blocking=True)
            value.record_stream(stream)
        return stream.record_event()


def record_event(device: torch.device) -> Any:
    """Record an event on the current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event()
