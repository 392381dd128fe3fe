"""Annotations of `reverie` are checked while tests run."""

from __future__ import annotations

import sys

import pytest
import torch

from reverie.agents.returns import lambda_return

pytestmark = pytest.mark.skipif(
    "typecheck" not in sys.modules, reason="annotations are not checked"
)


def returns(rows: int) -> torch.Tensor:
    """Call a function for two sequences of four steps, with flags for `rows`."""
    values, flags = torch.ones(2, 4), torch.ones(rows, 4)
    return lambda_return(values, values, values, flags, 0.9, 0.95)


def test_a_wrong_shape_fails_in_the_first_calls_of_each_test():
    import typecheck

    assert returns(2).shape == (2, 3)
    with pytest.raises(TypeError, match="lambda_return"):
        returns(1)
    for _ in range(typecheck.CALLS):
        returns(2)
    assert returns(1).shape == (2, 3)  # flags are broadcast, without the check
    typecheck.reset_counts()
    with pytest.raises(TypeError, match="lambda_return"):
        returns(1)


def test_a_wrong_type_fails():
    rows = torch.ones(2, 4)
    with pytest.raises(TypeError, match="discount"):
        lambda_return(rows, rows, rows, rows, "0.9", 0.95)  # type: ignore[arg-type]
