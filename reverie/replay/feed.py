"""Batches of the replay as tensors on the device, and write-back of extras.

On a CPU the tensors share the memory into which a batch is sampled. On a GPU there are
two modes. If the replay fits into GPU memory, it is copied to the GPU, which gathers
batches and writes extras back (`device_copy.py`). Otherwise a thread samples
batches in advance into pinned memory, and a separate CUDA stream copies them to the
GPU; extras are copied back with a delay of a few batches. In both modes the host does
not wait for the GPU.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reverie.api import Batch, Extras
from reverie.replay.buffer import Replay
from reverie.replay.device_copy import DeviceCopy
from reverie.replay.memory_plan import format_bytes
from reverie.replay.staging import (
    MAX_AHEAD,
    AsyncWriteback,
    PackedBatch,
    StagingPool,
    make_stream,
    record_event,
)
from reverie.rows import Window
from reverie.spaces import Arrays

_STEPID, _PRIORITY = "#stepid", "#priority"  # different from all names of extras


class ReplayFeed:
    """Samples batches from a replay; implements `api.Feed`.

    With `prefetch`, a thread samples the next batch while the agent trains on the last
    one. Extras and priorities then take effect one or more batches later, as in the
    original DreamerV3. Without it, they take effect immediately, which reproducible
    runs need. With `on_device`, the replay is copied to the device, and `prefetch` is
    not needed.
    """

    def __init__(
        self,
        replay: Replay,
        windows: dict[str, Window],
        device: torch.device | str = "cpu",
        *,
        prefetch: bool = False,
        on_device: bool = False,
    ) -> None:
        for name, window in windows.items():
            assert replay.windows[name] == window, name
        self.replay = replay
        self.windows = windows
        self.device = torch.device(device)
        self.device_copy = DeviceCopy(replay, self.device) if on_device else None
        self.served = 0  # rows returned so far, without context rows
        self._sampler = _BatchSampler(replay, self.device)
        self._prefetch_thread = None
        if prefetch and not on_device:
            self._prefetch_thread = ThreadPoolExecutor(1, "prefetch")
        self._prefetched: dict[str, Future[_InFlightBatch]] = {}
        self._writeback = AsyncWriteback(self.device, MAX_AHEAD if prefetch else 0)
        replay.listeners.append(self)

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        """Return the next batch, copied into `out` if given (for CUDA graphs)."""
        self.served += self.windows[name].batch * self.windows[name].length
        self._writeback.process()
        if self.device_copy is not None:
            return self.device_copy.sample(name, out)
        if self._prefetch_thread is None:
            return self._sampler.sample(name).wait(out)
        future = self._prefetched.pop(name, None)
        batch = self._sampler.sample(name) if future is None else future.result()
        self._prefetched[name] = self._prefetch_thread.submit(
            self._sampler.sample, name
        )
        return batch.wait(out)

    def describe(self) -> str:
        """Return text about device memory to append to `MemoryPlan.describe`."""
        if self.device_copy is None:
            return ""
        size = format_bytes(self.device_copy.nbytes)
        return f", {size} of {self.device.type} memory"

    def ready(self, name: str) -> bool:
        return self.replay.ready(name)

    def write_back(self, stepid: Tensor, extras: Extras) -> None:
        """Replace the stored extras of these steps; evicted steps are skipped."""
        if self.device_copy is not None:
            self.device_copy.write_back(stepid, extras)
        else:
            self._writeback.enqueue(
                {**extras, _STEPID: stepid},
                lambda arrays: self.replay.write_back(arrays.pop(_STEPID), arrays),
            )

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        tensors = {_STEPID: stepid, _PRIORITY: priority.detach().float()}
        self._writeback.enqueue(
            tensors, lambda x: self.replay.prioritize(x[_STEPID], x[_PRIORITY])
        )

    def count_uses(self, name: str, on: bool) -> None:
        self.replay.count_uses(name, on)

    def put_back(self, name: str) -> None:
        """Make the next call return the last batch again, because it was not used.

        Not supported with prefetching.
        """
        assert self._prefetch_thread is None
        self.served -= self.windows[name].batch * self.windows[name].length
        self.replay.put_back(name)

    def close(self) -> None:
        """Discard prefetched batches and stop the thread."""
        self._prefetched.clear()
        if self._prefetch_thread is not None:
            self._prefetch_thread.shutdown(wait=True, cancel_futures=True)
        self._writeback.clear()
        if self in self.replay.listeners:
            self.replay.listeners.remove(self)

    # Called by the replay (`ReplayListener`).

    def flush(self) -> None:
        """Write all pending changes from the device back to the replay.

        Prefetched batches are put back, so that a resumed run samples them again.
        """
        self._writeback.process(max_pending=0)
        for name in self._discard_prefetched():
            self.replay.put_back(name)
        files = self.replay.files
        if self.device_copy is not None and files is not None:
            # Without `exact_extras`, extras in complete files are not updated.
            first = 0 if self.replay.exact_extras else files.first_unwritten
            for ids, extras in self.device_copy.pop_changes(first):
                self.replay.write_extras(ids, extras)

    def reload(self) -> None:
        self._discard_prefetched()
        self._writeback.clear()
        if self.device_copy is not None:
            self.device_copy.reload()

    def pop_num_writes(self) -> int:
        """Return how many extras the device has written since the last call."""
        return 0 if self.device_copy is None else self.device_copy.pop_num_writes()

    def _discard_prefetched(self) -> list[str]:
        """Discard prefetched batches; return their names, such as `train`."""
        names = list(self._prefetched)
        for future in self._prefetched.values():
            future.result()
        self._prefetched.clear()
        return names


class _InFlightBatch(NamedTuple):
    """A batch that is being copied to the device."""

    batch: Batch
    copied: Any  # CUDA event after the copy; None on a CPU

    def wait(self, out: Batch | None) -> Batch:
        """Make the current stream wait for the copy; copy into `out` if given."""
        batch = self.batch
        if self.copied is not None and isinstance(batch, PackedBatch):
            stream = torch.cuda.current_stream(batch.memory.device)
            stream.wait_event(self.copied)
            batch.memory.record_stream(stream)
        if out is None:
            return batch
        if isinstance(out, PackedBatch) and isinstance(batch, PackedBatch):
            out.memory.copy_(batch.memory)
        else:
            for key, value in batch.items():
                out[key].copy_(value)
        return out


class _BatchSampler:
    """Samples batches into host memory and copies them to the device."""

    def __init__(self, replay: Replay, device: torch.device) -> None:
        self.replay = replay
        self.device = device
        self._buffers: dict[str, list[_HostBuffer]] = {n: [] for n in replay.windows}
        self._staging: dict[str, StagingPool] = {}
        self._stream = make_stream(device)

    def sample(self, name: str) -> _InFlightBatch:
        """Sample a batch and start its copy to the device."""
        if self._stream is None:
            host_buffer = self._free_buffer(name)
            self.replay.sample(name, out=host_buffer.arrays)
            return _InFlightBatch(host_buffer.tensors(self.device), None)
        if name not in self._staging:
            batch = self.replay.empty_batch(name)
            self._staging[name] = StagingPool(batch, self.device)
        pool = self._staging[name]
        buffer = pool.acquire()
        self.replay.sample(name, out=buffer.arrays)
        with torch.cuda.stream(self._stream):
            packed = buffer.send(self.device)
            pool.release(buffer)
            return _InFlightBatch(packed, record_event(self.device))

    def _free_buffer(self, name: str) -> _HostBuffer:
        """Return a host buffer that no tensor uses; create one if there is none."""
        for buffer in self._buffers[name]:
            if buffer.reference_counts() == buffer.free_counts:
                return buffer
        buffer = _HostBuffer(self.replay.empty_batch(name))
        self._buffers[name].append(buffer)
        return buffer


class _HostBuffer:
    """Arrays of one batch, reused when no tensor shares their memory anymore."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.free_counts = self.reference_counts()  # while no tensor shares the memory

    def tensors(self, device: torch.device) -> Batch:
        return {k: torch.from_numpy(v).to(device) for k, v in self.arrays.items()}

    def reference_counts(self) -> list[int]:
        # Tensors created from an array, and their views, keep a reference to it.
        return [sys.getrefcount(array) for array in self.arrays.values()]
