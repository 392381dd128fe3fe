"""Comparison of checkpoints."""

from __future__ import annotations

import numpy as np
import torch


def assert_same(a, b, name="") -> None:
    """Raise unless two nested states are equal; NaN equals NaN."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), name
        for key in a:
            assert_same(a[key], b[key], f"{name}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), name
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{name}/{i}")
    elif isinstance(a, (torch.Tensor, np.ndarray)):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), name)
    else:
        assert a == b or (a != a and b != b), name
