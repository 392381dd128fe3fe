"""Workers: failing runs, several workers, kill -9 and resuming."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
from campaign_helpers import make_run, make_spec, starts, steps

from reverie.api import UserError
from reverie.campaign.queue import Queue
from reverie.campaign.worker import Worker, create_campaign, run_worker
from reverie.run.folder import lock_folder
from reverie.run.signals import Interrupted


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_failing_run_is_named_and_the_others_finish(tmp_path, program, capsys):
    folder = tmp_path / "campaign"
    runs = [make_run("bad", fail=9), make_run("flaky", fail=1), make_run("good")]
    spec = create_campaign(make_spec(folder, runs, workers=2, retries=1))
    statuses = {status.run.name: status for status in run_worker(spec, program)}
    assert {name: status.state for name, status in statuses.items()} == {
        "bad": "failed",
        "flaky": "finished",
        "good": "finished",
    }
    assert [starts(folder, name) for name in statuses] == [2, 2, 1]
    table = (folder / "table.txt").read_text()
    assert "bad failed (attempt 2 of 2): The simulator is missing." in table
    assert "bad: failed: The simulator is missing." in capsys.readouterr().err
    more = create_campaign(make_spec(folder, runs, retries=3))
    run_worker(more, program)
    assert [starts(folder, name) for name in statuses] == [4, 2, 1]


def test_error_of_a_run_that_is_restarted_at_once_is_printed(tmp_path, program, capsys):
    folder = tmp_path / "campaign"
    runs = [make_run("flaky", fail=2)]
    spec = create_campaign(make_spec(folder, runs, retries=2))
    (status,) = run_worker(spec, program)
    assert (status.state, status.failures) == ("finished", 2)
    error = "flaky: failed: The simulator is missing. It will be restarted.\n"
    assert capsys.readouterr().err.count(error) == 2
    run_worker(spec, program)
    assert "failed" not in capsys.readouterr().err  # printed by the earlier command


def test_full_disk_is_reported_once_and_the_worker_tries_again(
    tmp_path, program, monkeypatch, capsys
):
    folder, failures = tmp_path / "campaign", []
    spec = create_campaign(make_spec(folder, [make_run("a"), make_run("b")]))
    originals = {name: getattr(Queue, name) for name in ("heartbeat", "end_attempt")}

    def fail_at_first(name):
        def method(*arguments, **changes):
            if failures.count(name) < 5:
                failures.append(name)
                raise OSError(f"No space left for {name}")
            return originals[name](*arguments, **changes)

        return method

    for name in originals:
        monkeypatch.setattr(Queue, name, fail_at_first(name))
    assert {status.state for status in run_worker(spec, program)} == {"finished"}
    assert [starts(folder, name) for name in ("a", "b")] == [1, 1]
    assert capsys.readouterr().err.count("No space left for") == 2


def test_several_workers_start_every_run_once(tmp_path, program):
    folder, names = tmp_path / "campaign", [f"run{i}" for i in range(8)]
    spec = make_spec(folder, [make_run(name, pace=0.01) for name in names], workers=2)
    spec = create_campaign(spec)
    threads = [
        threading.Thread(target=run_worker, args=(spec, program)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [starts(folder, name) for name in names] == [1] * 8
    assert not list((folder / "workers").iterdir())


SCRIPT = """
import pickle, sys
from reverie.campaign.worker import run_worker
spec, program = pickle.load(open(sys.argv[1], "rb"))
run_worker(spec, program)
"""


@pytest.mark.extended
@pytest.mark.skipif(
    sys.platform != "linux", reason="needs the parent-death signal of Linux"
)
def test_killed_worker_loses_nothing(tmp_path, program):
    folder = tmp_path / "campaign"
    runs = [make_run("quick"), make_run("slow", steps=40, pace=0.02)]
    spec = create_campaign(make_spec(folder, runs, workers=2))
    (tmp_path / "spec").write_bytes(pickle.dumps((spec, program)))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "spec")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    queue = Queue(folder)

    def is_half_done() -> bool:
        assert process.poll() is None
        finished = [s.run.name for s in queue.statuses() if s.state == "finished"]
        saved = folder / "runs" / "slow" / "saved"
        return finished == ["quick"] and saved.exists()

    wait_until(is_half_done)
    process.kill()
    process.wait()
    states = {status.run.name: status.state for status in queue.statuses()}
    assert states == {"quick": "finished", "slow": "lost"}
    statuses = run_worker(spec, program)
    assert [status.state for status in statuses] == ["finished", "finished"]
    assert (starts(folder, "quick"), starts(folder, "slow")) == (1, 2)
    assert {*steps(folder, "slow")} == {*range(1, 41)}
    assert len(steps(folder, "slow")) <= 41  # at most one step was repeated
    assert not (folder / "runs" / "slow" / "twice").exists()


def test_stopped_worker_saves_and_releases_its_runs(tmp_path, program):
    folder = tmp_path / "campaign"
    spec = make_spec(folder, [make_run("a", steps=1000, pace=0.02), make_run("b")])
    spec = create_campaign(spec)
    with Worker(spec, program) as worker:
        while not (folder / "runs" / "a" / "saved").exists():
            worker.step()
            time.sleep(0.01)
        worker.stopper.signal = signal.SIGINT
        pid = worker.runs[0].process.process.pid
        worker.stop_runs()
        states = [status.state for status in worker.write_table()]
        with pytest.raises(Interrupted):
            worker.stopper.raise_if_stopped()
    assert states == ["stopped", "waiting"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    (saved,) = [status for status in Queue(folder).statuses() if status.attempts]
    assert saved.failures == 0
    (folder / "runs" / "a" / "saved").write_text("998")
    assert [status.state for status in run_worker(spec, program)] == ["finished"] * 2


def test_worker_whose_run_was_taken_over_stops_it(tmp_path, program, capsys):
    folder = tmp_path / "campaign"
    spec = make_spec(folder, [make_run("a", steps=1000, pace=0.02)])
    spec = create_campaign(spec)
    with Worker(spec, program) as first:
        while not (folder / "runs" / "a" / "saved").exists():
            first.step()
            time.sleep(0.01)
        other = Queue(folder, stale_seconds=-1.0)
        other.open_worker()
        other._boot = "another machine"
        (status,) = other.statuses()
        status.state = "lost"  # as if the heartbeats had not been seen
        assert other.claim(status) is not None
        wait_until(lambda: first.write_heartbeats() or not first.runs)
    assert "a: taken over by another worker" in capsys.readouterr().err
    (status,) = other.statuses()
    assert [attempt.result for attempt in status.attempts] == [None, None]


def test_run_starts_when_an_earlier_process_has_left_its_folder(tmp_path, program):
    folder = tmp_path / "campaign"
    spec = create_campaign(make_spec(folder, [make_run("a")]))
    (folder / "runs" / "a").mkdir()
    lock = lock_folder(folder / "runs" / "a")
    with Worker(spec, program) as worker:
        for _ in range(3):
            worker.step()
        assert worker.runs[0].process is None
        lock.close()
        wait_until(lambda: worker.step() or worker.is_finished(wait=True))
    assert starts(folder, "a") == 1
    assert not (folder / "runs" / "a" / "twice").exists()


def test_worker_that_does_not_wait_ends_when_others_are_alive(tmp_path, program):
    folder = tmp_path / "campaign"
    spec = create_campaign(make_spec(folder, [make_run("a"), make_run("b")]))
    other = Queue(folder)
    other.open_worker()
    other._boot = "another machine"
    claim = other.claim(other.statuses()[1])
    with Worker(spec, program) as worker:
        wait_until(lambda: worker.step() or worker.statuses[0].state == "finished")
        assert not worker.is_finished(wait=False)  # b may have to be taken over
        other.heartbeat(claim)
        wait_until(lambda: worker.step() or worker.is_finished(wait=False))
        assert not worker.is_finished(wait=True)
    assert starts(folder, "b") == 0


def test_changed_settings_are_refused_and_new_runs_are_added(tmp_path, program):
    folder = tmp_path / "campaign"
    run_worker(create_campaign(make_spec(folder, [make_run("a")])), program)
    with pytest.raises(UserError, match="its run a is `reverie train --task a`"):
        create_campaign(make_spec(folder, [make_run("a", steps=5)]))
    spec = create_campaign(make_spec(folder, [make_run("a"), make_run("b")]))
    assert [status.state for status in run_worker(spec, program)] == ["finished"] * 2
    assert starts(folder, "a") == 1
