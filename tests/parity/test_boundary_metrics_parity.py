"""Boundary metrics against recordings of the scripts that first computed them."""

from __future__ import annotations

import numpy as np
import pytest
from vta_recording import groups, load, under

from reverie.agents.vta import boundary_metrics as metrics

DATA = load("boundary_metrics")


@pytest.mark.parametrize("case", groups(DATA, "case"))
def test_matches_within_windows(case):
    data = under(DATA, f"{case}/")
    events, boundaries = data["transitions"][None], data["boundaries"][None]
    windows = under(data, "w")
    assert windows
    for window, theirs in windows.items():
        found = metrics.match(events, boundaries, int(window))
        ours = [*found, found.recall, found.precision, found.f1]
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("case", groups(DATA, "case"))
def test_one_sequence_against_chance(case):
    data = under(DATA, f"{case}/")
    events, boundaries = data["transitions"], data["boundaries"]
    close = np.testing.assert_allclose
    close(metrics.area(events, data["scores"]), data["auc"], atol=1e-6)
    close(metrics.effect_size(data["delta"], boundaries), data["cohen_d"], atol=1e-6)
    close(metrics.periodic_rate(events, boundaries), data["periodic"], atol=1e-6)
    ours = metrics.permutation_test(events, boundaries, np.random.default_rng(0))
    close(ours, data["perm200_seed0"], atol=1e-6)


def test_changes_of_frames():
    change = metrics.frame_change(DATA["frames"])
    np.testing.assert_allclose(change, DATA["frame_delta"], atol=1e-4)
    np.testing.assert_array_equal(metrics.peaks(change, 1.0), DATA["frames_peak1"])
    tenth = change >= np.percentile(change, 90)
    np.testing.assert_array_equal(tenth, DATA["frames_pct90"])
