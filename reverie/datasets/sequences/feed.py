"""Feed of a sequence dataset: checks its arrays and copies them to the device.

With `prefetch` a thread prepares the next training batch during the current update.
Ground-truth events are not part of training batches. They are part of two other
batches: `report` (the evaluation set) and `labelled` (training sequences, to which
baselines are fitted).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from reverie.api import Batch, StateDict, UserError
from reverie.datasets.feed import RecordedFeed, copy_batch, to_device
from reverie.datasets.sequences import SequenceDataset, explain_user_code_errors
from reverie.spaces import EVENT, Arrays, Space, Spaces

LABELLED_BATCHES = 8
"""Number of upcoming training batches in `labelled`."""
DTYPE_KINDS = {True: "iub", False: "iubf"}
"""Allowed dtype kinds of discrete spaces (True) and other spaces (False)."""


class SequenceFeed(RecordedFeed):
    """Returns the batches of a dataset in order; implements `api.Feed`."""

    def __init__(
        self, dataset: SequenceDataset, device: torch.device, prefetch: bool = False
    ):
        self.dataset, self.device = dataset, device
        self.step = 0  # of the next training batch
        self.served = 0  # rows returned so far
        self._batch_rows = 0  # rows of the last training batch
        self._thread = ThreadPoolExecutor(1, "sequences") if prefetch else None
        # Step of the prefetched training batch, and the batch.
        self._next: tuple[int, Future[Batch]] | None = None
        self._cached: dict[str, Batch] = {}  # batches `report` and `labelled`

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        batch = self._get(name)
        return batch if out is None else copy_batch(batch, out)

    def _get(self, name: str) -> Batch:
        """Return the next training batch, or the fixed batch of another name."""
        if name == "train":
            batch = self._next_batch() if self._thread else self._load_train(self.step)
            self.step += 1
            first = next(iter(batch.values()))
            self._batch_rows = int(first.shape[0] * first.shape[1])
            self.served += self._batch_rows
            return batch
        if name not in self._cached:
            load = self._load_report if name == "report" else self._load_labelled
            # the dataset is used by one thread at a time
            self._cached[name] = (
                self._thread.submit(load).result() if self._thread else load()
            )
        return self._cached[name]

    def put_back(self, name: str) -> None:
        """Make the next call return the last training batch again; it was not used."""
        if name == "train":
            self.step -= 1
            self.served -= self._batch_rows

    def state_dict(self) -> StateDict:
        return {"step": self.step}

    def load_state_dict(self, state: StateDict) -> None:
        self.step = int(state["step"])

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        with explain_user_code_errors(type(self.dataset)):
            self.dataset.close()

    def _next_batch(self) -> Batch:
        """Return the training batch of the current step, and prefetch the next one."""
        assert self._thread
        if not self._next or self._next[0] != self.step:
            self._next = self.step, self._thread.submit(self._load_train, self.step)
        batch = self._next[1].result()
        following = self.step + 1
        self._next = following, self._thread.submit(self._load_train, following)
        return batch

    def _load_train(self, step: int) -> Batch:
        arrays = self._call_checked(self.dataset.batch, step)
        arrays = {k: v for k, v in arrays.items() if not k.startswith("log/")}
        return to_device(arrays, self.device)

    def _load_report(self) -> Batch:
        return to_device(self._call_checked(self.dataset.evaluation), self.device)

    def _load_labelled(self) -> Batch:
        steps = range(self.step, self.step + LABELLED_BATCHES)
        batches = [self._call_checked(self.dataset.batch, step) for step in steps]
        arrays = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
        return to_device(arrays, self.device)

    def _call_checked(self, method: Callable[..., Any], *arguments: Any) -> Arrays:
        """Call a method of the dataset; check that its arrays match the spaces."""
        dataset = self.dataset
        with explain_user_code_errors(type(dataset)):
            arrays = method(*arguments)
        if why := find_problem(arrays, {**dataset.obs_space, **dataset.act_space}):
            raise UserError(
                f"The sequences of {type(dataset).__name__} cannot be used: {why}.\n"
                "  Fix: correct the class, its spaces, or the files it reads."
            )
        checked: Arrays = arrays
        return checked


def find_problem(arrays: Any, spaces: Spaces) -> str | None:
    """Describe how arrays differ from the spaces; None if they match."""
    if not isinstance(arrays, dict):
        return f"they are a {type(arrays).__name__}, expected a dict of arrays"
    expected = {**spaces, EVENT: Space(bool)} if EVENT in arrays else spaces
    leading = None  # the first two axes (B, T) of all arrays
    for key, space in expected.items():
        value = arrays.get(key)
        if not isinstance(value, np.ndarray):
            return (
                f"{key!r} is not an array" if key in arrays else f"{key!r} is missing"
            )
        leading = leading or value.shape[:2]
        has_rows = len(leading) == 2 and 0 not in leading
        if not has_rows or value.shape != leading + space.shape:
            shape = ", ".join(["B", "T", *map(str, space.shape)])
            return (
                f"{key!r} has shape {value.shape}, expected ({shape}) with B and T "
                "above 0 and equal for all keys"
            )
        if why := _mismatch(value, space):
            return f"{key!r} {why}"
    return None


def _mismatch(value: np.ndarray, space: Space) -> str | None:
    """Describe how type or values differ from a space; None if they match."""
    kind, dtype = value.dtype.kind, space.dtype
    if kind == "f" and not np.isfinite(value).all():
        return "has NaN or infinite entries"
    needs_same_dtype = space.is_image or dtype.kind == "b"
    matches = (
        value.dtype == dtype
        if needs_same_dtype
        else kind in DTYPE_KINDS[space.is_discrete]
    )
    if not matches:
        return f"is {value.dtype}, expected {dtype}"
    if space.is_discrete and ((value < space.low) | (value >= space.high)).any():
        low, high = int(space.low.min()), int(space.high.max()) - 1
        return f"has entries that are not from {low} to {high}"
    return None
