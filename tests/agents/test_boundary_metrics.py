"""Boundary metrics against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.agents.vta import boundary_metrics as metrics


def marks(*rows: str) -> np.ndarray:
    return np.array([[mark == "x" for mark in row] for row in rows])


EVENTS = marks("..x...x.", ".x......")


def test_counts_are_summed_over_sequences_before_they_are_divided():
    counts = metrics.match(EVENTS, marks("..x.x...", "........"))
    assert counts == metrics.MatchCounts(3, 2, 1)
    assert counts.recall == pytest.approx(1 / 3)
    assert counts.precision == pytest.approx(1 / 2)
    assert counts.f1 == pytest.approx(0.4)


def test_the_tolerance_does_not_cross_sequences():
    late = marks("...x...x", "..x.....")
    assert metrics.scores(EVENTS, late)["exact/f1"] == 0
    assert metrics.scores(EVENTS, late)["near/f1"] == 1
    other_row = marks("........", "..x...x.")
    assert metrics.match(EVENTS, other_row, 1).matched == 1


def test_one_boundary_between_two_events_matches_one_of_them():
    counts = metrics.match(marks("x.x."), marks(".x.."), 1)
    assert counts == metrics.MatchCounts(2, 1, 1)
    assert counts.precision == 1
    assert counts.recall == 0.5


def test_an_event_takes_the_boundary_that_leaves_most_for_the_others():
    assert metrics.match(marks(".xx."), marks("xx.."), 1).matched == 2
    assert metrics.match(marks("xx.."), marks(".xx."), 1).matched == 2
    assert metrics.match(marks("xxx."), marks("..x."), 1).matched == 1
    assert metrics.match(marks("xxxx"), marks("xxxx"), 1).matched == 4


def largest_matching(events: np.ndarray, boundaries: np.ndarray, tolerance: int) -> int:
    """Size of a maximum matching, by augmenting paths."""
    targets = np.flatnonzero(boundaries)
    partner: dict[int, int] = {}

    def augment(event: int, visited: set[int]) -> bool:
        for target in targets[abs(targets - event) <= tolerance].tolist():
            if target not in visited:
                visited.add(target)
                if target not in partner or augment(partner[target], visited):
                    partner[target] = event
                    return True
        return False

    return sum(augment(event, set()) for event in np.flatnonzero(events).tolist())


@pytest.mark.parametrize("tolerance", [0, 1, 2, 3])
def test_matchings_are_as_large_as_possible(tolerance):
    rng = np.random.default_rng(tolerance)
    events, boundaries = rng.random((2, 200, 20)) < rng.random((2, 200, 1))
    pairs = zip(events, boundaries, strict=True)
    expected = sum(largest_matching(*pair, tolerance) for pair in pairs)
    assert metrics.match(events, boundaries, tolerance).matched == expected


def test_a_tolerance_never_lowers_the_scores():
    rng = np.random.default_rng(0)
    for density in np.linspace(0.05, 1, 20):
        events = rng.random((4, 30)) < 0.3
        found = metrics.scores(events, rng.random((4, 30)) < density)
        for key in ("precision", "recall", "f1"):
            assert found[f"near/{key}"] >= found[f"exact/{key}"]


def test_f1_without_boundaries_is_zero_and_without_events_nan():
    empty = np.zeros_like(EVENTS)
    assert metrics.scores(EVENTS, empty)["exact/f1"] == 0
    assert np.isnan(metrics.scores(empty, EVENTS)["exact/f1"])


def test_cohens_kappa():
    assert metrics.cohens_kappa(EVENTS, EVENTS) == pytest.approx(1)
    # 16 frames, 3 and 2 marks, one in common: 13 frames agree, 11.75 by chance
    other = marks("..x.x...", "........")
    assert metrics.cohens_kappa(EVENTS, other) == pytest.approx((13 - 11.75) / 4.25)
    every = np.ones_like(EVENTS)
    assert metrics.cohens_kappa(EVENTS, every) == pytest.approx(0)
    assert metrics.cohens_kappa(every, every) == 0
    assert metrics.cohens_kappa(~every, ~every) == 0


def test_segments_are_counted_from_the_first_frame():
    boundaries = marks("..x..x..", "........")
    statistics = metrics.segment_statistics(boundaries)
    assert not boundaries[:, 0].any()  # the input is not changed
    assert statistics["count"] == 2  # three and one
    assert statistics["length"] == 2.5  # two, three; the others do not end
    assert statistics["rate"] == pytest.approx(2 / 14)
    assert np.isnan(metrics.segment_statistics(marks("...."))["length"])


def test_calibration():
    correct = metrics.calibration(EVENTS, EVENTS.astype(float))
    assert correct == {"brier": 0.0, "error": 0.0, "auc": 1.0}
    wrong = metrics.calibration(EVENTS, 1 - EVENTS.astype(float))
    assert wrong == {"brier": 1.0, "error": 1.0, "auc": 0.0}
    rate = np.full(EVENTS.shape, EVENTS.mean())
    assert metrics.calibration(EVENTS, rate)["error"] == pytest.approx(0)
    assert metrics.calibration(EVENTS, rate)["auc"] == 0.5


def test_mean_losses():
    loss = np.arange(16.0).reshape(2, 8)
    found = metrics.mean_losses(EVENTS, marks("..x.x...", "........"), loss)
    assert found["boundary"] == 3  # frames 2 and 4
    assert found["event"] == 7.5  # frame 6, and frame 1 of the second row
    assert found["other"] == pytest.approx((120 - 2 - 4 - 6 - 9) / 12)
    assert np.isnan(metrics.mean_losses(EVENTS, EVENTS, loss)["event"])


def test_baselines():
    change = EVENTS * 10.0 + 1
    threshold = metrics.best_threshold(EVENTS, change)
    found = metrics.baselines(EVENTS, change, 0.25, threshold)
    rate = EVENTS.mean()
    assert found["all/exact/f1"] == pytest.approx(2 * rate / (1 + rate))
    assert found["none/exact/f1"] == 0
    assert found["pixels/exact/f1"] == 1
    assert found["periodic/exact/f1"] >= found["same_rate/exact/f1"]
    silent = metrics.baselines(EVENTS, change, 0.0)
    assert "pixels/exact/f1" not in silent
    assert silent["same_rate/near/f1"] == silent["none/near/f1"] == 0


def test_periodic_baselines():
    events = marks(".x..x..x..x.", ".x..x..x..x.")
    found = metrics.baselines(events, np.zeros(events.shape), 1 / 3)
    assert found["periodic/exact/f1"] == 1
    assert found["same_rate/exact/f1"] == 0  # its phase is 0
    assert found["same_rate/near/f1"] == 1


def test_the_auc_without_positives_is_nan():
    assert np.isnan(metrics.roc_auc(np.zeros(4, bool), np.arange(4.0)))


def test_calibration_of_nan_is_nan():
    probs = np.where(EVENTS, np.nan, 0.5)
    assert np.isnan(metrics.roc_auc(EVENTS, probs))
    found = metrics.calibration(EVENTS, probs)
    assert found.keys() == metrics.calibration(EVENTS, EVENTS.astype(float)).keys()
    assert np.isnan(list(found.values())).all()


def test_the_change_of_a_single_frame_is_zero():
    frame = np.full((1, 2, 2, 3), 7, np.uint8)
    np.testing.assert_array_equal(metrics.frame_change(frame), [0.0])
    np.testing.assert_array_equal(metrics.frame_change(frame[None]), [[0.0]])
