"""Memory between host and device, used again and again without waiting.

A `Parcel` holds all arrays of one batch side by side, so that one copy moves them all.
`Staging` takes a few parcels in turn, and `Mailbox` brings tensors back from the device
and hands them over when they have arrived. Nothing here waits for the device unless
the host has run several batches ahead of it: that bound is what keeps memory and
staleness small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.api import Batch

AHEAD = 4
"""Batches that the host may be ahead of the device."""

ALIGN = 64
"""Bytes; every array begins at a multiple of this."""

Arrays = dict[str, np.ndarray]


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Packed(dict[str, Any]):
    """A batch whose tensors are views of one piece of memory."""

    def __init__(self, memory: Tensor, views: Batch) -> None:
        super().__init__(views)
        self.memory = memory
        self.ring: tuple[Tensor, Batch] | None = None
        """Where the rest of it comes from: rows of a ring, and where they go."""


class Parcel:
    """Arrays side by side in one piece of host memory, pinned for a CUDA device."""

    def __init__(self, like: Arrays, pinned: bool) -> None:
        self._slots: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        size = 0
        for key, value in like.items():
            slot = (size, value.nbytes, torch_dtype(value.dtype), value.shape)
            self._slots[key] = slot
            size += -(-value.nbytes // ALIGN) * ALIGN
        self.pinned = pinned
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.tensors = self.views(self.memory)
        self.arrays: Arrays = {k: view.numpy() for k, view in self.tensors.items()}

    def views(self, memory: Tensor) -> Batch:
        """The arrays of a copy of this parcel, as tensors."""
        return {
            key: memory[start : start + count].view(dtype).view(shape)
            for key, (start, count, dtype, shape) in self._slots.items()
        }

    def send(self, device: torch.device) -> Packed:
        """A copy on the device; on CUDA it is made later, by the current stream."""
        memory = torch.empty_like(self.memory, device=device)
        self.copy_to(memory)
        return Packed(memory, self.views(memory))

    def copy_to(self, memory: Tensor) -> None:
        memory.copy_(self.memory, non_blocking=self.pinned)


class Staging:
    """A few parcels in turn; each is free again once the device has read it."""

    def __init__(
        self, like: Arrays, device: torch.device, depth: int = AHEAD + 1
    ) -> None:
        self._device = device
        self._like = like
        self._depth = depth
        self._sent: deque[tuple[Parcel, Any]] = deque()

    def take(self) -> Parcel:
        """A parcel to fill; `done` must follow once its copies are under way."""
        if len(self._sent) < self._depth and not (
            self._sent and _has_passed(self._sent[0][1])
        ):
            return Parcel(self._like, self._device.type == "cuda")
        parcel, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        return parcel

    def done(self, parcel: Parcel) -> None:
        self._sent.append((parcel, record_event(self._device)))


class Mailbox:
    """Brings tensors back to the host and hands them over in order, a little later.

    On a CPU at once. `lag` is how many letters may be under way; with 0 every one is
    waited for.
    """

    def __init__(self, device: torch.device, lag: int = AHEAD) -> None:
        self._device = device
        self._lag = lag
        self._stream = side_stream(device)
        self._letters: deque[tuple[Callable[[Arrays], None], Batch, Any]] = deque()
        self._free: list[Batch] = []

    def post(
        self, tensors: Mapping[str, Tensor], receive: Callable[[Arrays], None]
    ) -> None:
        """Send these tensors, as they are now; `receive` gets them as arrays."""
        if self._stream is None:
            receive({k: v.detach().cpu().numpy() for k, v in tensors.items()})
            return
        # The caller may write into its tensors again, so a copy makes the journey.
        copies = {key: value.detach().clone() for key, value in tensors.items()}
        landing = self._landing(copies)
        event = copy_aside(copies, landing, self._stream)
        self._letters.append((receive, landing, event))
        self.deliver(self._lag)

    def deliver(self, lag: int | None = None) -> None:
        """Hand over what has arrived, and wait while more than `lag` are under way."""
        while self._letters:
            receive, landing, event = self._letters[0]
            if not event.query():
                if lag is None or len(self._letters) <= lag:
                    return
                event.synchronize()
            self._letters.popleft()
            receive({key: value.numpy() for key, value in landing.items()})
            self._free.append(landing)

    def forget(self) -> None:
        """Throw away what is under way."""
        for *_, event in self._letters:
            event.synchronize()
        self._letters.clear()

    def _landing(self, tensors: Batch) -> Batch:
        """Pinned memory to arrive in."""
        kind = {key: (value.shape, value.dtype) for key, value in tensors.items()}
        for index, found in enumerate(self._free):
            if {k: (v.shape, v.dtype) for k, v in found.items()} == kind:
                return self._free.pop(index)
        return {
            key: torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
            for key, (shape, dtype) in kind.items()
        }


def side_stream(device: torch.device) -> Any:
    """A stream beside the current one; None on a CPU, which has none."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copy_aside(source: Batch, target: Batch, stream: Any) -> Any:
    """Copy on a stream of its own what the current one has computed by then.

    Returns the event after which all of it has arrived.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for key, value in source.items():
            target[key].copy_(value, non_blocking=True)
            value.record_stream(stream)
        return stream.record_event()


def record_event(device: torch.device) -> Any:
    """The moment the current stream gets here; None on a CPU, where that is now."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event()


def _has_passed(event: Any) -> bool:
    return event is None or bool(event.query())
