"""Updates of several ranks as CUDA graphs, and their flat gradients."""

from __future__ import annotations

import pytest
import torch

from reverie.distributed import collective
from reverie.kernels.graphs import runner
from reverie.nets.conv import SameConv
from reverie.nets.optim.laprop import LaPropConfig
from reverie.nets.optim.optimizer import Optimizer


class FakeGraph:
    """Replaces a CUDA graph; the capture fails on rank `fails_on`."""

    fails_on = -1

    def __init__(self, function, *_):
        if collective.rank() == FakeGraph.fails_on:
            raise RuntimeError("out of memory")

    def replay(self, inputs):
        return "replayed"


def call_captured(fails_on: int) -> list[str]:
    """Return the results of two calls of a function that is captured in the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "WARM_UP", 0)
        patch.setattr(runner, "CapturedGraph", FakeGraph)
        patch.setattr(FakeGraph, "fails_on", fails_on)
        patch.setattr(collective, "can_capture", lambda: True)
        captured = runner.CudaGraphRunner(
            lambda x: "called", "update", torch.device("cpu")
        )
        captured.can_capture = True
        with collective.synchronized():
            return [captured(torch.zeros(2)) for _ in range(2)]


def test_all_ranks_use_a_graph_or_none_does(ranks):
    for results in ranks.run(3, call_captured, -1):
        assert results == ["replayed", "replayed"]
    for results in ranks.run(3, call_captured, 1):
        assert results == ["called", "called"]


def can_capture_with_gloo() -> bool:
    with collective.synchronized():
        return collective.can_capture()


def test_collectives_of_gloo_are_not_captured(ranks):
    assert ranks.run(2, can_capture_with_gloo) == [False, False]
    assert collective.can_capture()  # no collectives


def optimize(fused: bool, total: int) -> list[torch.Tensor]:
    """Return parameters after updates with the gradients of `total` sequences.

    Every rank adds up the gradients of its own sequences.
    """
    from reverie.kernels.optim.optimizer import FusedOptimizer

    torch.manual_seed(0)
    conv = SameConv(3, 5, 5)  # its weight has another memory order
    torch.nn.init.normal_(conv.weight)
    parameters = {"a": torch.randn(70, 65), "b": torch.randn(()), "c": conv.weight.data}
    opt = (FusedOptimizer if fused else Optimizer)(
        parameters, LaPropConfig(lr=0.1, warmup=0)
    )
    for update in range(3):
        with collective.synchronized():
            rows = collective.set_batch(total)
            generator = torch.Generator().manual_seed(update)
            grads = [torch.zeros_like(x) for x in parameters.values()]
            loss = torch.zeros(())
            for row in range(total):
                noise = [torch.randn(x.shape, generator=generator) for x in grads]
                if rows.start <= row < rows.stop:
                    loss += torch.inf if (update, row) == (1, 2) else row
                    grads = [x + y for x, y in zip(grads, noise, strict=True)]
            assert opt.apply(loss, grads)[0] == (update != 1)
    return list(parameters.values())


def test_flat_gradients_are_added_up_over_ranks(ranks):
    pytest.importorskip("triton")
    expected = optimize(False, 5)
    for actual in ranks.run(2, optimize, True, 5):
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
