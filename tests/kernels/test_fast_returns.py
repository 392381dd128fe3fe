"""The kernel of lambda-returns equals the plain loop."""

from __future__ import annotations

import pytest
import torch

from reverie.agents.returns import lambda_return as plain

triton = pytest.importorskip("triton")

from reverie.kernels.heads.returns import lambda_return  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not triton.knobs.runtime.interpret,
    reason="needs a GPU or Triton's interpreter",
)


@pytest.mark.parametrize(("rows", "steps"), [(3, 2), (37, 16), (1, 65)])
def test_returns_equal_those_of_the_plain_loop(rows, steps):
    torch.manual_seed(0)
    reward, value = torch.randn(2, rows, steps, device=DEVICE)
    is_last, is_terminal = torch.rand(2, rows, steps, device=DEVICE)
    inputs = (reward, value, (is_last > 0.8).float(), is_terminal)
    actual, expected = lambda_return(*inputs, 0.9, 0.8), plain(*inputs, 0.9, 0.8)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
