"""Staging buffers and asynchronous write-back, with simulated CUDA events."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.replay import staging
from reverie.replay.staging import AsyncWriteback, StagingBuffer, StagingPool

CPU = torch.device("cpu")


class Event:
    """A CUDA event that completes when waited for, or when `passed` is set."""

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
    monkeypatch.setattr(staging, "make_stream", lambda device: "a stream")
    monkeypatch.setattr(staging, "copy_on_stream", copy)
    return made


def test_callbacks_on_a_cpu_are_called_immediately():
    found = []
    writeback = AsyncWriteback(CPU)
    writeback.enqueue(
        {"x": torch.tensor(3)}, lambda arrays: found.append(int(arrays["x"]))
    )
    assert found == [3]
    writeback.process(0)
    writeback.clear()


def test_callbacks_are_called_in_order_and_few_copies_are_pending(events):
    found = []
    writeback = AsyncWriteback(CPU, max_pending=2)
    value = torch.zeros(2)
    for i in range(4):
        value.fill_(i)
        writeback.enqueue(
            {"x": value}, lambda arrays: found.append(float(arrays["x"][0]))
        )
    assert found == [0, 1]  # waited for, because two more are pending
    assert [event.waited_for for event in events] == [True, True, False, False]
    events[3].passed = True
    writeback.process()
    assert found == [0, 1], "the third copy is not complete"
    events[2].passed = True
    writeback.process()
    assert found == [0, 1, 2, 3]


def test_every_copy_is_waited_for_if_none_may_be_pending(events):
    found = []
    writeback = AsyncWriteback(CPU, max_pending=0)
    writeback.enqueue({"x": torch.ones(1)}, lambda arrays: found.append(1))
    assert found == [1]
    assert events[0].waited_for


def test_callbacks_of_discarded_copies_are_not_called(events):
    found = []
    writeback = AsyncWriteback(CPU, max_pending=3)
    writeback.enqueue({"x": torch.ones(1)}, lambda arrays: found.append(1))
    writeback.clear()
    writeback.process(0)
    assert found == []


def test_pinned_memory_is_reused(events):
    writeback = AsyncWriteback(CPU, max_pending=0)
    addresses = []
    for shape in (3, 3, 4, 3):
        writeback.enqueue(
            {"x": torch.ones(shape)},
            lambda arrays: addresses.append(arrays["x"].__array_interface__["data"][0]),
        )
    assert addresses[0] == addresses[1] == addresses[3]


def test_a_buffer_is_reused_only_after_the_device_has_read_it(events):
    pool = StagingPool({"x": np.zeros(3)}, CPU, depth=2)
    first = pool.acquire()
    pool.release(first)
    second = pool.acquire()
    assert second is not first
    pool.release(second)
    assert pool.acquire() is first, "the host is too far ahead and waits"
    assert events[0].waited_for
    assert not events[1].waited_for
    pool.release(first)
    events[1].passed = True
    assert pool.acquire() is second


def test_a_copy_is_complete_and_every_array_is_aligned():
    like = {"a": np.zeros((2, 3), np.uint8), "b": np.zeros(5), "c": np.zeros(1, bool)}
    buffer = StagingBuffer(like, pinned=False)
    buffer.arrays["a"][:] = 7
    buffer.arrays["b"][:] = np.arange(5)
    buffer.arrays["c"][:] = True
    sent = buffer.send(CPU)
    buffer.arrays["b"][:] = -1
    assert sent["b"].tolist() == [0, 1, 2, 3, 4]
    assert sent["a"].dtype == torch.uint8
    assert sent["c"].tolist() == [True]
    start = sent.memory.data_ptr()
    assert all((x.data_ptr() - start) % staging.ALIGN == 0 for x in sent.values())
