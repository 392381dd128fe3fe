"""Recorded episodes as a sequence dataset."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from reverie.api import UserError
from reverie.datasets.episode_format import from_steps
from reverie.datasets.episodes import open_episodes
from reverie.datasets.sequences import SequenceConfig
from reverie.datasets.sequences.episodes import EpisodeSequences
from reverie.datasets.split import Subset
from reverie.rows import Window
from reverie.spaces import EVENT, Space
from reverie.storage.episodes import write_episode

WINDOW = Window(4, 12)


def make_sequences(folder, config=None):
    """Return sequences of the episodes in a folder; every tenth is held out."""
    reader = open_episodes(folder, incomplete=True)
    held_out = reader.names()[::10]
    training = [name for name in reader.names() if name not in held_out]
    readers = Subset(reader, training), Subset(reader, held_out)
    return EpisodeSequences(*readers, config or SequenceConfig(), WINDOW, 0)


def test_recorded_episodes_have_aligned_actions(tmp_path):
    rng = np.random.default_rng(0)
    for index in range(12):
        image = np.full((20, 8, 8, 3), index, np.uint8)
        action = np.arange(20, dtype=np.float32)[:, None]  # t led to row t
        reward = rng.integers(2, size=20).astype(np.float32)
        np.savez(
            tmp_path / f"e{index:02d}.npz", image=image, action=action, reward=reward
        )
    config = SequenceConfig(evaluation=40)
    source = make_sequences(tmp_path, config)
    held = source.evaluation()
    assert set(held["image"][:, 0, 0, 0, 0]) == {0, 10}
    assert not {0, 10} & set(source.batch(0)["image"][:, 0, 0, 0, 0])
    steps = np.diff(source.batch(0)["action"][..., 0])
    assert ((steps == 1) | (steps < 0)).all()  # the last row of an episode has none
    assert source.batch(0)["action"].min() >= 0
    assert source.act_space["action"].shape == (1,)
    quiet = make_sequences(tmp_path, replace(config, actions=False))
    assert quiet.act_space == {}
    assert set(quiet.batch(0)) == {"image", EVENT}
    for path in tmp_path.glob("*.npz"):
        with np.load(path) as data:
            np.savez(path, image=data["image"])
    bare = make_sequences(tmp_path, replace(config, actions=False))
    np.testing.assert_array_equal(bare.batch(0)["image"], quiet.batch(0)["image"])


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"image": np.zeros((20, 8, 8, 3), np.uint8)}, "has no 'action'"),
        ({"image": np.zeros((20, 8)), "action": np.zeros((20, 1))}, "one image"),
        (
            {
                "image": np.zeros((20, 8, 8, 3), np.uint8),
                "action": np.full((20, 1), np.nan),
            },
            "NaN or infinite",
        ),
        (
            {"image": np.zeros((5, 8, 8, 3), np.uint8), "action": np.zeros((5, 1))},
            "has 5 frames",
        ),
        (
            {"image": np.zeros((20, 8, 8, 3), np.uint8), "action": np.zeros((9, 1))},
            "numbers in 20 rows",
        ),
        (
            {"image": np.zeros((20, 8, 8, 0), np.uint8), "action": np.zeros(20)},
            "one image",
        ),
        *(
            (
                {
                    "image": np.zeros((20, 8, 8, 3), np.uint8),
                    "action": np.zeros(20),
                    **wrong,
                },
                complaint,
            )
            for wrong, complaint in (
                ({"action": np.array(1)}, "'action' is int64"),
                ({"action": np.array(["left"] * 20)}, "expected numbers"),
                ({"reward": np.zeros(5)}, "expected numbers in 20 rows"),
                ({"reward": np.array(0.0)}, "expected numbers in 20 rows"),
                ({"reward": np.array(["none"] * 20)}, "'reward' is <U4"),
                ({"reward": np.full(20, np.nan)}, "'reward' has NaN"),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_invalid_recorded_episodes_are_errors(tmp_path, arrays, complaint):
    for index in range(2):
        np.savez(tmp_path / f"e{index}.npz", **arrays)
    with pytest.raises(UserError, match=complaint):
        make_sequences(tmp_path)


def test_the_image_of_an_episode_may_have_any_name(tmp_path):
    for index in range(3):
        np.savez(tmp_path / f"e{index}.npz", camera=np.zeros((20, 8, 8, 1), np.uint8))
    config = SequenceConfig(actions=False)
    source = make_sequences(tmp_path, config)
    assert set(source.obs_space) == set(source.batch(0)) == {"camera"}


def test_recorded_episodes_must_have_the_same_shape(tmp_path):
    for index, (rows, side) in enumerate([(2, 8), (20, 8), (20, 16), (20, 16)]):
        image = np.zeros((rows, side, side, 3), np.uint8)
        np.savez(tmp_path / f"e{index}.npz", image=image, action=np.zeros(rows))
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(UserError, match=r"expected \(8, 8, 3\)"),
    ):
        make_sequences(tmp_path)


def test_episodes_without_rewards_have_no_events(tmp_path):
    arrays = {
        "image": np.zeros((20, 8, 8, 3), np.uint8),
        "action": np.zeros((20, 1)),
        "reward": np.ones((20, 1)),
    }
    for index in range(3):
        np.savez(tmp_path / f"e{index}.npz", **arrays)
    source = make_sequences(tmp_path)
    assert source.evaluation()[EVENT].all()
    del arrays["reward"]
    np.savez(tmp_path / "e1.npz", **arrays)
    source = make_sequences(tmp_path)
    assert EVENT not in source.evaluation()


def write_episodes(folder):
    """Write eleven episodes with a camera and action t in row t. One is short."""
    for index in range(11):
        rows = 4 if index == 5 else 21
        camera = np.full((rows, 8, 8, 3), index, np.uint8)
        steps = np.arange(rows - 1)
        episode = from_steps(
            {"camera": camera, "speed": np.zeros(rows)},
            {"action": steps},
            (steps % 5 == 0).astype(float),
            np.zeros(rows - 1),
        )
        write_episode(folder, f"e{index:02d}", episode)


def test_recorded_episodes_of_other_formats(tmp_path):
    write_episodes(tmp_path)
    config = SequenceConfig(evaluation=40)
    with pytest.warns(RuntimeWarning, match="1 of 9 episodes are skipped"):
        source = make_sequences(tmp_path, config)
    assert source.obs_space == {"camera": Space(np.uint8, (8, 8, 3), 0, 256)}
    batch = source.batch(0)
    assert set(batch) == {"camera", "action", EVENT}
    # The reward of a row results from the action of the row before.
    earned = batch["action"][:, :-1] % 5 == 0
    assert np.array_equal(batch[EVENT][:, 1:], earned)
    held = source.evaluation()["camera"][:, 0, 0, 0, 0]
    assert not set(held) & set(batch["camera"][:, 0, 0, 0, 0])
    config = replace(config, actions=False)
    with pytest.warns(RuntimeWarning):
        quiet = make_sequences(tmp_path, config)
    assert (quiet.act_space, set(quiet.batch(0))) == ({}, {"camera", EVENT})


def test_two_images_are_an_error(tmp_path):
    obs = {
        "a": np.zeros((21, 8, 8, 3), np.uint8),
        "b": np.zeros((21, 8, 8, 3), np.uint8),
    }
    steps = np.zeros(20)
    for name in ("one", "two"):
        write_episode(tmp_path, name, from_steps(obs, {"action": steps}, steps, steps))
    with pytest.raises(UserError, match="Found: a, b"):
        make_sequences(tmp_path)
