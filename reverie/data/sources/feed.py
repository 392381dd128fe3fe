"""From a source of sequences to the device.

The next training batch is made ready by a thread while the agent learns from the last
one. True events never leave with a batch to train on: they come only with `report`,
the evaluation set, and with `labelled`, training sequences that serve to set up
baselines.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from reverie.api import Batch, Notes, StateDict, UserError
from reverie.data.sources import Arrays, Source

LABELLED = 8
"""Training batches, the next ones, that `labelled` consists of."""


class SourceFeed:
    """Serves a source in order of its steps; implements `api.Feed`."""

    def __init__(self, source: Source, device: torch.device, prefetch: bool = False):
        self.source, self.device = source, device
        self.step = 0  # of the next training batch
        self.served = 0  # rows handed out so far
        self._thread = ThreadPoolExecutor(1, "watch") if prefetch else None
        self._next: tuple[int, Future[Batch]] | None = None
        self._held: dict[str, Batch] = {}

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        batch = self._serve(name)
        if out is None:
            return batch
        for key, value in out.items():
            value.copy_(batch[key], non_blocking=True)
        return out

    def _serve(self, name: str) -> Batch:
        if name == "train":
            batch = self._ahead() if self._thread else self._train(self.step)
            self.step += 1
            self.served += _rows(batch)
            return batch
        if name not in self._held:
            make = self._report if name == "report" else self._labelled
            # a source is asked by one thread at a time
            self._held[name] = (
                self._thread.submit(make).result() if self._thread else make()
            )
        return self._held[name]

    def ready(self, name: str) -> bool:
        return True

    def update(self, stepid: Tensor, notes: Notes) -> None:
        """Sequences keep no notes."""

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        """Sequences are not chosen by priority."""

    def tally(self, name: str, on: bool) -> None:
        """Sequences are not counted."""

    def state_dict(self) -> StateDict:
        return {"step": self.step}

    def load_state_dict(self, state: StateDict) -> None:
        self.step = int(state["step"])

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self.source.close()

    def _ahead(self) -> Batch:
        assert self._thread
        if not self._next or self._next[0] != self.step:
            self._next = self.step, self._thread.submit(self._train, self.step)
        batch = self._next[1].result()
        following = self.step + 1
        self._next = following, self._thread.submit(self._train, following)
        return batch

    def _train(self, step: int) -> Batch:
        arrays = self.source.batch(step)
        return self._move({k: v for k, v in arrays.items() if k[:4] != "log/"})

    def _report(self) -> Batch:
        return self._move(self.source.evaluation())

    def _labelled(self) -> Batch:
        steps = range(self.step, self.step + LABELLED)
        batches = [self.source.batch(step) for step in steps]
        keys = batches[0].keys()
        return self._move({k: np.concatenate([b[k] for b in batches]) for k in keys})

    def _move(self, arrays: Arrays) -> Batch:
        batch: Batch = {}
        for key, value in arrays.items():
            tensor = torch.as_tensor(value)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise UserError(
                    f"The sequences have NaN or infinite entries in {key!r}.\n"
                    "  Fix: mend the source, or leave out the files they come from."
                )
            if self.device.type == "cuda":
                tensor = tensor.pin_memory()
            batch[key] = tensor.to(self.device, non_blocking=True)
        return batch


def _rows(batch: Batch) -> int:
    first = next(iter(batch.values()))
    return int(first.shape[0] * first.shape[1])
