"""Numbers about boundaries, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.agents.vta import boundary_metrics as metrics


def marks(*rows: str) -> np.ndarray:
    return np.array([[mark == "x" for mark in row] for row in rows])


EVENTS = marks("..x...x.", ".x......")


def test_counts_are_added_up_over_sequences_before_they_are_divided():
    found = metrics.match(EVENTS, marks("..x.x...", "........"))
    assert found == metrics.Match(3, 2, 1, 1)
    assert found.recall == pytest.approx(1 / 3)
    assert found.precision == pytest.approx(1 / 2)
    assert found.f1 == pytest.approx(0.4)


def test_within_one_frame_a_boundary_detects_but_does_not_cross_sequences():
    late = marks("...x...x", "..x.....")
    assert metrics.scores(EVENTS, late)["exact/f1"] == 0
    assert metrics.scores(EVENTS, late)["near/f1"] == 1
    other_row = marks("........", "..x...x.")
    assert metrics.match(EVENTS, other_row, 1).detected == 1


def test_one_boundary_between_two_events_is_matched_once():
    found = metrics.match(marks("x.x."), marks(".x.."), 1)
    assert (found.detected, found.matched) == (2, 1)
    assert found.precision == found.recall == 1


def test_a_silent_detector_has_f1_zero_and_no_events_have_none():
    nothing = np.zeros_like(EVENTS)
    assert metrics.scores(EVENTS, nothing)["exact/f1"] == 0
    assert np.isnan(metrics.scores(nothing, EVENTS)["exact/f1"])


def test_detectors_agree_beyond_chance_or_have_nothing_to_agree_about():
    assert metrics.agreement(EVENTS, EVENTS) == pytest.approx(1)
    # 16 frames, 3 and 2 marks, one of them in common: 13 agree, 11.75 by chance
    other = marks("..x.x...", "........")
    assert metrics.agreement(EVENTS, other) == pytest.approx((13 - 11.75) / 4.25)
    every = np.ones_like(EVENTS)
    assert metrics.agreement(EVENTS, every) == pytest.approx(0)
    assert metrics.agreement(every, every) == 0
    assert metrics.agreement(~every, ~every) == 0


def test_segments_are_counted_from_the_first_frame():
    seen = marks("..x..x..", "........")
    found = metrics.segment_statistics(seen)
    assert not seen[:, 0].any()  # what was given is left alone
    assert found["count"] == 2  # three and one
    assert found["length"] == 2.5  # two, three; the others do not end
    assert found["rate"] == pytest.approx(2 / 14)
    assert np.isnan(metrics.segment_statistics(marks("...."))["length"])


def test_calibration_of_a_sure_and_of_a_wrong_detector():
    sure = metrics.calibration(EVENTS, EVENTS.astype(float))
    assert sure == {"brier": 0.0, "error": 0.0, "auc": 1.0}
    wrong = metrics.calibration(EVENTS, 1 - EVENTS.astype(float))
    assert wrong == {"brier": 1.0, "error": 1.0, "auc": 0.0}
    rate = np.full(EVENTS.shape, EVENTS.mean())
    assert metrics.calibration(EVENTS, rate)["error"] == pytest.approx(0)
    assert metrics.calibration(EVENTS, rate)["auc"] == 0.5


def test_costs_are_told_by_what_happens_at_a_frame():
    cost = np.arange(16.0).reshape(2, 8)
    found = metrics.costs(EVENTS, marks("..x.x...", "........"), cost)
    assert found["boundary"] == 3  # frames 2 and 4
    assert found["event"] == 7.5  # frame 6, and frame 1 of the second row
    assert found["other"] == pytest.approx((120 - 2 - 4 - 6 - 9) / 12)
    assert np.isnan(metrics.costs(EVENTS, EVENTS, cost)["event"])


def test_baselines_stand_beside():
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


def test_periodic_baselines_find_what_is_periodic():
    events = marks(".x..x..x..x.", ".x..x..x..x.")
    found = metrics.baselines(events, np.zeros(events.shape), 1 / 3)
    assert found["periodic/exact/f1"] == 1
    assert found["same_rate/exact/f1"] == 0  # it begins with the first frame
    assert found["same_rate/near/f1"] == 1


def test_nothing_can_be_said_about_too_little():
    none, some = np.zeros(4, bool), np.array([True, False, False, False])
    rng = np.random.default_rng(0)
    assert np.isnan(metrics.area(none, np.arange(4.0)))
    assert np.isnan(metrics.effect_size(np.arange(4.0), some))
    assert np.isnan(metrics.periodic_rate(some, none))
    assert np.isnan(metrics.permutation_test(some, none, rng)).all()


def test_nothing_can_be_said_about_chances_that_are_no_numbers():
    chance = np.where(EVENTS, np.nan, 0.5)
    assert np.isnan(metrics.area(EVENTS, chance))
    found = metrics.calibration(EVENTS, chance)
    assert found.keys() == metrics.calibration(EVENTS, EVENTS.astype(float)).keys()
    assert np.isnan(list(found.values())).all()


def test_a_lonely_frame_has_not_changed():
    frame = np.full((1, 2, 2, 3), 7, np.uint8)
    np.testing.assert_array_equal(metrics.frame_change(frame), [0.0])
    np.testing.assert_array_equal(metrics.frame_change(frame[None]), [[0.0]])
