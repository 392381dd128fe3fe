"""Operations on the same memory, replayed as a CUDA graph."""

from __future__ import annotations

from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from reverie.replay.repeated_call import WARM_UP, RepeatedCall


def test_a_repeated_call_without_a_gpu_calls_the_function():
    total = torch.zeros(2)
    call = RepeatedCall(total.add_, torch.device("cpu"))
    for n in range(WARM_UP + 3):
        call(torch.ones(2))
        assert total.tolist() == [n + 1] * 2


@pytest.mark.gpu
def test_a_repeated_call_reads_the_current_values_of_the_same_memory():
    device = torch.device("cuda")
    total, x = torch.zeros(2, device=device), torch.zeros(2, device=device)
    call, calls = RepeatedCall(total.add_, device), []
    call.function = lambda y: (calls.append(1), total.add_(y))
    for n in range(WARM_UP + 4):
        x.fill_(n)
        call(x)
    assert total.tolist() == [sum(range(WARM_UP + 4))] * 2
    assert len(calls) == WARM_UP + 1  # the last one is the capture
    call(torch.full((2,), 10.0, device=device))  # other memory
    assert total.tolist() == [sum(range(WARM_UP + 4)) + 10] * 2


class FakeGraph:
    """Calls the captured function again, as a CUDA graph runs its kernels again."""

    captured: ClassVar[list] = []

    def replay(self):
        for function in self.captured:
            function()


@pytest.fixture
def fake_cuda(monkeypatch):
    FakeGraph.captured.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())


def test_calls_with_the_same_memory_become_a_graph(fake_cuda):
    total, x, calls = torch.zeros(2), torch.zeros(2), []

    def add(y, others):
        calls.append(1)
        if len(calls) == WARM_UP + 1:  # a capture runs nothing
            FakeGraph.captured.append(lambda: total.add_(y).add_(others["z"]))
        else:
            total.add_(y).add_(others["z"])

    call, others = RepeatedCall(add, torch.device("cuda")), {"z": torch.ones(2)}
    for n in range(WARM_UP + 3):
        x.fill_(n)
        call(x, others)
    expected = sum(range(WARM_UP + 3)) + WARM_UP + 3
    assert total.tolist() == [expected] * 2
    assert len(calls) == WARM_UP + 1
    call(torch.full((2,), 10.0), others)  # other memory: no replay
    assert total.tolist() == [expected + 11] * 2
    assert len(calls) == WARM_UP + 2


def test_a_function_that_cannot_be_captured_is_called(fake_cuda, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(torch.cuda, "graph", fail)
    total, x = torch.zeros(2), torch.ones(2)
    call = RepeatedCall(total.add_, torch.device("cuda"))
    for n in range(WARM_UP + 3):
        call(x)
        assert total.tolist() == [n + 1] * 2
