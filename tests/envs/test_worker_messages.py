"""Messages between the main process and workers: deadlines and polling."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

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
    ("cores", "threads", "ranks", "workers", "expected"),
    [
        (16, "", "", 1, True),
        (16, "", "", 7, True),
        (16, "", "", 8, False),
        (2, "", "", 1, False),
        (16, "2", "", 1, False),  # the run is limited to two threads
        (4, "64", "", 1, True),
        (16, "", "4", 1, True),  # four ranks with four cores each
        (16, "", "5", 1, False),
    ],
)
def test_processes_poll_only_if_half_of_the_cores_are_free(
    cores: int,
    threads: str,
    ranks: str,
    workers: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(messages, "CPU_LIMIT", Path("no such file"))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert messages.should_poll(workers) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000\n", True), ("400000 100000\n", True), ("350000 100000\n", False)],
)
def test_the_cpu_limit_of_a_container_counts(
    limit: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(messages, "CPU_LIMIT", file)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert messages.should_poll(1) == expected
