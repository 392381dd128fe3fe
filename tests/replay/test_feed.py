"""Batches as tensors, cut ahead or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_replay import make_replay, make_rows

from reverie.replay.buffer import ReplayConfig
from reverie.replay.feed import ReplayFeed
from reverie.replay.sampling import Fractions
from reverie.rows import Window

WINDOW = Window(3, 4, context=1)


def filled(**options):
    replay = make_replay(200, 2, train=WINDOW, **options)
    rng = np.random.default_rng(0)
    for _ in range(60):
        replay.add(make_rows(rng, 2))
    return replay


def test_cutting_ahead_gives_the_same_batches():
    plain = ReplayFeed(filled(), {"train": WINDOW})
    ahead = ReplayFeed(filled(), {"train": WINDOW}, prefetch=True)
    for _ in range(20):
        one, two = plain("train"), ahead("train")
        assert one.keys() == two.keys()
        for key in one:
            assert torch.equal(one[key], two[key]), key
    ahead.close()


def test_notes_written_back_show_up_at_the_latest_one_batch_later():
    replay = filled()
    feed = ReplayFeed(replay, {"train": WINDOW}, prefetch=True)
    feed("train")
    everything = torch.arange(replay.timeline.first, replay.timeline.total)
    feed.write_back(everything, {"deter": torch.full((len(everything), 300), 7.0)})
    feed("train")
    assert (feed("train")["deter"] == 7).all()
    feed.close()


def test_adding_while_batches_are_cut_ahead_is_safe():
    replay = filled()
    feed = ReplayFeed(replay, {"train": WINDOW}, prefetch=True)
    rng = np.random.default_rng(1)
    for _ in range(300):
        replay.add(make_rows(rng, 2))
        batch = feed("train")
        # the image repeats the reward, so a row overwritten half-way would show
        tag = batch["image"][:, :, 0, 0, 0].float()
        assert torch.equal(tag, batch["reward"])
        assert torch.equal(batch["image"][:, :, -1, -1, -1].float(), tag)
    feed.close()


def test_priorities_reach_the_selector():
    config = ReplayConfig(storage="ram", online=False, fracs=Fractions(0.0, 1.0, 0.0))
    replay = filled(config=config)
    feed = ReplayFeed(replay, {"train": WINDOW})
    everything = torch.arange(replay.timeline.first, replay.timeline.total)
    feed.prioritize(everything, torch.zeros(len(everything)))
    feed.prioritize(everything[40:41], torch.ones(1, dtype=torch.bfloat16))
    batch = feed("train")
    assert (batch["stepid"][0] == everything[40]).any()


def test_a_batch_cut_ahead_is_not_lost_by_a_save(tmp_path):
    windows = {
        "train": Window(4, 6, context=1, consec=2),
        "episodes": Window(3, 4, select="episodes"),
    }
    config = ReplayConfig(storage="ram", segment=16)
    plain, saved, again = (
        make_replay(100, 2, config, tmp_path / name, **windows)
        for name in ("plain", "saved", "saved")
    )
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows = make_rows(rng, 2)
        plain.add(rows)
        saved.add(rows)
    expected = ReplayFeed(plain, windows)
    feed = ReplayFeed(saved, windows, prefetch=True)
    for _ in range(3):
        for name in windows:
            equal(expected(name), feed(name))
    again.load(saved.save())
    assert saved.metrics()["samples"] == plain.metrics()["samples"]
    resumed = ReplayFeed(again, windows, prefetch=True)
    for _ in range(5):
        for name in windows:
            want = expected(name)
            equal(want, feed(name))
            equal(want, resumed(name))
    feed.close()
    resumed.close()


def equal(one, two):
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key]), key


@pytest.mark.gpu
def test_batches_reach_the_gpu_whole():
    replay, twin = filled(), filled()
    feed = ReplayFeed(replay, {"train": WINDOW}, "cuda", prefetch=True)
    for _ in range(50):
        batch, want = feed("train"), twin.sample("train")
        for key, value in want.items():
            assert batch[key].is_cuda
            np.testing.assert_array_equal(batch[key].cpu().numpy(), value)
    feed.close()
