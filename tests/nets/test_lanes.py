"""Work beside other work gives what it gives in order."""

from __future__ import annotations

import pytest
import torch

from reverie.nets.lanes import beside, catch_up


def together(x):
    with beside(x, 0):
        left = x * 2
    with beside(x, 1):
        right = x + 1
    middle = x - 1
    for lane in (0, 1):
        catch_up(x, lane)
    return left + right + middle


def test_on_a_cpu_it_happens_in_order():
    x = torch.arange(3.0)
    assert torch.equal(together(x), 4 * x)


@pytest.mark.gpu
def test_on_a_gpu_results_are_waited_for_also_in_a_recording():
    from reverie.nets.fast.graph import Replayed

    replayed = Replayed(together, "sum", torch.device("cuda"))
    for n in range(6):
        x = torch.full((1 << 20,), float(n), device="cuda")
        assert torch.equal(replayed(x), 4 * x)
    assert replayed.works
