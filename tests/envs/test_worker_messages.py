"""Messages between the main process and workers: deadlines and polling."""

from __future__ import annotations

import os
import socket
import time

import pytest

from reverie.envs.vector.workers import messages


@pytest.mark.parametrize("polls", [False, True])
def test_a_deadline_for_a_message_is_kept(polls: bool) -> None:
    one, other = socket.socketpair()
    with one, other:
        connection = messages.Connection(one, polls)
        with pytest.raises(TimeoutError):
            connection.receive(time.monotonic() + 0.2)
        messages.Connection(other).send(messages.QUIT, b"rest")
        assert connection.receive() == (messages.QUIT, b"rest")


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "expected"),
    [
        (16, "", 1, True),
        (16, "", 7, True),
        (16, "", 8, False),
        (2, "", 1, False),
        (16, "2", 1, False),  # the run is limited to two threads
        (4, "64", 1, True),
    ],
)
def test_processes_poll_only_if_half_of_the_cores_are_free(
    cores: int,
    threads: str,
    workers: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert messages.should_poll(workers) == expected
