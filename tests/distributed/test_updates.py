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


def check(ranks, case: str, counts: tuple[int, ...], updates: int, exact=True) -> None:
    """Compare updates on several ranks with one process; print the largest errors."""
    (expected,) = ranks.run(1, train, case, updates, exact)
    for count in counts:
        results = ranks.run(count, train, case, updates, exact)
        error = max(largest_error(actual, expected) for actual in results)
        kind = "float64" if exact else "float32"
        print(f"\n{case}, {count} ranks, {updates} updates, {kind}: {error:.1e}")
        assert error < (1e-12 if exact else 2e-5)


def test_twenty_updates_of_dreamer_equal_those_of_one_process(ranks):
    check(ranks, "dreamer", (2, 3), 20)


@pytest.mark.extended_except("bc", "barlow")
@pytest.mark.parametrize("case", [case for case in CASES if case != "dreamer"])
def test_updates_of_other_agents_equal_those_of_one_process(ranks, case):
    check(ranks, case, (3,), 4)


@pytest.mark.extended
def test_updates_in_float32_equal_those_of_one_process(ranks):
    check(ranks, "dreamer", (2,), 20, exact=False)
