"""From the replay to the device: batches as tensors, notes and priorities back."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.api import Batch, Notes, Window
from reverie.data.replay import Replay

Arrays = dict[str, np.ndarray]


class ReplayFeed:
    """Serves the windows of a diet from a replay; implements `api.Feed`.

    With `prefetch`, the next batch of a kind is cut by a thread while the agent works
    on the last one. What the agent writes back meanwhile then shows up one batch later,
    as in the original; leave it off where runs must repeat exactly.
    """

    def __init__(
        self,
        replay: Replay,
        diet: dict[str, Window],
        device: torch.device | str = "cpu",
        *,
        prefetch: bool = False,
    ) -> None:
        for name, window in diet.items():
            assert replay.windows[name] == window, name
        self.replay = replay
        self.diet = diet
        self.device = torch.device(device)
        self._pools: dict[str, list[Pool]] = {name: [] for name in diet}
        self.served = 0  # rows handed out so far
        self._thread = ThreadPoolExecutor(1, "prefetch") if prefetch else None
        self._next: dict[str, Future[Batch]] = {}

    def __call__(self, name: str) -> Batch:
        self.served += self.diet[name].batch * self.diet[name].length
        if self._thread is None:
            return self._load(name)
        waiting = self._next.pop(name, None)
        batch = self._load(name) if waiting is None else waiting.result()
        self._next[name] = self._thread.submit(self._load, name)
        return batch

    def ready(self, name: str) -> bool:
        return self.replay.ready(name)

    def update(self, stepid: Tensor, notes: Notes) -> None:
        arrays = {key: value.detach().cpu().numpy() for key, value in notes.items()}
        self.replay.update(stepid.cpu().numpy(), arrays)

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        values = priority.detach().float().cpu().numpy()
        self.replay.prioritize(stepid.cpu().numpy(), values)

    def tally(self, name: str, on: bool) -> None:
        self.replay.tally(name, on)

    def close(self) -> None:
        """Drop what was fetched ahead and end the thread."""
        self._next.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _load(self, name: str) -> Batch:
        pool = self._free(name)
        self.replay.sample(name, out=pool.arrays)
        return pool.tensors(self.device)

    def _free(self, name: str) -> Pool:
        """Buffers nobody reads any more, or new ones."""
        for pool in self._pools[name]:
            if pool.is_free():
                return pool
        pool = Pool(self.replay.buffers(name), pinned=self.device.type == "cuda")
        self._pools[name].append(pool)
        return pool


class Pool:
    """The buffers of one batch, reused once no tensor shares their memory."""

    def __init__(self, arrays: Arrays, pinned: bool) -> None:
        self._pinned: dict[str, Tensor] = {}
        self._copied: Any = None  # the event after which the device has it all
        if pinned:
            for key, value in arrays.items():
                self._pinned[key] = torch.from_numpy(value).pin_memory()
            arrays = {key: value.numpy() for key, value in self._pinned.items()}
        self.arrays = arrays
        self._idle = self._references()

    def is_free(self) -> bool:
        if self._pinned:
            return self._copied is None or bool(self._copied.query())
        return self._references() == self._idle

    def tensors(self, device: torch.device) -> Batch:
        if not self._pinned:
            return {
                key: torch.from_numpy(value).to(device)
                for key, value in self.arrays.items()
            }
        batch = {
            key: value.to(device, non_blocking=True)
            for key, value in self._pinned.items()
        }
        self._copied = torch.cuda.current_stream(device).record_event()
        return batch

    def _references(self) -> list[int]:
        # A tensor made from an array holds on to it, and so does every view of it.
        return [sys.getrefcount(array) for array in self.arrays.values()]
