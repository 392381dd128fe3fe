"""Complete sweeps: samplers, seeds, objectives, failed and pruned trials."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image
from sweep_helpers import PROGRAM, choices, flags_of, make_spec, rows

from reverie.api import UserError
from reverie.sweep import search as sweep
from reverie.sweep import study
from reverie.sweep.objective import (
    MetricNotFound,
)
from reverie.sweep.search_space import NumericRange


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
