"""Looking through recordings: numbers, broken episodes, actions in the wrong row."""

from __future__ import annotations

import json

import numpy as np
import pytest
from walks import ACTION, walk, write_npz

from reverie.api import UserError
from reverie.datasets import statistics as stats
from reverie.datasets.inspect import survey
from reverie.datasets.readers import npz, open_reader


def test_a_sound_folder_is_described_and_nothing_is_wrong(tmp_path):
    write_npz(tmp_path, (5, 30, 12))
    found = survey(open_reader(tmp_path))
    assert found.is_fine
    assert found.lengths == [6, 31, 13]
    assert found.returns == [1, 1, 1]
    assert found.terminal == 3
    low, high = found.ranges["action"]
    assert -1 <= low < 0 < high <= 1
    text = found.describe()
    for word in ("3 episodes", "uint8 8x8x3", "float32 2", "Nothing wrong was found"):
        assert word in text
    assert survey(open_reader(tmp_path), 2).looked == 2


def test_broken_episodes_are_named(tmp_path):
    write_npz(tmp_path, (5, 9, 12))
    (tmp_path / "demo_1-10.npz").write_bytes(b"PK")
    mixed = walk(6, size=9)
    npz.write_folder_file(tmp_path, "demo_7", mixed, ACTION)
    found = survey(open_reader(tmp_path))
    assert set(found.bad) == {"demo_1", "demo_7"}
    assert "(9, 9, 3), wanted (8, 8, 3)" in found.bad["demo_7"]
    assert "wrong: demo_1 cannot be read" in found.describe()
    for i in range(20, 40):
        (tmp_path / f"demo_{i}-3.npz").write_bytes(b"")
    assert "... and 14 more" in survey(open_reader(tmp_path)).describe()


@pytest.mark.parametrize(("shift", "word"), [(1, "late"), (-1, "early")])
def test_actions_shifted_by_one_row_are_found(tmp_path, shift, word):
    for i in range(4):
        episode = walk(20, seed=i)
        episode["action"] = np.roll(episode["action"], shift, 0)
        npz.write_folder_file(tmp_path, f"demo_{i}", episode, ACTION)
    (doubt,) = survey(open_reader(tmp_path)).doubts
    assert f"one row too {word}" in doubt
    assert "Fix: record" in doubt


def test_another_key_map_is_advised_where_there_can_be_one(tmp_path):
    pytest.importorskip("h5py")
    from reverie.datasets.readers.hdf5 import write_robomimic

    late = [(f"demo_{i}", walk(20, seed=i)) for i in range(4)]
    for _, episode in late:
        episode["action"] = np.roll(episode["action"], 1, 0)
    write_robomimic(tmp_path / "a.hdf5", late, ACTION)
    (doubt,) = survey(open_reader(tmp_path / "a.hdf5")).doubts
    assert "--map.alignment led" in doubt


def test_strange_images_and_idle_actions_are_doubted(tmp_path):
    episode = walk(6) | {
        "first": np.zeros((7, 3, 16, 16), np.uint8),
        "soft": np.zeros((7, 8, 8, 3), np.float32),
        "action": np.zeros((7, 2), np.float32),
    }
    npz.write_folder_file(tmp_path, "demo_0", episode, ACTION)
    doubts = " ".join(survey(open_reader(tmp_path)).doubts)
    for words in ("channels first", "stored as floats", "'action' is 0 in every row"):
        assert words in doubts


def test_statistics_are_those_of_numpy_and_survive_a_file(tmp_path):
    episodes = write_npz(tmp_path / "data", (5, 9, 12)).values()
    (tmp_path / "data" / "demo_9-4.npz").write_bytes(b"PK")
    found = stats.measure(open_reader(tmp_path / "data"))
    images = np.concatenate([e["image"] for e in episodes]) / 255
    actions = np.concatenate([e["action"][:-1] for e in episodes])
    for key, rows in (("image", images), ("action", actions)):
        for name in ("mean", "std", "min", "max"):
            expected = getattr(rows, name)(0)
            found_array = getattr(found[key], name)
            np.testing.assert_allclose(found_array, expected, rtol=1e-5, atol=1e-6)
        assert found[key].count == len(rows)
    path = stats.save(tmp_path / "some.stats.npz", found)
    again = stats.load(path)
    assert again.keys() == found.keys()
    np.testing.assert_array_equal(again["image"].std, found["image"].std)
    assert again["speed"].count == 29
    assert "speed" in stats.table(again)
    assert "image" not in json.loads(stats.as_json(again))
    with pytest.raises(UserError, match="holds no statistics"):
        stats.load(tmp_path / "absent.npz")


def test_statistics_may_be_those_of_a_crop_and_need_an_episode(tmp_path):
    write_npz(tmp_path, (5,))
    reader = open_reader(tmp_path)

    def crop(episode):
        return {**episode, "image": episode["image"][:, 1:-1, 1:-1]}

    assert stats.measure(reader, prepare=crop)["image"].mean.shape == (6, 6, 3)
    with pytest.raises(UserError, match="no usable episode"):
        stats.measure(reader, names=[])
