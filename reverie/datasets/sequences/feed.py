"""From a source of sequences to the device.

With `prefetch` the next training batch is made ready by a thread while the agent learns
from the last one. True events never leave with a batch to train on: they come only with
`report`, the evaluation set, and with `labelled`, training sequences that serve to set
up baselines.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.api import Batch, Extras, StateDict, UserError
from reverie.datasets.sequences import Arrays, Source, telling
from reverie.spaces import EVENT, Space, Spaces

LABELLED = 8
"""Training batches, the next ones, that `labelled` consists of."""
KINDS = {True: "iub", False: "iubf"}
"""What arrays of discrete spaces may be made of, and those of others."""


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

    def write_back(self, stepid: Tensor, extras: Extras) -> None:
        """Sequences keep no extras."""

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        """Sequences are not chosen by priority."""

    def count_uses(self, name: str, on: bool) -> None:
        """Sequences are not counted."""

    def state_dict(self) -> StateDict:
        return {"step": self.step}

    def load_state_dict(self, state: StateDict) -> None:
        self.step = int(state["step"])

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        with telling(type(self.source)):
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
        arrays = self._checked(self.source.batch, step)
        return self._move({k: v for k, v in arrays.items() if k[:4] != "log/"})

    def _report(self) -> Batch:
        return self._move(self._checked(self.source.evaluation))

    def _labelled(self) -> Batch:
        steps = range(self.step, self.step + LABELLED)
        batches = [self._checked(self.source.batch, step) for step in steps]
        keys = batches[0].keys()
        return self._move({k: np.concatenate([b[k] for b in batches]) for k in keys})

    def _checked(self, verb: Callable[..., Any], *arguments: Any) -> Arrays:
        """What a source gives, if it is what its spaces promise."""
        source = self.source
        with telling(type(source)):
            arrays = verb(*arguments)
        if wrong := mistake(arrays, {**source.obs_space, **source.act_space}):
            raise UserError(
                f"The sequences of {type(source).__name__} cannot be used: {wrong}.\n"
                "  Fix: mend it, or the files it reads; its spaces say what is wanted."
            )
        checked: Arrays = arrays
        return checked

    def _move(self, arrays: Arrays) -> Batch:
        batch: Batch = {}
        for key, value in arrays.items():
            writable = value if value.flags.writeable else value.copy()
            tensor = torch.as_tensor(writable)
            if self.device.type == "cuda":
                tensor = tensor.pin_memory()
            batch[key] = tensor.to(self.device, non_blocking=True)
        return batch


def mistake(arrays: Any, spaces: Spaces) -> str | None:
    """What is wrong with sequences of a source, if anything."""
    if not isinstance(arrays, dict):
        return f"they come as {type(arrays).__name__}, wanted a dict of arrays"
    wanted = {**spaces, EVENT: Space(bool)} if EVENT in arrays else spaces
    leading = None
    for key, space in wanted.items():
        value = arrays.get(key)
        if not isinstance(value, np.ndarray):
            return f"{key!r} is no array" if key in arrays else f"they lack {key!r}"
        leading = leading or value.shape[:2]
        whole = len(leading) == 2 and 0 not in leading
        if not whole or value.shape != leading + space.shape:
            wanted_shape = ", ".join(["B", "T", *map(str, space.shape)])
            return (
                f"{key!r} has shape {value.shape}, wanted ({wanted_shape}) with B and "
                "T above 0 and the same for all keys"
            )
        if wrong := _misfit(value, space):
            return f"{key!r} {wrong}"
    return None


def _misfit(value: np.ndarray, space: Space) -> str | None:
    kind, wanted = value.dtype.kind, space.dtype
    if kind == "f" and not np.isfinite(value).all():
        return "has NaN or infinite entries"
    exact = space.is_image or wanted.kind == "b"
    fits = value.dtype == wanted if exact else kind in KINDS[space.is_discrete]
    if not fits:
        return f"is {value.dtype}, wanted {wanted}"
    if space.is_discrete and ((value < space.low) | (value >= space.high)).any():
        low, high = int(space.low.min()), int(space.high.max()) - 1
        return f"has entries that are not from {low} to {high}"
    return None


def _rows(batch: Batch) -> int:
    first = next(iter(batch.values()))
    return int(first.shape[0] * first.shape[1])
