"""Work beside other work: who waits for whom, with streams that only take extras."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from reverie.nets import streams as lanes

SLOW, QUICK = lanes.Lane("slow"), lanes.Lane("quick", hurry=2)


class OnGPU(torch.Tensor):
    device = torch.device("cuda")


class Stream:
    def __init__(self, name: str, extras: list[str]):
        self.name, self.extras = name, extras

    def wait_stream(self, other: Stream) -> None:
        self.extras.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def extras(monkeypatch):
    extras: list[str] = []
    here, made = [Stream("main", extras)], iter("abc")

    def make(_, priority):
        return Stream(f"{next(made)}{-priority or ''}", extras)

    @contextmanager
    def on(stream):
        here.append(stream)
        yield
        here.pop()

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: here[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    lanes._stream.cache_clear()
    yield lambda more="": extras.append(more and f"{here[-1].name} {more}") or extras
    lanes._stream.cache_clear()


def test_a_lane_begins_after_what_was_before_and_is_waited_for(extras):
    like = torch.zeros(1).as_subclass(OnGPU)
    with lanes.beside(like, SLOW):
        extras("works")
    extras("works")
    lanes.catch_up(like, SLOW)
    with lanes.beside(like, QUICK):
        extras("works")
    assert [note for note in extras() if note] == [
        "a waits for main",
        "a works",
        "main works",
        "main waits for a",
        "b2 waits for main",
        "b2 works",
    ]


def test_elsewhere_everything_happens_where_it_is_written(extras):
    like = torch.zeros(1)
    with lanes.beside(like, SLOW):
        extras("works")
    lanes.catch_up(like, SLOW)
    assert [note for note in extras() if note] == ["main works"]
