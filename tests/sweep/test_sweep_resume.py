"""Sweeps that are stopped, killed and continued, and folders that are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from sweep_helpers import PROGRAM, choices, flags_of, make_spec, rows

from reverie.api import UserError
from reverie.run.signals import Interrupted
from reverie.sweep import search as sweep
from reverie.sweep.search_space import NumericRange
from reverie.sweep.spec import SweepConfig, SweepSpec


def test_finished_sweep_continues_with_more_trials(tmp_path, program):
    path = sweep.sweep(make_spec(tmp_path, sampler="random", trials=3), program)
    before = {row["trial"]: row for row in rows(path)}
    sweep.sweep(make_spec(tmp_path, sampler="random", trials=6), program)
    after = {row["trial"]: row for row in rows(path)}
    assert len(after) == 6
    assert {k: after[k] for k in before} == before
    assert len({row["x"] for row in after.values()}) == 6  # not the same points again
    assert (path / "trials/0000-seed0/starts").read_text() == "x"


def test_stopped_sweep_can_be_continued(tmp_path, program):
    slow = make_spec(tmp_path, settings={"pace": ["30"]}, trials=2)
    with sweep.Sweep(slow, program) as search:
        search.resume_trials()
        search.start_runs()
        runs = [search.run_folder(k, 0) for k in range(2)]
        while not all((run / "metrics.jsonl").exists() for run in runs):
            time.sleep(0.01)
        search.stopper.signal = signal.SIGTERM
        pids = [run.process.process.pid for run in search.runs]
        with pytest.raises(Interrupted):
            search.finish()
    assert not any(is_alive(pid) for pid in pids)
    before = [flags_of(run)["x"] for run in runs]
    saved = yaml.safe_load((search.path / "sweep.yaml").read_text())
    saved["settings"] = {}
    (search.path / "sweep.yaml").write_text(yaml.safe_dump(saved))
    path = sweep.sweep(make_spec(tmp_path, trials=3), program)
    assert [flags_of(run)["x"] for run in runs] == before
    assert [row["state"] for row in rows(path)] == ["done"] * 3


SCRIPT = """
import sys
from reverie.sweep.search import sweep
from reverie.sweep.search_space import CategoricalRange
from reverie.sweep.spec import SweepConfig, SweepSpec
config = SweepConfig("train", "loss", "min", sampler="grid", jobs=2, logdir=sys.argv[2])
x = CategoricalRange((("3",), ("4",), ("5",)))
ranges = {"x": x, "pace": CategoricalRange((("0",), ("30",)))}
sweep(SweepSpec(config, ranges, {}), [sys.executable, sys.argv[1]])
"""


@pytest.mark.extended
@pytest.mark.skipif(
    sys.platform != "linux", reason="needs the parent-death signal of Linux"
)
def test_killed_sweep_kills_its_runs_and_keeps_results(tmp_path, program):
    folder = tmp_path / "sweep"
    command = [sys.executable, "-c", SCRIPT, program[2], str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    # the first, third and fifth trials are quick; the others would take minutes
    slow = [folder / "trials" / f"000{k}-seed0" for k in (1, 3)]
    deadline = time.monotonic() + 120
    while not all((run / "metrics.jsonl").exists() for run in slow):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while running(str(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with (folder / "study.journal").open("a") as file:
        file.write('{"torn": ')
    (folder / "study.journal.lock").symlink_to("study.journal")
    done = {row["trial"] for row in rows(folder) if row["state"] == "done"}
    assert done == {"0", "2"}

    config = SweepConfig(
        metric="loss", goal="min", jobs=2, sampler="grid", logdir=str(folder)
    )
    ranges = {"x": choices(3, 4, 5), "pace": choices(0, 30)}
    quick = Path(program[2])
    quick.write_text(PROGRAM.replace("time.sleep", "str"))
    sweep.sweep(SweepSpec(config, ranges, {}), [sys.executable, str(quick)])
    assert [row["state"] for row in rows(folder)] == ["done"] * 6
    starts = [
        (folder / f"trials/000{k}-seed0" / "starts").read_text() for k in range(4)
    ]
    assert starts == ["x", "xx", "x", "xx"]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def running(word: str) -> list[int]:
    """Return the ids of processes with this word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def test_sweep_cannot_continue_with_other_ranges(tmp_path, program):
    sweep.sweep(make_spec(tmp_path, trials=1), program)
    with pytest.raises(UserError, match="started with ranges"):
        sweep.sweep(make_spec(tmp_path, {"x": NumericRange(0.0, 7.0)}), program)
    with pytest.raises(UserError, match="started with metric 'loss', not 'other'"):
        sweep.sweep(make_spec(tmp_path, metric="other"), program)
    with pytest.raises(UserError, match="started with settings"):
        sweep.sweep(make_spec(tmp_path, settings={"y": ["1"]}), program)


def test_run_folder_is_refused(tmp_path, program):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "config.yaml").write_text("")
    with pytest.raises(UserError, match="is the folder of a run"):
        sweep.sweep(make_spec(tmp_path), program)


def test_two_sweeps_cannot_use_the_same_folder(tmp_path, program):
    with (
        sweep.Sweep(make_spec(tmp_path), program),
        pytest.raises(UserError, match="Another process is using the sweep folder"),
    ):
        sweep.sweep(make_spec(tmp_path), program)


def test_error_names_a_damaged_journal(tmp_path, program):
    path = sweep.sweep(make_spec(tmp_path, trials=1), program)
    journal = path / "study.journal"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], "{broken", *lines[2:]]) + "\n")
    with pytest.raises(UserError, match=r"study\.journal is damaged"):
        sweep.sweep(make_spec(tmp_path, trials=2), program)


@pytest.mark.parametrize(
    "line",
    [
        '{"op_code": 99, "worker_id": "a"}',
        "[" * 100_000,
        "3",
    ],
    ids=lambda line: line[:20],
)
def test_a_line_of_another_program_in_the_journal_is_an_error(tmp_path, program, line):
    spec = make_spec(tmp_path, trials=1)
    with sweep.Sweep(spec, program):
        pass
    (journal,) = tmp_path.rglob("study.journal")
    journal.write_text(f"{journal.read_text()}{line}\n")
    with pytest.raises(UserError, match=r"study\.journal is damaged"):
        sweep.sweep(spec, program)


def test_error_without_optuna_has_the_install_command(tmp_path, program, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        UserError, match=r"needs the optuna package.*\n.*pip install -e .*\[sweep"
    ):
        sweep.sweep(make_spec(tmp_path), program)
