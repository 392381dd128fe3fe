"""From the replay to the device: batches as tensors, extras and priorities back.

On a CPU a batch is cut out of the replay in the very memory its tensors share. For a
GPU there are two ways. If the replay fits there too, it is kept on the device as well
(`ring.py`), and batches are cut and extras written back without leaving it. Otherwise
batches are cut ahead by a thread, in pinned memory that a stream of its own copies
over, and extras come back the same way a little later. Neither waits for the device.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reverie.api import Batch, Extras
from reverie.replay.budget import size
from reverie.replay.buffer import Replay
from reverie.replay.device_copy import Ring
from reverie.replay.staging import (
    AHEAD,
    Arrays,
    Mailbox,
    Packed,
    Staging,
    record_event,
    side_stream,
)
from reverie.rows import Window


class ReplayFeed:
    """Serves the windows of a windows from a replay; implements `api.Feed`.

    With `prefetch`, the next batch of a kind is cut by a thread while the agent works
    on the last one. What the agent writes back meanwhile then shows up a batch or more
    later, as in the original. With `resident` the replay is kept on the device as well;
    that needs no thread, and everything written shows up at once. Leave `prefetch` off
    where runs must repeat exactly; then priorities are waited for as well.
    """

    def __init__(
        self,
        replay: Replay,
        windows: dict[str, Window],
        device: torch.device | str = "cpu",
        *,
        prefetch: bool = False,
        resident: bool = False,
    ) -> None:
        for name, window in windows.items():
            assert replay.windows[name] == window, name
        self.replay = replay
        self.windows = windows
        self.device = torch.device(device)
        self.ring = Ring(replay, self.device) if resident else None
        self.served = 0  # rows handed out so far
        self._cutter = _Cutter(replay, self.device)
        self._thread = None
        if prefetch and not resident:
            self._thread = ThreadPoolExecutor(1, "prefetch")
        self._next: dict[str, Future[_Cut]] = {}
        self._mailbox = Mailbox(self.device, AHEAD if prefetch else 0)
        replay.followers.append(self)

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        self.served += self.windows[name].batch * self.windows[name].length
        self._mailbox.deliver()
        if self.ring is not None:
            return self.ring.cut(name, out)
        if self._thread is None:
            return self._cutter.cut(name).hand_over(out)
        waiting = self._next.pop(name, None)
        cut = self._cutter.cut(name) if waiting is None else waiting.result()
        self._next[name] = self._thread.submit(self._cutter.cut, name)
        return cut.hand_over(out)

    @property
    def sentence(self) -> str:
        """What the device holds, to be read after the replay's own sentence."""
        if self.ring is None:
            return ""
        return f", {size(self.ring.nbytes)} of {self.device.type} memory"

    def ready(self, name: str) -> bool:
        return self.replay.ready(name)

    def write_back(self, stepid: Tensor, extras: Extras) -> None:
        if self.ring is not None:
            self.ring.write(stepid, extras)
        else:
            self._mailbox.post({**extras, _STEPID: stepid}, self._write)

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        letter = {_STEPID: stepid, _PRIORITY: priority.detach().float()}
        self._mailbox.post(letter, self._prioritize)

    def count_uses(self, name: str, on: bool) -> None:
        self.replay.count_uses(name, on)

    def close(self) -> None:
        """Drop what was fetched ahead and end the thread."""
        self._next.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._mailbox.forget()
        if self in self.replay.followers:
            self.replay.followers.remove(self)

    # What the replay tells those who follow it.

    def settle(self) -> None:
        """Give everything to the replay that it would have without a device.

        Batches that were cut ahead are put back, so that a resumed run gets them too.
        """
        self._mailbox.deliver(lag=0)
        for name in self._take_back():
            self.replay.put_back(name)
        if self.ring is not None and self.replay.archive is not None:
            exact = self.replay.exact_extras  # or else files keep the extras they have
            for ids, extras in self.ring.changes(0 if exact else self._unsealed):
                self.replay.rewrite(ids, extras)

    def reload(self) -> None:
        self._take_back()
        self._mailbox.forget()
        if self.ring is not None:
            self.ring.reload()

    def take_count(self) -> int:
        return 0 if self.ring is None else self.ring.take_count()

    @property
    def _unsealed(self) -> int:
        assert self.replay.archive is not None
        return self.replay.archive.sealed

    def _take_back(self) -> list[str]:
        names = []
        for name, waiting in self._next.items():
            waiting.result()
            names.append(name)
        self._next.clear()
        return names

    def _write(self, arrays: Arrays) -> None:
        stepid = arrays.pop(_STEPID)
        self.replay.write_back(stepid, arrays)

    def _prioritize(self, arrays: Arrays) -> None:
        self.replay.prioritize(arrays[_STEPID], arrays[_PRIORITY])


_STEPID, _PRIORITY = "#stepid", "#priority"


class _Cut(NamedTuple):
    """A batch on its way, and the event after which it has arrived."""

    batch: Batch
    arrived: Any

    def hand_over(self, out: Batch | None) -> Batch:
        """The batch for the current stream, in the tensors of an earlier one if any."""
        batch = self.batch
        if self.arrived is not None and isinstance(batch, Packed):
            stream = torch.cuda.current_stream(batch.memory.device)
            stream.wait_event(self.arrived)
            batch.memory.record_stream(stream)
        if out is None:
            return batch
        if isinstance(out, Packed) and isinstance(batch, Packed):
            out.memory.copy_(batch.memory)
        else:
            for key, value in batch.items():
                out[key].copy_(value)
        return out


class _Cutter:
    """Cuts batches in host memory and sends them to the device."""

    def __init__(self, replay: Replay, device: torch.device) -> None:
        self.replay = replay
        self.device = device
        self._pools: dict[str, list[Pool]] = {name: [] for name in replay.windows}
        self._staging: dict[str, Staging] = {}
        self._stream = side_stream(device)

    def cut(self, name: str) -> _Cut:
        if self._stream is None:
            pool = self._free(name)
            self.replay.sample(name, out=pool.arrays)
            return _Cut(pool.tensors(self.device), None)
        if name not in self._staging:
            self._staging[name] = Staging(self.replay.buffers(name), self.device)
        staging = self._staging[name]
        parcel = staging.take()
        self.replay.sample(name, out=parcel.arrays)
        with torch.cuda.stream(self._stream):
            batch = parcel.send(self.device)
            staging.done(parcel)
            return _Cut(batch, record_event(self.device))

    def _free(self, name: str) -> Pool:
        """Buffers nobody reads any more, or new ones."""
        for pool in self._pools[name]:
            if pool.is_free():
                return pool
        pool = Pool(self.replay.buffers(name))
        self._pools[name].append(pool)
        return pool


class Pool:
    """The buffers of one batch, reused once no tensor shares their memory."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._idle = self._references()

    def is_free(self) -> bool:
        return self._references() == self._idle

    def tensors(self, device: torch.device) -> Batch:
        return {
            key: torch.from_numpy(value).to(device)
            for key, value in self.arrays.items()
        }

    def _references(self) -> list[int]:
        # A tensor made from an array holds on to it, and so does every view of it.
        return [sys.getrefcount(array) for array in self.arrays.values()]
