"""Which stream waits for which, checked with fake CUDA streams that log their calls."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from reverie.nets import streams

SLOW, QUICK = streams.SideStream("slow"), streams.SideStream("quick", priority=2)


class OnGPU(torch.Tensor):
    device = torch.device("cuda")


class FakeStream:
    def __init__(self, name: str, calls: list[str]):
        self.name, self.calls = name, calls

    def wait_stream(self, other: FakeStream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


class Log:
    """The calls of all streams in order; `work` logs work on the current stream."""

    def __init__(self):
        self.calls: list[str] = []
        self.captured: set[str] = set()  # names of streams with work in a CUDA graph
        self.current = [FakeStream("main", self.calls)]

    def work(self) -> None:
        self.calls.append(f"{self.current[-1].name} works")


@pytest.fixture
def log(monkeypatch):
    log, names = Log(), iter("abc")

    def make(_, priority):
        return FakeStream(f"{next(names)}{-priority or ''}", log.calls)

    @contextmanager
    def use(stream):
        log.current.append(stream)
        yield
        log.current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: log.current[-1])
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(
        torch.cuda,
        "is_current_stream_capturing",
        lambda: log.current[-1].name in log.captured,
    )
    streams._cuda_stream.cache_clear()
    yield log
    streams._cuda_stream.cache_clear()


def test_a_side_stream_starts_after_earlier_work_and_can_be_waited_for(log):
    like = torch.zeros(1).as_subclass(OnGPU)
    with streams.on_stream(like, SLOW):
        log.work()
    log.work()
    streams.wait_for(like, SLOW)
    with streams.on_stream(like, QUICK):
        log.work()
    assert log.calls == [
        "a waits for main",
        "a works",
        "main works",
        "main waits for a",
        "b2 waits for main",
        "b2 works",
    ]


def test_a_graph_does_not_wait_for_a_stream_without_work_in_the_graph(log):
    like = torch.zeros(1).as_subclass(OnGPU)
    for stream in (SLOW, QUICK):
        with streams.on_stream(like, stream):
            log.work()
    log.captured |= {"main", "b2"}
    log.calls.clear()
    streams.wait_for(like, SLOW)
    assert log.calls == []
    streams.wait_for(like, QUICK)
    assert log.calls == ["main waits for b2"]


def test_without_a_gpu_work_runs_in_program_order(log):
    like = torch.zeros(1)
    with streams.on_stream(like, SLOW):
        log.work()
    streams.wait_for(like, SLOW)
    assert log.calls == ["main works"]
