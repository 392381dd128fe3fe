"""Sweeps: search spaces, results, resuming, and failed trials.

Most runs are of a small program that writes the files of a run. Its loss is smallest
at `x = 3`, and it fails for `x` above 50.
"""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from PIL import Image

from reverie.api import UserError
from reverie.cli.main import main
from reverie.render.sweep import Panel, draw_sweep
from reverie.run.signals import Interrupted
from reverie.sweep import processes, study
from reverie.sweep import search as sweep
from reverie.sweep.objective import (
    MetricNotFound,
    metric_names,
    metric_not_found,
    read_metric,
    summarize,
)
from reverie.sweep.processes import describe_exit, slot_environment
from reverie.sweep.search_space import CategoricalRange, NumericRange, parse_range
from reverie.sweep.spec import SweepConfig, SweepSpec
from reverie.sweep.trials import Trial, best_trial, format_csv, format_table

PROGRAM = """
import json, os, pathlib, sys, time

words = sys.argv[1:]
if words[0] == "eval":
    folder = pathlib.Path(words[1])
    success = json.loads((folder / "flags.json").read_text())["x"] / 100
    result = {"summary": {"success": success}, "n": words[3]}
    (folder / "eval.json").write_text(json.dumps(result))
    sys.exit(0)
flags = {}
for word in words[1:]:
    if word.startswith("--"):
        name = word[2:]
        flags[name] = []
    else:
        flags[name].append(word)
flags = {name: " ".join(value) for name, value in flags.items()}
x, folder = float(flags["x"]), pathlib.Path(flags["logdir"])
folder.mkdir(exist_ok=True)
flags["x"], flags["group"] = x, os.environ.get("WANDB_RUN_GROUP")
(folder / "flags.json").write_text(json.dumps(flags))
with (folder / "starts").open("a") as file:
    file.write("x")
if x > 50:
    print("reverie: x is far", "too large.\\n  Fix: --x 1", sep="\\n", file=sys.stderr)
    sys.exit(2)
if x < 0:
    raise ZeroDivisionError("x")
for step in range(1, 11):
    loss = (x - 3) ** 2 + int(flags["seed"]) + 1 / step
    if flags.get("kind") == "nan":
        loss = None
    name = "other" if flags.get("kind") == "silent" else "loss"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, name: loss}) + "\\n")
    time.sleep(float(flags.get("pace", 0)))
print("done")
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(sweep, "PRUNE_SECONDS", 0.0)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, "-IS", str(path)]  # starts sooner


def make_spec(tmp_path, ranges=None, settings=None, seed=0, **changes) -> SweepSpec:
    usual = {"metric": "loss", "goal": "min", "logdir": str(tmp_path / "sweep")}
    config = SweepConfig(**{**usual, "trials": 4, "jobs": 2, **changes})
    return SweepSpec(
        config, ranges or {"x": NumericRange(0.0, 6.0)}, settings or {}, seed
    )


def choices(*values: object) -> CategoricalRange:
    return CategoricalRange(tuple((str(value),) for value in values))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


def flags_of(run: Path) -> dict[str, str]:
    return json.loads((run / "flags.json").read_text())


# Complete sweeps.


def test_sweep_writes_a_table_and_a_plot(tmp_path, program, capsys):
    path = sweep.sweep(make_spec(tmp_path), program)
    found = rows(path)
    assert sorted(row["trial"] for row in found) == list("0123")
    values = [float(row["value"]) for row in found]
    assert values == sorted(values)
    for row in found:
        assert float(row["value"]) == pytest.approx((float(row["x"]) - 3) ** 2 + 0.1)
        assert row["state"] == "done"
    out, err = capsys.readouterr()
    assert f"Best: reverie train --x {found[0]['x']}" in out
    assert out.splitlines()[1].split()[0] == found[0]["trial"]
    assert (path / "table.txt").read_text() in out
    assert err.count(", best ") == 4
    with Image.open(path / "plot.png") as image:
        assert image.size == (880, 364)


def test_bayesian_search_samples_more_near_good_values(tmp_path):
    tpe = study.Study(
        tmp_path / "journal",
        make_spec(tmp_path, {"x": NumericRange(0.0, 40.0)}, trials=40),
    )
    near = []
    while tpe.has_more:
        trial = tpe.start_trial()
        distance = abs(trial.params["x"] - 3)
        tpe.record_value(trial, 0, distance)
        tpe.complete(trial)
        near.append(distance < 5)
    assert sum(near[20:]) > sum(near[:20]) + 2


def test_grid_search_runs_every_point_once(tmp_path, program):
    ranges = {"x": NumericRange(1.0, 4.0, integer=True), "kind": choices("a", "b")}
    path = sweep.sweep(make_spec(tmp_path, ranges, sampler="grid", trials=0), program)
    points = [(row["x"], row["kind"]) for row in rows(path)]
    assert sorted(points) == [(x, kind) for x in "1234" for kind in "ab"]


def test_grid_search_stops_at_the_number_of_trials(tmp_path, program):
    ranges = {"x": NumericRange(1.0, 9.0, log=True, count=3)}
    path = sweep.sweep(make_spec(tmp_path, ranges, sampler="grid", trials=2), program)
    assert sorted(float(row["x"]) for row in rows(path)) == [1.0, pytest.approx(3.0)]


def test_objective_is_the_mean_over_seeds(tmp_path, program):
    ranges = {"x": choices(3, 5)}
    path = sweep.sweep(
        make_spec(tmp_path, ranges, sampler="grid", seeds=3, trials=0, seed=10), program
    )
    best, worst = rows(path)
    assert float(best["value"]) == pytest.approx(0.1 + 11)
    assert float(worst["value"]) == pytest.approx(0.1 + 4 + 11)
    assert float(best["std"]) == pytest.approx(math.sqrt(2 / 3))
    assert [flags_of(path / f"trials/0000-seed{k}")["seed"] for k in range(3)] == [
        "10",
        "11",
        "12",
    ]
    assert "11.10 ± 0.8165" in (path / "table.txt").read_text()


@pytest.mark.parametrize("summary", ["last", "best", "mean"])
def test_goal_max_ranks_the_largest_value_first(tmp_path, program, summary):
    ranges = {"x": choices(3, 5)}
    path = sweep.sweep(
        make_spec(
            tmp_path, ranges, sampler="grid", goal="max", summary=summary, mean_over=2
        ),
        program,
    )
    assert [row["x"] for row in rows(path)] == ["5", "3"]
    shown = {"last": 4.1, "best": 5.0, "mean": 4 + (1 / 9 + 1 / 10) / 2}
    assert float(rows(path)[0]["value"]) == pytest.approx(shown[summary])


def test_objective_can_be_an_evaluation_result(tmp_path, program):
    ranges = {"x": choices(3, 5)}
    path = sweep.sweep(
        make_spec(
            tmp_path,
            ranges,
            sampler="grid",
            metric="success",
            goal="max",
            eval="--episodes 7",
        ),
        program,
    )
    assert [row["value"] for row in rows(path)] == ["0.05", "0.03"]
    assert json.loads((path / "trials/0000-seed0/eval.json").read_text())["n"] == "7"


def test_fixed_settings_are_passed_to_every_run(tmp_path, program):
    path = sweep.sweep(
        make_spec(tmp_path, settings={"configs": ["a", "b"], "y": ["1"]}, trials=2),
        program,
    )
    for k in range(2):
        flags = flags_of(path / f"trials/000{k}-seed0")
        assert (flags["configs"], flags["y"]) == ("a b", "1")


def test_wandb_logs_the_runs_and_the_sweep(tmp_path, program, monkeypatch):
    logged: list[dict] = []

    class Run:
        def log(self, entry, step):
            logged.append({"step": step, **entry})

        def finish(self):
            logged.append({"finished": True})

    module = ModuleType("wandb")
    module.init = lambda **_: Run()
    module.Image = lambda image: image.shape
    monkeypatch.setitem(sys.modules, "wandb", module)
    path = sweep.sweep(make_spec(tmp_path, trials=2, wandb=True), program)
    assert [entry["step"] for entry in logged[:-1]] == [1, 2, 2]
    assert {"sweep/value", "sweep/best", "sweep/x"} <= set(logged[0])
    assert logged[2]["sweep/plot"] == (364, 880, 3)
    assert logged[-1] == {"finished": True}
    assert flags_of(path / "trials/0000-seed0")["logger.outputs+"] == "wandb"
    assert flags_of(path / "trials/0000-seed0")["group"] == "sweep"


# Failed trials.


def test_failed_trial_is_reported_and_the_sweep_continues(tmp_path, program, capsys):
    ranges = {"x": choices(99, -1, 3)}
    path = sweep.sweep(make_spec(tmp_path, ranges, sampler="grid"), program)
    out, err = capsys.readouterr()
    for text in (out, err, (path / "table.csv").read_text()):
        assert "x is far too large." in text
        assert "Fix" not in text
        assert "exit code 1: ZeroDivisionError: x" in text
    states = {row["x"]: row["state"] for row in rows(path)}
    assert states == {"3": "done", "99": "failed", "-1": "failed"}


def test_sweep_fails_if_all_trials_fail(tmp_path, program):
    with pytest.raises(UserError, match=r"All 2 trials failed; .*x is far too large\."):
        sweep.sweep(
            make_spec(tmp_path, {"x": choices(98, 99)}, sampler="grid"), program
        )
    assert (tmp_path / "sweep" / "table.csv").exists()


def test_nan_objective_is_a_failure(tmp_path, program):
    ranges = {"x": choices(3), "kind": choices("nan", "plain")}
    path = sweep.sweep(make_spec(tmp_path, ranges, sampler="grid", jobs=1), program)
    assert [row["state"] for row in rows(path)] == ["done", "failed"]
    assert rows(path)[1]["error"] == "loss is not finite."


def test_failed_seed_stops_the_other_seeds_of_its_trial(tmp_path, program):
    ranges = {"x": choices(99, 3)}
    path = sweep.sweep(
        make_spec(tmp_path, ranges, sampler="grid", seeds=2, jobs=1), program
    )
    assert {row["x"]: row["state"] for row in rows(path)} == {
        "3": "done",
        "99": "failed",
    }
    assert not (path / "trials/0000-seed1").exists()


def test_unknown_metric_stops_the_sweep_and_can_be_corrected(tmp_path, program):
    with pytest.raises(
        MetricNotFound, match=r"no metric 'los'\. Did you mean 'loss'\?"
    ):
        sweep.sweep(make_spec(tmp_path, metric="los", jobs=1), program)
    path = sweep.sweep(make_spec(tmp_path, jobs=1), program)
    assert [row["state"] for row in rows(path)] == ["done"] * 4
    assert (path / "trials/0000-seed0/starts").read_text() == "xx"


def test_run_without_the_metric_of_the_others_fails(tmp_path, program):
    ranges = {"x": choices(3), "kind": choices("plain", "silent")}
    path = sweep.sweep(make_spec(tmp_path, ranges, sampler="grid", jobs=1), program)
    assert [row["state"] for row in rows(path)] == ["done", "failed"]
    assert "has no metric 'loss'" in rows(path)[1]["error"]


def test_trials_worse_than_the_median_are_pruned(tmp_path, program, capsys):
    ranges = {"x": choices(3, 2, 4, 5, 30)}
    Path(program[2]).write_text(PROGRAM.replace('flags.get("pace", 0)', "x > 9"))
    path = sweep.sweep(
        make_spec(tmp_path, ranges, sampler="grid", prune=True, jobs=1, trials=0),
        program,
    )
    (worst,) = [row for row in rows(path) if row["x"] == "30"]
    assert worst["state"] == "pruned"
    lines = (path / "trials/0004-seed0/metrics.jsonl").read_text().splitlines()
    assert 3 <= len(lines) < 10
    assert [row["state"] for row in rows(path)[:4]] == ["done"] * 4
    assert "pruned at step" in capsys.readouterr().err


def test_nothing_is_pruned_before_enough_trials_are_done(tmp_path, program):
    ranges = {"x": choices(3, 2, 30), "pace": choices("0.01")}
    path = sweep.sweep(
        make_spec(tmp_path, ranges, sampler="grid", prune=True, jobs=1), program
    )
    assert [row["state"] for row in rows(path)] == ["done"] * 3


# Stopping and continuing.


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


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs the parent-death signal of Linux"
)
def test_killed_sweep_kills_its_runs_and_keeps_results(tmp_path, program):
    folder = tmp_path / "sweep"
    command = [sys.executable, "-c", SCRIPT, program[2], str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    # the first, third and fifth trials are quick; the others would take minutes
    slow = [folder / "trials" / f"000{k}-seed0" for k in (1, 3)]
    deadline = time.monotonic() + 60
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
    """Processes with this word in their command line."""
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


def test_error_without_optuna_has_the_install_command(tmp_path, program, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        UserError, match=r"needs the optuna package.*\n.*reverie\[sweep"
    ):
        sweep.sweep(make_spec(tmp_path), program)


# Processes.


def test_slots_divide_cores_and_gpus(monkeypatch):
    for name in processes.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(processes.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    if sys.platform == "linux":
        assert slot_environment(0, 2)["OMP_NUM_THREADS"] == "3"
    found = [slot_environment(slot, 3).get("CUDA_VISIBLE_DEVICES") for slot in range(3)]
    assert found == ["0", "1", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in slot_environment(0, 1)
    assert "CUDA_VISIBLE_DEVICES" not in slot_environment(0, 2, any_gpu=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert slot_environment(1, 2)["CUDA_VISIBLE_DEVICES"] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in slot_environment(0, 2)


def test_error_of_a_process_is_its_last_message():
    said = "step 3\nreverie: There is no\nsetting 'x'.\n  Fix: another\n"
    assert describe_exit(said, 2) == "There is no setting 'x'."
    assert describe_exit("Traceback\nValueError: 3\n", 1) == (
        "exit code 1: ValueError: 3"
    )
    assert describe_exit("", 2) == "exit code 2"
    assert describe_exit("", -9) == "killed by SIGKILL"


def test_process_that_does_not_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SAVE_TIMEOUT", 0.05)
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    )
    slots = processes.ProcessSlots([sys.executable, "-c", f"{code}; time.sleep(60)"], 1)
    child = slots.start([], tmp_path / "log", 0, {})
    while not (tmp_path / "log").read_text():
        time.sleep(0.01)
    child.stop()
    while child.poll() is None:
        time.sleep(0.01)
    assert child.poll() == -signal.SIGKILL


# Metrics.


def test_metrics_are_read_from_every_file_of_a_run(tmp_path):
    (tmp_path / "scores.jsonl").write_text(
        '{"step": 1, "episode/score": 2}\n{"step": 3, "episode/score": 4}\n{"torn'
    )
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 3, "episode/score": 3, "loss": null}\n{"step": 4, "loss": 0.5}\n'
    )
    curves = {"image": {"model": [1.0, 3.0, None]}}
    summary = {"success": 0.5, "loss": {"action": 0.25}, "openloop": curves}
    result = {"task": "reach", "seed": 3, "summary": summary}
    (tmp_path / "eval.json").write_text(json.dumps(result))
    assert read_metric(tmp_path, "episode/score") == [(1, 2), (3, 4)]
    loss = read_metric(tmp_path, "loss")
    assert math.isnan(loss[0][1])
    assert loss[1] == (4, 0.5)
    assert read_metric(tmp_path, "success") == [(0, 0.5)]
    assert read_metric(tmp_path, "loss/action") == [(0, 0.25)]
    assert read_metric(tmp_path, "openloop/image/model") == [(0, 2.0)]
    assert read_metric(tmp_path, "nothing") == []
    assert "step" not in metric_names(tmp_path)
    assert set(metric_names(tmp_path)) >= {"loss", "success", "loss/action"}
    assert "Did you mean 'success'?" in str(metric_not_found(tmp_path, "sucess"))


def test_series_is_summarized_as_one_number():
    points = [(1.0, 5.0), (2.0, 1.0), (3.0, 3.0), (4.0, math.nan), (5.0, 4.0)]
    assert summarize(points, "last", 1, "min") == 4
    assert summarize(points, "best", 1, "min") == 1
    assert summarize(points, "best", 1, "max") == 5
    assert summarize(points[:3], "mean", 2, "min") == 2
    assert math.isnan(summarize(points, "mean", 2, "min"))
    assert math.isnan(summarize([(1.0, math.nan)], "best", 1, "min"))


# Search spaces.


def test_range_is_integer_if_the_setting_is():
    data = {"low": 0, "high": "1e1"}
    assert parse_range("x", data, float) == NumericRange(0.0, 10.0)
    assert parse_range("x", data, int) == NumericRange(0.0, 10.0, integer=True)
    assert parse_range("x", data, int | None) == NumericRange(0.0, 10.0, integer=True)


@pytest.mark.parametrize(
    ("range_", "values"),
    [
        (NumericRange(0.0, 1.0, count=3), [0.0, 0.5, 1.0]),
        (NumericRange(0.0, 1.0, step=0.4), [0.0, 0.4, 0.8]),
        (NumericRange(1.0, 9.0, integer=True, step=4.0), [1, 5, 9]),
        (NumericRange(1.0, 64.0, integer=True, log=True, count=4), [1, 4, 16, 64]),
        (NumericRange(1.0, 2.0, integer=True, count=5), [1, 2]),
        (NumericRange(2.0, 8.0, count=1), [2.0]),
        (choices("a", "b"), ["a", "b"]),
    ],
)
def test_grid_values(range_, values):
    found = range_.grid("x")
    assert found == (values if "a" in values else pytest.approx(values))


def test_range_to_yaml_and_back():
    for range_ in (
        NumericRange(0.0, 1.0, step=0.5),
        NumericRange(1e-5, 1e-2, log=True, count=3),
        CategoricalRange((("1", "2"), ("a b",))),
    ):
        assert parse_range(
            "x", yaml.safe_load(yaml.safe_dump(range_.to_yaml())), float
        ) == (range_)


def test_choices_can_be_lists():
    range_ = parse_range("crop", [[64, 64], "78 78"], tuple)
    assert range_.to_words(range_.grid("crop")[0]) == ["64", "64"]
    assert range_.to_words("78 78") == ["78 78"]


# Tables and plots.


def test_tables_are_sorted_from_best_to_worst():
    trials = [
        Trial(0, "failed", {"x": 1.0}, error="why, so"),
        Trial(1, "done", {"x": 1.0}, 3.0, seconds=61),
        Trial(2, "pruned", {"x": 12345.678}, 1.0),
        Trial(3, "running", {}),
        Trial(4, "done", {"x": 1.0}, 4.0, 0.5),
    ]
    ranges = {"x": NumericRange(0.0, 1.0)}
    lines = format_table(trials, ranges, "max").splitlines()
    assert [line.split()[0] for line in lines[1:6]] == list("41203")
    assert "1.235e+04" in lines[3]
    assert "1m 1s" in lines[2]
    records = list(csv.DictReader(format_csv(trials, ranges, "min").splitlines()))
    assert [record["trial"] for record in records[:3]] == ["1", "4", "2"]
    best = best_trial(trials, "min")
    assert best is not None
    assert best.number == 1
    assert best_trial(trials[:1], "min") is None


def test_plot_accepts_any_number_of_trials():
    for values in ([], [1.0], [1.0, 1.0], [0.5, 3.0, 2.0]):
        count = len(values)
        panels = [
            Panel("trial", [float(k) for k in range(count)]),
            Panel("a.very.long.name.of.a.setting.that.does.not.fit", ["a b"] * count),
            Panel("lr", [10.0 ** (-k) for k in range(count)], log=True),
            Panel("words", [str(k) for k in range(count)]),
        ]
        whole = [k != 1 for k in range(count)]
        plot = draw_sweep(values, whole, panels, "max", "title")
        assert plot.shape == (684, 1320, 3)
        assert len({*map(tuple, plot.reshape(-1, 3)[::97].tolist())}) > 1


@pytest.mark.parametrize(("goal", "place"), [("min", 0), ("max", 1)])
def test_best_trial_is_highlighted(goal, place):
    panels = [Panel("trial", [0.0, 1.0]), Panel("x", [0.0, 1.0])]
    plot = draw_sweep([1.0, 5.0], [True, True], panels, goal)[:, 440:]
    orange = abs(plot.astype(int) - [221, 124, 51]).sum(-1) < 60
    assert orange.any()
    assert (orange.nonzero()[1].mean() > 220) == bool(place)


# The command.


VALID = {
    "metric": "episode/score",
    "goal": "max",
    "ranges": {"run.train_ratio": {"low": 1, "high": 8}},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranges": {"dreamer.opt.lrr": [1]}}, "Did you mean 'dreamer.opt.lr'?"),
        ({"ranges": {}}, "has no ranges"),
        ({"ranges": None}, "has no ranges"),
        ({"ranges": [1]}, "`ranges` in"),
        ({"ranges": {"run.steps": []}}, "range of run.steps is empty"),
        ({"ranges": {"run.steps": 3}}, "range of run.steps is 3"),
        ({"ranges": {"run.steps": {"low": 5, "high": 2}}}, "5 is above 2"),
        ({"ranges": {"run.steps": {"low": 5}}}, "has no `high`"),
        ({"ranges": {"run.steps": {"low": 1, "hihg": 2}}}, "Did you mean 'high'?"),
        ({"ranges": {"run.steps": {"low": 1, "high": 2.5}}}, "a whole number"),
        ({"ranges": {"run.steps": {"low": "a", "high": 2}}}, "a whole number"),
        (
            {"ranges": {"run.train_ratio": {"low": 0, "high": 2, "log": True}}},
            "starts at 0",
        ),
        (
            {"ranges": {"run.steps": {"low": 1, "high": 2, "log": 3}}},
            "must be true or false",
        ),
        (
            {"ranges": {"run.steps": {"low": 1, "high": 2, "log": True, "step": 1}}},
            "both `log` and `step`",
        ),
        ({"ranges": {"run.steps": {"low": 1, "high": 2, "count": 0}}}, "above zero"),
        ({"ranges": {"task": {"low": 1, "high": 2}}}, "is not a number"),
        ({"ranges": {"run.steps": [10, "ten"]}}, "must be a whole number"),
        ({"ranges": {"run.steps": [{"low": 1}]}}, "is not a valid value"),
        ({"ranges": {"logdir": ["a"]}}, "sets logdir"),
        ({"ranges": {"seed": [1, 2]}, "seeds": 2}, "range of seeds"),
        ({"settings": {"run": {"train_ratio": 3}}}, "both a range and a fixed"),
        ({"settings": {"run.stps": 3}}, "Did you mean 'run.steps'?"),
        ({"settings": {"configs": ["nosuch"]}}, "no config block 'nosuch'"),
        ({"metric": ""}, "has no metric"),
        ({"goal": None}, "has no goal"),
        ({"goal": "minimise"}, "goal must be one of"),
        ({"command": "trian"}, "Did you mean 'train'?"),
        ({"command": "bench"}, "'bench' is not a training command"),
        ({"rangse": {}}, "Did you mean 'ranges'?"),
        ({"run.steps": 3}, "is a setting of runs"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"eval": "--episods 3"}, "Did you mean 'episodes'?"),
        ({"eval": "--task 'reach"}, "Cannot parse the flags"),
        (
            {"sampler": "grid", "ranges": {"run.train_ratio": {"low": 1, "high": 2}}},
            "count",
        ),
    ],
)
def test_invalid_sweep_file_is_refused_before_the_first_run(
    tmp_path, capsys, changes, words
):
    data = {k: v for k, v in {**VALID, **changes}.items() if v is not None}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(data))
    assert main(["sweep", str(path), "--logdir", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "  Fix: " in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranges: {a: [1", "is not valid"),
        ("- a", "not a mapping"),
        ("", "has no metric"),
        (None, "Cannot read the config file"),
    ],
)
def test_error_names_a_file_that_cannot_be_read(tmp_path, capsys, text, words):
    path = tmp_path / "sweep.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["sweep", str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs a YAML file"),
        (["FILE", "train", "more"], "needs a YAML file"),
        (["FILE", "--job", "2"], "Did you mean 'jobs'?"),
        (["FILE", "--jobs", "two"], "jobs must be a whole number"),
        (["FILE", "--run.train_ratio", "2"], "both a range and a fixed value"),
        (["FILE", "trian"], "Did you mean 'train'?"),
    ],
)
def test_invalid_command_line_is_refused(tmp_path, capsys, arguments, words):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(VALID))
    assert main(["sweep", *(a.replace("FILE", str(path)) for a in arguments)]) == 2
    assert words in capsys.readouterr().err


def test_sweep_command_runs_the_train_command(tmp_path, capsys):
    path, folder = tmp_path / "sweep.yaml", tmp_path / "out"
    data = {
        "metric": "episode/length",
        "goal": "min",
        "sampler": "grid",
        "settings": {"agent": "random", "run": {"log_every": 0}},
        "ranges": {"run.steps": [400], "task": ["catch", "gym_NoSuch-v0"]},
    }
    path.write_text(yaml.safe_dump(data))
    arguments = ["sweep", str(path), "train", "--jobs", "2", "--trials", "2"]
    assert main([*arguments, "--logdir", str(folder), "--seed", "5"]) == 0
    assert "Best: reverie train --agent random" in capsys.readouterr().out
    states = {row["task"]: row["state"] for row in rows(folder)}
    assert states == {"catch": "done", "gym_NoSuch-v0": "failed"}
    config = yaml.safe_load((folder / "trials/0000-seed0/config.yaml").read_text())
    assert (config["seed"], config["run"]["steps"]) == (5, 400)
    # the folder contains the specification; all trials are finished
    assert main(["sweep", "--logdir", str(folder)]) == 0
    assert len(rows(folder)) == 2
