"""Memory on its way to and from a device, with a device that passes when told to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.replay import staging
from reverie.replay.staging import Mailbox, Parcel, Staging

CPU = torch.device("cpu")


class Event:
    """A moment that comes when it is waited for, or when somebody says so."""

    def __init__(self):
        self.passed = self.waited_for = False

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = self.waited_for = True


@pytest.fixture
def events(monkeypatch):
    made = []

    def record(*_):
        made.append(Event())
        return made[-1]

    def copy(source, target, stream):
        for key, value in source.items():
            target[key].copy_(value)
        return record()

    monkeypatch.setattr(staging, "record_event", record)
    monkeypatch.setattr(staging, "side_stream", lambda device: "a stream")
    monkeypatch.setattr(staging, "copy_aside", copy)
    return made


def test_letters_on_a_cpu_are_handed_over_at_once():
    found = []
    box = Mailbox(CPU)
    box.post({"x": torch.tensor(3)}, lambda arrays: found.append(int(arrays["x"])))
    assert found == [3]
    box.deliver(0)
    box.forget()


def test_letters_arrive_in_order_and_only_a_few_are_under_way(events):
    found = []
    box = Mailbox(CPU, lag=2)
    value = torch.zeros(2)
    for i in range(4):
        value.fill_(i)
        box.post({"x": value}, lambda arrays: found.append(float(arrays["x"][0])))
    assert found == [0, 1]  # waited for, as two more are under way
    assert [event.waited_for for event in events] == [True, True, False, False]
    events[3].passed = True
    box.deliver()
    assert found == [0, 1], "the third has not arrived"
    events[2].passed = True
    box.deliver()
    assert found == [0, 1, 2, 3]


def test_everything_is_waited_for_when_nothing_may_lag(events):
    found = []
    box = Mailbox(CPU, lag=0)
    box.post({"x": torch.ones(1)}, lambda arrays: found.append(1))
    assert found == [1]
    assert events[0].waited_for


def test_forgotten_letters_are_never_handed_over(events):
    found = []
    box = Mailbox(CPU, lag=3)
    box.post({"x": torch.ones(1)}, lambda arrays: found.append(1))
    box.forget()
    box.deliver(0)
    assert found == []


def test_landing_memory_is_used_again(events):
    box = Mailbox(CPU, lag=0)
    places = []
    for shape in (3, 3, 4, 3):
        box.post(
            {"x": torch.ones(shape)},
            lambda arrays: places.append(arrays["x"].__array_interface__["data"][0]),
        )
    assert places[0] == places[1] == places[3]


def test_a_parcel_is_refilled_only_after_the_device_has_read_it(events):
    staged = Staging({"x": np.zeros(3)}, CPU, depth=2)
    first = staged.take()
    staged.done(first)
    second = staged.take()
    assert second is not first
    staged.done(second)
    assert staged.take() is first, "the host is too far ahead, so it waits"
    assert events[0].waited_for
    assert not events[1].waited_for
    staged.done(first)
    events[1].passed = True
    assert staged.take() is second


def test_a_parcel_arrives_whole_with_every_array_aligned():
    like = {"a": np.zeros((2, 3), np.uint8), "b": np.zeros(5), "c": np.zeros(1, bool)}
    parcel = Parcel(like, pinned=False)
    parcel.arrays["a"][:] = 7
    parcel.arrays["b"][:] = np.arange(5)
    parcel.arrays["c"][:] = True
    sent = parcel.send(CPU)
    parcel.arrays["b"][:] = -1
    assert sent["b"].tolist() == [0, 1, 2, 3, 4]
    assert sent["a"].dtype == torch.uint8
    assert sent["c"].tolist() == [True]
    start = sent.memory.data_ptr()
    assert all((x.data_ptr() - start) % staging.ALIGN == 0 for x in sent.values())
