"""Sums of scalars on a device, which the host does not wait for."""

from __future__ import annotations

import math
import sys
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from reverie.api import Metrics


class DeviceSums:
    """Running elementwise sums and counts of vectors on a device, without NaN."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.count: Tensor | None = None

    def add(self, values: Tensor) -> None:
        dtype = torch.float32 if values.device.type == "mps" else torch.float64
        # Not inference tensors: later calls change the sums in place, possibly
        # outside of the inference mode.
        with torch.inference_mode(False), torch.no_grad():
            counted = values == values  # False for NaN
            if self.sum is None:
                values = values.to(dtype)  # later, `+=` converts them
            values = values.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
            if self.sum is None or self.count is None:
                self.sum, self.count = values, counted.to(torch.int64)
                return
            if self.sum.device != values.device:  # restored from a checkpoint
                self.sum = self.sum.to(values.device, dtype)
                self.count = self.count.to(values.device)
            self.sum += values
            self.count += counted

    def read(self) -> tuple[list[float], list[int]]:
        """Return sums and counts; waits for the device."""
        assert self.sum is not None
        assert self.count is not None
        return self.sum.tolist(), self.count.tolist()


class RepeatedScalars(NamedTuple):
    """Metrics that are added repeatedly, as the same tensors with new values.

    Updates that are CUDA graphs return such metrics. If names and types need not be
    examined again, `Logger.add` takes an eighth of the time.
    """

    metrics: Metrics
    vectors: list[tuple[DeviceSums, Tensor]]
    """Vectors that contain all tensors, with their sums."""
    numbers: dict[str, float]
    """All other metrics by their full names."""

    def matches(self, metrics: Metrics) -> bool:
        """True if `metrics` has the same keys, in this order, and objects."""
        return (
            len(metrics) == len(self.metrics)
            and all(map(is_, metrics.values(), self.metrics.values()))
            and list(metrics) == list(self.metrics)
        )


def find_vector(scalars: list[Tensor]) -> Tensor | None:
    """Return the vector that has exactly `scalars` as its elements, or None."""
    vector = scalars[0]._base
    if (
        vector is None
        or vector.requires_grad
        or vector.shape != (len(scalars),)
        or vector.stride() != (1,)
    ):
        return None
    addresses = range(vector.data_ptr(), sys.maxsize, vector.itemsize)
    same = all(x.data_ptr() == a for x, a in zip(scalars, addresses, strict=False))
    return vector.detach() if same else None
