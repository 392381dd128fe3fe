"""Updates on two and three ranks equal those of one process."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree
from updates import CASES, train


def largest_error(actual, expected) -> float:
    """Largest relative error of a leaf, by the largest value in it."""
    errors = [0.0]
    leaves = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    for a, b in leaves:
        if not isinstance(b, torch.Tensor):
            assert a == b
        elif not b.is_floating_point():
            assert torch.equal(a, b)
        elif b.numel():
            scale = max(1.0, float(b.abs().max()))
            errors.append(float((a - b).abs().max()) / scale)
    return max(errors)


def test_twenty_updates_of_dreamer_equal_those_of_one_process(ranks):
    (expected,) = ranks.run(1, train, "dreamer", 20)
    for count in (2, 3):
        for actual in ranks.run(count, train, "dreamer", 20):
            assert largest_error(actual, expected) < 1e-12


@pytest.mark.extended_except("bc", "barlow")
@pytest.mark.parametrize("case", [case for case in CASES if case != "dreamer"])
def test_updates_of_other_agents_equal_those_of_one_process(ranks, case):
    (expected,) = ranks.run(1, train, case, 4)
    for actual in ranks.run(3, train, case, 4):
        assert largest_error(actual, expected) < 1e-12


@pytest.mark.extended
def test_updates_in_float32_equal_those_of_one_process(ranks):
    (expected,) = ranks.run(1, train, "dreamer", 20, False)
    for actual in ranks.run(2, train, "dreamer", 20, False):
        assert largest_error(actual, expected) < 2e-5
