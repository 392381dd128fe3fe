"""Fans: what a world thinks may come, measured against what came."""

from __future__ import annotations

import json

import numpy as np
import pytest

from reverie.evaluation.rollout_ensembles import (
    FanConfig,
    Fans,
    expected_coverage,
    fan_metrics,
    fan_table,
    open_fans,
    spread_of,
    vectors,
)
from reverie.render.ensemble import MAX_PANELS, PANELS, EnsembleLines, draw_ensembles
from reverie.spaces import Space

ROWS = 24


class Walker:
    """A world that knows how a point moves, up to some noise; `late` by one action."""

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


CONFIG = FanConfig(samples=3, every=5, horizon=6, episodes=2)


def test_fans_begin_every_few_rows_and_end_with_the_episode():
    found, pictures = open_fans(Walker(), [episode()], CONFIG, context=4)
    (fans,) = found.values()
    starts = np.arange(3, ROWS - 1, 5)
    assert fans.threads.shape == (len(starts), 3, 6, 2)
    place = episode()["place"]
    np.testing.assert_allclose(fans.seen, place[starts])
    np.testing.assert_allclose(fans.truth[0], place[4:10])
    gone = np.isnan(fans.truth[-1]).all(-1)
    assert gone.tolist() == [
        start + j >= ROWS for start in starts[-1:] for j in range(1, 7)
    ]
    assert list(pictures) == ["fan/place"]


@pytest.mark.parametrize("late", [False, True])
def test_only_the_action_of_the_last_row_seen_opens_a_fan_in_the_right_place(late):
    found, _ = open_fans(Walker(late=late), [episode()], CONFIG, context=4)
    rmse = spread_of(found["place"]).rmse
    assert bool(rmse.max() < 1e-5) is not late
    assert rmse.min() > 0.1 or not late


def test_threads_as_good_as_the_truth_enclose_it_as_often_as_they_should():
    config = FanConfig(samples=9, every=3, horizon=5, episodes=200)
    episodes = [episode(seed, noise=0.3) for seed in range(200)]
    found, _ = open_fans(Walker(noise=0.3), episodes, config, context=4)
    told = spread_of(found["place"])
    assert expected_coverage(9) == pytest.approx(0.8)
    assert np.nanmean(told.coverage) == pytest.approx(0.8, abs=0.03)
    steps = np.sqrt(np.arange(1, 6))[:, None]
    np.testing.assert_allclose(told.spread / steps, 0.3, rtol=0.08)
    np.testing.assert_allclose(told.rmse, told.spread * np.sqrt(10 / 9), rtol=0.1)
    timid, _ = open_fans(Walker(noise=0.05), episodes, config, context=4)
    assert np.nanmean(spread_of(timid["place"]).coverage) < 0.3
    assert (
        fan_metrics(found)["fan/place/copy_rmse"] > fan_metrics(found)["fan/place/rmse"]
    )


def test_the_numbers_are_those_worked_out_by_hand():
    threads = np.array([[[[1.0]], [[3.0]]], [[[5.0]], [[5.0]]]])  # two fans of two
    fans = Fans(np.array([[[2.5]], [[4.0]]]), threads, np.array([[1.5], [4.0]]))
    told = spread_of(fans)
    assert told.rmse.item() == pytest.approx(np.sqrt((0.5**2 + 1.0**2) / 2))
    assert told.spread.item() == pytest.approx(np.sqrt((2 + 0) / 2))
    assert told.coverage.item() == 0.5
    assert told.copy_rmse.item() == pytest.approx(np.sqrt((1.0**2 + 0) / 2))


def test_horizons_that_no_episode_reaches_are_empty_and_jsonable():
    config = FanConfig(samples=2, every=1, horizon=9)
    found, _ = open_fans(Walker(), [episode(rows=5)], config, context=8)
    table = json.loads(json.dumps(fan_table(found), allow_nan=False))["place"]
    assert (table["fans"], table["samples"]) == (1, 2)
    assert table["rmse"][0] == pytest.approx([0, 0], abs=1e-5)
    assert table["rmse"][1] == table["coverage"][1] == [None, None]


def test_only_vectors_that_are_foreseen_have_fans():
    world = Walker()
    assert vectors(world) == ["place"]
    assert vectors(world, ("image",)) == []
    world.predicted_keys = ["image"]
    assert open_fans(world, [episode()], CONFIG, context=4) == ({}, {})
    with pytest.raises(ValueError, match="at least 2, or 0"):
        FanConfig(samples=1)
    with pytest.raises(ValueError, match="every, horizon and episodes"):
        FanConfig(every=0)


def test_a_picture_has_a_panel_per_entry_with_the_threads_beside_the_truth():
    truth = np.zeros((20, 3))
    flat = draw_ensembles(truth, [])
    fanned = draw_ensembles(
        truth, [EnsembleLines(5, np.linspace(0, 1, 8)[None, :, None] * np.ones(3))]
    )
    assert flat.shape[1] == 2 * PANELS.width
    assert (flat != fanned).any()
    wide = draw_ensembles(np.zeros((20, 40)), [])
    assert wide.shape[0] > flat.shape[0]
    assert wide.shape == draw_ensembles(np.zeros((20, MAX_PANELS)), []).shape
