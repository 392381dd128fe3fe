"""Rollout ensembles: error, spread and coverage of sampled predictions."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.api import UserError
from reverie.evaluation.rollout_ensembles import (
    RolloutEnsembleConfig,
    RolloutEnsembles,
    calibrated_coverage,
    ensemble_metrics,
    ensemble_statistics,
    ensemble_table,
    sample_ensembles,
    vector_keys,
)
from reverie.render.ensemble import MAX_PANELS, PANELS, EnsembleLines, draw_ensembles
from reverie.spaces import Space

ROWS = 24


class PointModel:
    """The dynamics of a point with noise; with `late`, it uses the previous action."""

    def __init__(self, noise=0.0, late=False):
        self.obs_space = {
            "place": Space(np.float32, (2,)),
            "image": Space(np.uint8, (4, 4, 3), 0, 256),
            "count": Space(np.int32, ()),
        }
        self.act_space = {"action": Space(np.float32, (2,))}
        self.predicted_keys = list(self.obs_space)
        self.noise, self.late = noise, late
        self.seed(0)

    def seed(self, seed):
        self.rng = np.random.default_rng(seed)

    def begin(self, context):
        return context["place"][:, -1], context["action"][:, -2]

    def step(self, state, action):
        place, before = state
        taken = before if self.late else action["action"]
        place = place + taken + self.noise * self.rng.standard_normal(place.shape)
        row = {"place": place.astype(np.float32), "count": np.zeros(len(place))}
        return (place, action["action"]), row


def episode(seed=0, rows=ROWS, noise=0.0):
    rng = np.random.default_rng(seed)
    action = rng.uniform(-1, 1, (rows, 2)).astype(np.float32)
    action[-1] = 0
    moves = action[:-1] + noise * rng.standard_normal((rows - 1, 2))
    place = np.concatenate([np.zeros((1, 2)), np.cumsum(moves, 0)])
    return {
        "place": place.astype(np.float32),
        "action": action,
        "is_first": np.arange(rows) == 0,
    }


CONFIG = RolloutEnsembleConfig(samples=3, every=5, horizon=6, episodes=2)


def test_ensembles_start_every_few_rows_and_end_with_the_episode():
    ensembles, figures = sample_ensembles(PointModel(), [episode()], CONFIG, context=4)
    (points,) = ensembles.values()
    starts = np.arange(3, ROWS - 1, 5)
    assert points.rollouts.shape == (len(starts), 3, 6, 2)
    place = episode()["place"]
    np.testing.assert_allclose(points.last_obs, place[starts])
    np.testing.assert_allclose(points.truth[0], place[4:10])
    is_beyond_end = np.isnan(points.truth[-1]).all(-1)
    assert is_beyond_end.tolist() == [
        start + j >= ROWS for start in starts[-1:] for j in range(1, 7)
    ]
    assert list(figures) == ["ensemble/place"]


@pytest.mark.parametrize("late", [False, True])
def test_rollouts_start_with_the_action_of_the_last_observed_row(late):
    ensembles, _ = sample_ensembles(
        PointModel(late=late), [episode()], CONFIG, context=4
    )
    rmse = ensemble_statistics(ensembles["place"]).rmse
    assert bool(rmse.max() < 1e-5) is not late
    assert rmse.min() > 0.1 or not late


def test_a_calibrated_model_has_the_calibrated_coverage():
    config = RolloutEnsembleConfig(samples=9, every=3, horizon=5, episodes=200)
    episodes = [episode(seed, noise=0.3) for seed in range(200)]
    ensembles, _ = sample_ensembles(PointModel(noise=0.3), episodes, config, context=4)
    statistics = ensemble_statistics(ensembles["place"])
    assert calibrated_coverage(9) == pytest.approx(0.8)
    assert np.nanmean(statistics.coverage) == pytest.approx(0.8, abs=0.03)
    steps = np.sqrt(np.arange(1, 6))[:, None]
    np.testing.assert_allclose(statistics.spread / steps, 0.3, rtol=0.08)
    np.testing.assert_allclose(
        statistics.rmse, statistics.spread * np.sqrt(10 / 9), rtol=0.1
    )
    confident, _ = sample_ensembles(PointModel(noise=0.05), episodes, config, context=4)
    assert np.nanmean(ensemble_statistics(confident["place"]).coverage) < 0.3
    metrics = ensemble_metrics(ensembles)
    assert metrics["ensemble/place/copy_rmse"] > metrics["ensemble/place/rmse"]


def test_statistics_match_a_computation_by_hand():
    rollouts = np.array([[[[1.0]], [[3.0]]], [[[5.0]], [[5.0]]]])
    last_obs = np.array([[1.5], [4.0]])
    truth = np.array([[[2.5]], [[4.0]]])
    statistics = ensemble_statistics(RolloutEnsembles(truth, rollouts, last_obs))
    assert statistics.rmse.item() == pytest.approx(np.sqrt((0.5**2 + 1.0**2) / 2))
    assert statistics.spread.item() == pytest.approx(np.sqrt((2 + 0) / 2))
    assert statistics.coverage.item() == 0.5
    assert statistics.copy_rmse.item() == pytest.approx(np.sqrt((1.0**2 + 0) / 2))


def test_horizons_that_no_episode_reaches_are_nan():
    config = RolloutEnsembleConfig(samples=2, every=1, horizon=9)
    ensembles, _ = sample_ensembles(PointModel(), [episode(rows=5)], config, context=8)
    table = ensemble_table(ensembles)["place"]
    assert (table["ensembles"], table["samples"]) == (1, 2)
    assert table["rmse"][0] == pytest.approx([0, 0], abs=1e-5)
    assert np.isnan([table["rmse"][1], table["coverage"][1]]).all()


def test_only_predicted_vectors_have_ensembles():
    model = PointModel()
    assert vector_keys(model) == ["place"]
    assert vector_keys(model, ("image",)) == []
    model.predicted_keys = ["image"]
    assert sample_ensembles(model, [episode()], CONFIG, context=4) == ({}, {})
    with pytest.raises(ValueError, match="at least 2, or 0"):
        RolloutEnsembleConfig(samples=1)
    with pytest.raises(UserError, match=r"ensemble\.every must be at least 1, not 0"):
        RolloutEnsembleConfig(every=0)


def test_a_figure_has_a_panel_per_entry():
    truth = np.zeros((20, 3))
    flat = draw_ensembles(truth, [])
    with_rollouts = draw_ensembles(
        truth, [EnsembleLines(5, np.linspace(0, 1, 8)[None, :, None] * np.ones(3))]
    )
    assert flat.shape[1] == 2 * PANELS.width
    assert (flat != with_rollouts).any()
    wide = draw_ensembles(np.zeros((20, 40)), [])
    assert wide.shape[0] > flat.shape[0]
    assert wide.shape == draw_ensembles(np.zeros((20, MAX_PANELS)), []).shape
