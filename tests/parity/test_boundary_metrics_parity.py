"""Boundary metrics against recordings of the scripts that first computed them."""

from __future__ import annotations

import numpy as np
import pytest
from vta_recording import groups, load, under

from reverie.agents.vta import boundary_metrics as metrics

DATA = load("boundary_metrics")


@pytest.mark.parametrize("case", groups(DATA, "case"))
def test_matches(case):
    """In the scripts, one boundary may be the nearest one of several events.

    They count such events and boundaries separately, and the number of pairs is between
    the two. Where both are equal, as without a tolerance, everything agrees.
    """
    data = under(DATA, f"{case}/")
    events, boundaries = data["transitions"][None], data["boundaries"][None]
    windows = under(data, "w")
    assert "0" in windows
    for tolerance, expected in windows.items():
        counts = metrics.match(events, boundaries, int(tolerance))
        found, matched = expected[2:4]
        assert matched <= counts.matched <= found
        if tolerance == "0" or found == matched:
            expected = np.delete(expected, 2)
            values = [*counts, counts.recall, counts.precision, counts.f1]
            np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize("case", groups(DATA, "case"))
def test_roc_auc(case):
    data = under(DATA, f"{case}/")
    auc = metrics.roc_auc(data["transitions"], data["scores"])
    np.testing.assert_allclose(auc, data["auc"], atol=1e-6)


def test_frame_changes():
    change = metrics.frame_change(DATA["frames"])
    np.testing.assert_allclose(change, DATA["frame_delta"], atol=1e-4)
    tenth = change >= np.percentile(change, 90)
    np.testing.assert_array_equal(tenth, DATA["frames_pct90"])
