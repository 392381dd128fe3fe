"""Statistics over tasks and seeds, compared with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.results.benchmarks import (
    find_baseline,
    find_normalization,
    human_normalized_score,
)
from reverie.results.report import normalize_scores
from reverie.results.statistics import (
    AGGREGATES,
    aggregate,
    exceedance,
    interquartile_mean,
    mean_with_band,
    optimality_gap,
    probability_of_improvement,
)

SCORES = {"a": [0.0, 1.0], "b": [2.0, 4.0], "c": [0.5, 0.5], "d": [8.0, 0.0]}


def arrays(scores):
    return [np.array(values) for values in scores.values()]


def test_aggregates_of_a_small_table():
    # sorted: 0 0 .5 .5 1 2 4 8; the middle half is .5 .5 1 2
    values = {name: function(arrays(SCORES)) for name, function in AGGREGATES.items()}
    assert values["mean"] == pytest.approx((0.5 + 3 + 0.5 + 4) / 4)
    assert values["median"] == pytest.approx((0.5 + 3) / 2)
    assert values["IQM"] == pytest.approx(1.0)
    assert values["optimality gap"] == pytest.approx((0.5 + 0 + 0.5 + 0.5) / 4)


def test_tasks_have_the_same_weight_with_other_numbers_of_runs():
    repeated = [np.array([1.0, 1.0, 1.0]), np.array([3.0])]
    assert AGGREGATES["mean"](repeated) == 2
    # values 1 1 1 3 with weights 1/3 1/3 1/3 1: one run is left out at each end
    assert interquartile_mean(repeated) == pytest.approx(1.0)
    assert optimality_gap(repeated, target=4) == pytest.approx((3 + 1) / 2)


def test_published_aggregates_of_atari100k():
    baseline = find_baseline("dreamerv3/atari100k", ["atari100k_pong"])
    scores = {
        task: [human_normalized_score(task, x)] for task, x in baseline.scores.items()
    }
    values = {name: function(arrays(scores)) for name, function in AGGREGATES.items()}
    assert len(scores) == 26
    assert values["mean"] == pytest.approx(1.205, abs=5e-4)
    assert values["median"] == pytest.approx(0.455, abs=5e-4)
    assert values["IQM"] == pytest.approx(0.516, abs=5e-4)


@pytest.mark.parametrize(
    ("method", "published"),
    [("iris", [1.046, 0.289, 0.501, 0.512]), ("simple", [0.332, 0.134, 0.130, 0.729])],
)
def test_published_aggregates_of_single_runs(method, published):
    """Values of Micheli et al. (2023), computed with rliable from the same runs."""
    baseline = find_baseline(method, ["atari100k_pong"])
    normalization = find_normalization("episode/score", baseline.runs)
    scores = normalize_scores(baseline.runs, normalization)
    assert {len(values) for values in scores.values()} == {5}
    values = [function(arrays(scores)) for function in AGGREGATES.values()]
    assert values == pytest.approx(published, abs=5e-4)


def test_published_aggregates_of_procgen():
    scores = find_baseline("dreamerv3", ["procgen_maze"]).scores
    normalization = find_normalization("episode/score", scores)
    means = {task: [score] for task, score in scores.items()}
    values = arrays(normalize_scores(means, normalization))
    assert AGGREGATES["mean"](values) == pytest.approx(0.654, abs=5e-4)
    assert AGGREGATES["median"](values) == pytest.approx(0.711, abs=5e-4)


def test_scores_that_are_comparable_between_tasks():
    dmc = find_normalization("episode/score", ["dmc_walker_walk", "dmc_hopper_hop"])
    assert (dmc.name, dmc.target) == ("episode return", 1000)
    assert find_normalization("episode/success", ["catch", "reach"]).target == 1
    assert find_normalization("crafter_score", ["crafter_reward"]).target == 100
    for key, tasks in (
        ("episode/score", ["dmc_walker_walk", "atari_pong"]),
        ("episode/score", ["atari_no_such_game"]),
        ("episode/length", ["atari_pong"]),
        ("episode/score", []),
    ):
        assert find_normalization(key, tasks) is None


def test_intervals_contain_the_value_and_shrink_with_more_runs():
    rng = np.random.default_rng(0)
    widths = []
    for runs in (4, 64):
        scores = {task: rng.normal(1, 1, runs).tolist() for task in "abc"}
        value, low, high = aggregate(scores, AGGREGATES["mean"])
        assert low < value < high
        widths.append(high - low)
    # 1.96 standard errors of the mean of 3 x 64 values on each side, about 0.28
    assert widths[1] == pytest.approx(2 * 1.96 / np.sqrt(3 * 64), rel=0.2)
    assert widths[1] < widths[0]


def test_one_run_per_task_has_no_interval():
    value, low, high = aggregate({"a": [1.0], "b": [3.0]}, AGGREGATES["mean"])
    assert value == 2
    assert np.isnan([low, high]).all()


def test_performance_profile():
    runs = exceedance(SCORES, np.array([-1.0, 0.0, 0.5, 7.9, 8.0]))
    expected = [1, (0.5 + 1 + 1 + 0.5) / 4, (0.5 + 1 + 0 + 0.5) / 4, 0.125, 0]
    fractions, low, high = mean_with_band(runs)
    np.testing.assert_allclose(fractions, expected)
    # by hand: only resampled runs of task d change the fraction above 7.9
    np.testing.assert_allclose([low[3], high[3]], [0, 0.25])


def test_probability_of_improvement_counts_ties_as_half():
    first, second = {"a": [1.0, 2.0], "b": [0.0]}, {"a": [1.0], "b": [5.0], "c": [9.0]}
    value, low, high = probability_of_improvement(first, second)
    assert value == pytest.approx(((0.5 + 1) / 2 + 0) / 2)
    assert low <= value <= high
    with pytest.raises(ValueError, match="no task"):
        probability_of_improvement({"a": [1.0]}, {"b": [1.0]})


def test_bands_stay_in_the_range_of_the_runs():
    curves = np.array([[0.0, 1.0, 5.0], [1.0, 1.0, np.nan], [0.2, 1.0, np.nan]])
    means, low, high = mean_with_band([curves])
    np.testing.assert_allclose(means, [0.4, 1, 5])
    assert (low[:2] >= curves[:, :2].min(0)).all()
    assert (high[:2] <= curves[:, :2].max(0)).all()
    assert low[0] < high[0]
    assert low[1] == high[1] == 1
    assert np.isnan([low[2], high[2]]).all()  # one run has no interval
    assert np.isnan(mean_with_band([curves[:1]])[1:]).all()
    # a task without data at a point leaves the mean over tasks undefined
    assert np.isnan(mean_with_band([curves, curves[1:]])[0][2])


def test_normalized_scores():
    assert human_normalized_score("atari100k_boxing", 12.1) == pytest.approx(1)
    assert human_normalized_score("atari_pong", -20.7) == pytest.approx(0)
    assert human_normalized_score("catch", 1.0) is None
