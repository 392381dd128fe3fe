"""Tables and plots of trials."""

from __future__ import annotations

import csv

import pytest

from reverie.render.sweep import SweepAxis, draw_sweep
from reverie.sweep.search_space import NumericRange
from reverie.sweep.trials import Trial, best_trial, format_csv, format_table


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
            SweepAxis("trial", [float(k) for k in range(count)]),
            SweepAxis(
                "a.very.long.name.of.a.setting.that.does.not.fit", ["a b"] * count
            ),
            SweepAxis("lr", [10.0 ** (-k) for k in range(count)], log=True),
            SweepAxis("words", [str(k) for k in range(count)]),
        ]
        finished = [k != 1 for k in range(count)]
        plot = draw_sweep(values, finished, panels, "max", "title")
        assert plot.shape == (684, 1320, 3)
        assert len({*map(tuple, plot.reshape(-1, 3)[::97].tolist())}) > 1


@pytest.mark.parametrize(("goal", "best"), [("min", 0), ("max", 1)])
def test_best_trial_is_highlighted(goal, best):
    panels = [SweepAxis("trial", [0.0, 1.0]), SweepAxis("x", [0.0, 1.0])]
    plot = draw_sweep([1.0, 5.0], [True, True], panels, goal)[:, 440:]
    orange = abs(plot.astype(int) - [221, 124, 51]).sum(-1) < 60
    assert orange.any()
    assert (orange.nonzero()[1].mean() > 220) == bool(best)
