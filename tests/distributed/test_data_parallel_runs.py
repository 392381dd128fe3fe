"""Runs with two ranks log and save what a run of one process does."""

from __future__ import annotations

import math

import pytest
import torch
from runs import run
from torch.utils import _pytree as pytree


def assert_close(actual, expected) -> None:
    """Compare logs and weights, up to the rounding of float32."""
    for line, other in zip(actual["log"], expected["log"], strict=True):
        assert line.keys() == other.keys()
        for key, value in other.items():
            assert math.isclose(line[key], value, rel_tol=1e-3, abs_tol=1e-4), key
    leaves = [pytree.tree_leaves_with_path(x["agent"]) for x in (actual, expected)]
    for (path, a), (_, b) in zip(*leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=pytree.keystr(path))


@pytest.mark.extended
def test_a_deterministic_run_with_two_ranks_equals_one_of_one_process(ranks, tmp_path):
    (expected,) = ranks.launch(1, run, str(tmp_path / "one"), 40)
    actual, _ = ranks.launch(2, run, str(tmp_path / "two"), 40)
    assert_close(actual, expected)
    # resumed with another number of ranks, each run continues as the other
    more_of_two, _ = ranks.launch(2, run, str(tmp_path / "one"), 60)
    (more_of_one,) = ranks.launch(1, run, str(tmp_path / "two"), 60)
    assert_close(more_of_two, more_of_one)
