"""Batches as tensors, with and without prefetching."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_replay import make_replay, make_rows

from reverie.replay.config import ReplayConfig, SelectorFractions
from reverie.replay.feed import ReplayFeed
from reverie.rows import Window

WINDOW = Window(3, 4, context=1)


def make_filled_replay(**options):
    replay = make_replay(200, 2, train=WINDOW, **options)
    rng = np.random.default_rng(0)
    for _ in range(60):
        replay.add(make_rows(rng, 2))
    return replay


def test_prefetching_returns_the_same_batches():
    plain = ReplayFeed(make_filled_replay(), {"train": WINDOW})
    prefetching = ReplayFeed(make_filled_replay(), {"train": WINDOW}, prefetch=True)
    for _ in range(20):
        one, two = plain("train"), prefetching("train")
        assert one.keys() == two.keys()
        for key in one:
            assert torch.equal(one[key], two[key]), key
    prefetching.close()


def test_extras_written_back_appear_at_most_one_batch_later():
    replay = make_filled_replay()
    feed = ReplayFeed(replay, {"train": WINDOW}, prefetch=True)
    feed("train")
    all_ids = torch.arange(replay.index.first, replay.index.total)
    feed.write_back(all_ids, {"deter": torch.full((len(all_ids), 300), 7.0)})
    feed("train")
    assert (feed("train")["deter"] == 7).all()
    feed.close()


def test_adding_while_prefetching_is_safe():
    replay = make_filled_replay()
    feed = ReplayFeed(replay, {"train": WINDOW}, prefetch=True)
    rng = np.random.default_rng(1)
    for _ in range(300):
        replay.add(make_rows(rng, 2))
        batch = feed("train")
        # The image repeats the reward, so partly overwritten rows would differ.
        tag = batch["image"][:, :, 0, 0, 0].float()
        assert torch.equal(tag, batch["reward"])
        assert torch.equal(batch["image"][:, :, -1, -1, -1].float(), tag)
    feed.close()


def test_priorities_reach_the_selector():
    config = ReplayConfig(
        storage="ram", online=False, fracs=SelectorFractions(0.0, 1.0, 0.0)
    )
    replay = make_filled_replay(config=config)
    feed = ReplayFeed(replay, {"train": WINDOW})
    all_ids = torch.arange(replay.index.first, replay.index.total)
    feed.prioritize(all_ids, torch.zeros(len(all_ids)))
    feed.prioritize(all_ids[40:41], torch.ones(1, dtype=torch.bfloat16))
    batch = feed("train")
    assert (batch["stepid"][0] == all_ids[40]).any()


def test_a_save_keeps_prefetched_batches(tmp_path):
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
            assert_equal(expected(name), feed(name))
    again.load(saved.save())
    assert saved.metrics()["samples"] == plain.metrics()["samples"]
    resumed = ReplayFeed(again, windows, prefetch=True)
    for _ in range(5):
        for name in windows:
            reference_batch = expected(name)
            assert_equal(reference_batch, feed(name))
            assert_equal(reference_batch, resumed(name))
    feed.close()
    resumed.close()


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key]), key


@pytest.mark.gpu
def test_batches_on_the_gpu_are_complete():
    replay, reference = make_filled_replay(), make_filled_replay()
    feed = ReplayFeed(replay, {"train": WINDOW}, "cuda", prefetch=True)
    for _ in range(50):
        batch, reference_batch = feed("train"), reference.sample("train")
        for key, value in reference_batch.items():
            assert batch[key].is_cuda
            np.testing.assert_array_equal(batch[key].cpu().numpy(), value)
    feed.close()
