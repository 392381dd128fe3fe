"""The queue: claims, heartbeats and lost workers."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
from campaign_helpers import make_run

from reverie.campaign import queue as queues
from reverie.campaign.progress import format_table, read_latest
from reverie.campaign.queue import Queue
from reverie.run.folder import is_locked

NAMES = [f"run{number}" for number in range(30)]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets; all workers of the test use it."""
    times = SimpleNamespace(now=0.0)
    monkeypatch.setattr(queues, "time", SimpleNamespace(monotonic=lambda: times.now))
    return times


def open_queue(folder, machine="") -> Queue:
    """Open the queue as a worker; with a name, as a worker on another machine."""
    queue = Queue(folder, stale_seconds=60.0)
    queue.open_worker()
    queue._boot = machine or queue._boot
    return queue


def claim_all(folder, barrier, results) -> None:
    """Try to claim all runs at the same time as other processes."""
    queue = open_queue(folder)
    statuses = queue.statuses()
    barrier.wait()
    claims = [queue.claim(status) for status in statuses]
    results.put([claim.run.name for claim in claims if claim is not None])


def states(queue: Queue) -> dict[str, str]:
    return {status.run.name: status.state for status in queue.statuses()}


def test_processes_never_claim_the_same_run(tmp_path):
    Queue(tmp_path).add([make_run(name) for name in NAMES])
    context = get_context("fork")
    results, barrier = context.SimpleQueue(), context.Barrier(4)
    processes = [
        context.Process(target=claim_all, args=(tmp_path, barrier, results))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    claimed = [name for _ in processes for name in results.get()]
    for process in processes:
        process.join()
    assert sorted(claimed) == sorted(NAMES)


def test_claim_without_heartbeat_is_taken_over_exactly_once(tmp_path, clock):
    Queue(tmp_path).add([make_run("a")])
    owner = open_queue(tmp_path, machine="first")
    claim = owner.claim(owner.statuses()[0])
    others = [open_queue(tmp_path, machine=f"other{i}") for i in range(6)]
    for other in others:
        assert states(other) == {"a": "running"}
    clock.now = 59.0
    assert owner.heartbeat(claim)
    os.utime(claim.path, (0, 0))  # the clock of its machine is wrong
    for other in others:
        assert states(other) == {"a": "running"}
    clock.now = 118.0  # 59 seconds after the heartbeat
    assert {states(other)["a"] for other in others} == {"running"}
    clock.now = 120.0
    found = [other.statuses()[0] for other in others]
    assert {status.state for status in found} == {"lost"}
    claims = []
    threads = [
        threading.Thread(target=lambda q=q, s=s: claims.append(q.claim(s)))
        for q, s in zip(others, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (new,) = [other for other in claims if other is not None]
    assert new.attempt == 1
    assert not owner.heartbeat(claim)  # it stops its run
    owner.end_attempt(claim, "failed", "too late")
    assert states(others[0]) == {"a": "running"}
    others[0].end_attempt(new, "finished")
    (status,) = owner.statuses()
    assert (status.state, status.failures, len(status.attempts)) == ("finished", 0, 2)


def test_ended_worker_of_this_machine_is_noticed_at_once(tmp_path, clock):
    Queue(tmp_path).add([make_run("a"), make_run("b")])
    owner, other = open_queue(tmp_path), open_queue(tmp_path)
    claims = [owner.claim(status) for status in owner.statuses()]
    assert states(other) == {"a": "running", "b": "running"}
    owner.end_attempt(claims[0], "finished")
    owner.close_worker()  # its lock is released, as after kill -9
    assert states(other) == {"a": "finished", "b": "lost"}


def test_end_that_is_recorded_while_the_folder_is_read_counts(tmp_path, monkeypatch):
    Queue(tmp_path).add([make_run("a")])
    owner, other = open_queue(tmp_path), open_queue(tmp_path)
    claim = owner.claim(owner.statuses()[0])
    original = queues.is_locked

    def end_now(path):
        owner.end_attempt(claim, "finished")
        owner.close_worker()
        return original(path)

    monkeypatch.setattr(queues, "is_locked", end_now)
    assert states(other) == {"a": "running"}  # and not lost
    assert states(other) == {"a": "finished"}


def test_claim_that_is_not_written_yet_belongs_to_its_worker(tmp_path, clock):
    Queue(tmp_path).add([make_run("a")])
    (tmp_path / "queue" / "a.0.claim").touch()
    other = open_queue(tmp_path)
    assert states(other) == {"a": "running"}
    clock.now = 61.0
    assert states(other) == {"a": "lost"}


def test_damaged_files_of_the_queue_do_not_stop_a_worker(tmp_path):
    Queue(tmp_path).add([make_run("a"), make_run("b")])
    (tmp_path / "queue" / "a.json").write_text("{")
    (tmp_path / "queue" / "c.json").write_text(json.dumps({"name": "../c"}))
    (tmp_path / "queue" / "b.0.claim").write_text(json.dumps([1]))
    (tmp_path / "queue" / "b.0.end").write_text("x")
    (status,) = open_queue(tmp_path).statuses()
    assert (status.run.name, status.state) == ("b", "failed")


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"result": ["x"], "seconds": "x"}',
        '{"result": "x", "seconds": 1e999}',
        '{"seconds": ' + "9" * 400 + "}",
    ],
)
def test_damaged_files_of_an_attempt_count_as_failed(tmp_path, content):
    queue = Queue(tmp_path)
    queue.add([make_run("run0")])
    (tmp_path / "queue" / "run0.0.claim").write_text(content)
    (tmp_path / "queue" / "run0.0.end").write_text(content)
    (status,) = queue.statuses()
    assert (status.state, status.seconds) == ("failed", 0.0)
    assert "failed" in format_table([status], queue, retries=2)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("run0", {"command": 3}),
        ("run0", {"frames": "x"}),
        ("..", {}),
        ("run0", {"a": 1}),
    ],
)
def test_runs_with_invalid_names_or_values_are_ignored(tmp_path, name, change):
    queue = Queue(tmp_path)
    queue.add([])
    content = asdict(make_run(name)) | change
    (tmp_path / "queue" / f"{name}.json").write_text(json.dumps(content))
    assert queue.statuses() == []


def test_pipes_in_place_of_files_do_not_block(tmp_path):
    queue = Queue(tmp_path)
    queue.add([make_run("run0")])
    folder = queue.run_folder("run0")
    folder.mkdir()
    for path in (
        tmp_path / "queue" / "run0.0.claim",
        folder / "scores.jsonl",
        folder / "metrics.jsonl",
        folder / ".lock",
    ):
        os.mkfifo(path)
    assert states(queue) == {"run0": "running"}
    assert "running" in format_table(queue.statuses(), queue, retries=2)
    assert not is_locked(folder / ".lock")


def test_numbers_in_logs_that_are_no_scores_are_ignored(tmp_path):
    line = json.dumps({"step": 10**400, "episode/score": 10**400})
    (tmp_path / "scores.jsonl").write_text(f"{line}\n{'[' * 50_000}\n")
    assert read_latest(tmp_path) == (0, None)
