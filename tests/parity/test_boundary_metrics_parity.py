"""Boundary metrics against recordings of the scripts that first computed them."""

from __future__ import annotations

import numpy as np
import pytest
from vta_recording import groups, load, under

from reverie.agents.vta import boundary_metrics as metrics

DATA = load("boundary_metrics")


@pytest.mark.parametrize("case", groups(DATA, "case"))
def test_matches_with_tolerance(case):
    data = under(DATA, f"{case}/")
    events, boundaries = data["transitions"][None], data["boundaries"][None]
    windows = under(data, "w")
    assert windows
    for tolerance, expected in windows.items():
        counts = metrics.match(events, boundaries, int(tolerance))
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
