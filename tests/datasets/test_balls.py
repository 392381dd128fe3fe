"""Bouncing balls, generated or from files."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from reverie.api import UserError
from reverie.datasets.sequences import (
    SequenceConfig,
)
from reverie.datasets.synthetic import balls
from reverie.datasets.synthetic.chunks import ChunkedSequences
from reverie.rows import Window
from reverie.spaces import EVENT

WINDOW = Window(4, 12)


def make_balls(**settings) -> balls.BouncingBalls:
    config = SequenceConfig(**{"chunk": 16, "refresh": 5, "evaluation": 8, **settings})
    return balls.BouncingBalls(config, WINDOW, 0)


def test_a_collision_changes_the_color_of_the_ball_that_hit():
    sampler = balls.BallSampler(np.random.default_rng(0))
    track = balls.simulate(sampler, 200, 30, 2.0)
    on_wall = ((track.pos <= 3) | (track.pos >= 29)).any(-1)
    changed = np.diff(track.color, axis=1) != 0
    np.testing.assert_array_equal(changed, on_wall[:, 1:])
    np.testing.assert_array_equal(changed.any(-1), track.hit[:, 1:])
    assert not track.hit[:, 0].any()


def test_collisions_are_as_frequent_as_in_the_original():
    found = balls.make_sequences(np.random.default_rng(1), 2000, 30, 2.0)
    assert found[EVENT][:, 1:].mean() == pytest.approx(0.263, abs=0.01)


def test_a_batch_depends_only_on_its_step():
    whole, later = make_balls(), make_balls()
    batches = [whole.batch(step) for step in range(12)]
    for step in (11, 4, 7):
        again = later.batch(step)
        for key, value in batches[step].items():
            np.testing.assert_array_equal(value, again[key])
    whole.close()
    later.close()


def test_chunks_are_sampled_without_replacement_and_refreshed():
    source = make_balls(chunk=16, refresh=4)
    rows = np.concatenate([source.batch(step)["image"] for step in range(4)])
    assert len(np.unique(rows.reshape(16, -1), axis=0)) == 16
    fresh = source.batch(4)["image"]
    known = {row.tobytes() for row in rows}
    assert not any(row.tobytes() in known for row in fresh)
    source.close()


def test_without_refresh_the_first_chunk_is_kept():
    source = make_balls(chunk=8, refresh=0)
    first = np.concatenate([source.batch(step)["image"] for step in (0, 1)])
    later = np.concatenate([source.batch(step)["image"] for step in (100, 101)])
    assert {row.tobytes() for row in first} == {row.tobytes() for row in later}
    source.close()


def test_the_evaluation_set_differs_from_the_training_data():
    source = make_balls()
    seen = {row.tobytes() for step in range(5) for row in source.batch(step)["image"]}
    held = source.evaluation()
    assert len(held["image"]) == 8
    assert not any(row.tobytes() in seen for row in held["image"])
    np.testing.assert_array_equal(held["image"], source.evaluation()["image"])
    source.close()


def test_downscaled_balls_are_the_same_sequences():
    full, small = make_balls(), make_balls(side=16)
    one, two = full.batch(3), small.batch(3)
    assert two["image"].shape == (4, 12, 16, 16, 3)
    assert two["image"].dtype == small.obs_space["image"].dtype == np.uint8
    assert small.obs_space["image"].shape == (16, 16, 3)
    np.testing.assert_array_equal(one[EVENT], two[EVENT])
    corner = one["image"][:, :, 2:4, 6:8].mean((2, 3))
    np.testing.assert_allclose(two["image"][:, :, 1, 3], corner, atol=0.5)
    with pytest.raises(ValueError, match="8, 16 or 32"):
        SequenceConfig(side=20)


@pytest.mark.parametrize("refresh", [0, 4])
def test_a_chunk_is_generated_once_and_at_most_one_ahead(refresh):
    made = []

    def make(rng, count):
        made.append(rng)
        return {"x": np.arange(count)}

    chunks = ChunkedSequences(make, 8, refresh, 2, seed=0)
    for step in range(4):
        chunks.batch(step)
    chunks.close()
    assert len(made) <= (2 if refresh else 1)


def test_a_chunk_smaller_than_a_batch_is_an_error():
    with pytest.raises(UserError, match="is smaller than a batch"):
        make_balls(chunk=3)


def test_balls_are_written_and_read(tmp_path):
    assert balls.write_balls(tmp_path, train=6, test=3, length=14) == 9
    source = make_balls(folder=str(tmp_path))
    with np.load(tmp_path / "train.npz") as data:
        known = {row[:12].tobytes() for row in data["image"]}
    assert {row.tobytes() for row in source.batch(7)["image"]} <= known
    held = source.evaluation()
    assert held["image"].shape == (3, 12, 32, 32, 3)
    assert held[EVENT].shape == (3, 12)
    source.close()


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        (None, "reverie data balls --out"),
        ({"image": np.zeros((3, 14, 32, 32, 3), np.uint8)}, "event"),
        ({"image": np.zeros((3, 14)), "event": np.zeros((3, 14))}, "expected uint8"),
        (
            {
                "image": np.zeros((3, 9, 32, 32, 3), np.uint8),
                "event": np.zeros((3, 9)),
            },
            "data balls --out .* --length 12",
        ),
        (
            {
                "image": np.zeros((3, 14, 32, 32, 3), np.uint8),
                "event": np.zeros((3, 14), bool),
            },
            "3 sequences, at least 4",
        ),
        (
            {
                "image": np.zeros((4, 14, 32, 32, 3), np.uint8),
                "event": np.full((4, 14), np.nan),
            },
            "'event' of float64",
        ),
    ],
)
def test_invalid_files_of_balls_are_errors(tmp_path, arrays, complaint):
    if arrays:
        np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(UserError, match=complaint):
        make_balls(folder=str(tmp_path))


def test_existing_files_survive_a_full_disk(tmp_path, monkeypatch):
    balls.write_balls(tmp_path, train=2, test=2, length=4)
    before = (tmp_path / "train.npz").read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(UserError, match="disk is full"):
        balls.write_balls(tmp_path, train=3, test=2, length=4)
    assert (tmp_path / "train.npz").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))
