"""Inspection of datasets: summary, invalid episodes, misaligned actions; statistics."""

from __future__ import annotations

import numpy as np
import pytest
from episode_helpers import ACTION, SCALED, make_episode, write_hdf5, write_npz

from reverie.api import UserError
from reverie.datasets import statistics
from reverie.datasets.convert import convert
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.inspect import inspect_episodes
from reverie.datasets.readers import npz
from reverie.datasets.readers.key_map import KeyMap
from reverie.datasets.readers.metadata import DatasetMetadata
from reverie.spaces import Space


def test_a_valid_dataset_is_summarized_without_problems(tmp_path):
    write_npz(tmp_path, (5, 30, 12))
    report = inspect_episodes(open_episodes(tmp_path))
    assert report.is_ok
    assert report.lengths == [6, 31, 13]
    assert report.returns == [1, 1, 1]
    assert report.terminal == 3
    low, high = report.ranges["action"]
    assert -1 <= low < 0 < high <= 1
    text = report.describe()
    for word in ("3 episodes", "uint8 8x8x3", "float32 2", "No problems found"):
        assert word in text
    assert inspect_episodes(open_episodes(tmp_path), 2).inspected == 2


def test_invalid_episodes_are_listed(tmp_path):
    write_npz(tmp_path, (5, 9, 12))
    (tmp_path / "demo_1-10.npz").write_bytes(b"PK")
    mixed = make_episode(6, size=9)
    npz.write_npz_episode(tmp_path, "demo_7", mixed, ACTION)
    report = inspect_episodes(open_episodes(tmp_path))
    assert set(report.bad) == {"demo_1", "demo_7"}
    assert "(9, 9, 3), expected (8, 8, 3)" in report.bad["demo_7"]
    assert "invalid: demo_1 cannot be read" in report.describe()
    for i in range(20, 40):
        (tmp_path / f"demo_{i}-3.npz").write_bytes(b"")
    assert "... and 14 more" in inspect_episodes(open_episodes(tmp_path)).describe()


@pytest.mark.parametrize(("shift", "word"), [(1, "late"), (-1, "early")])
def test_actions_shifted_by_one_row_are_detected(tmp_path, shift, word):
    for i in range(4):
        episode = make_episode(20, seed=i)
        episode["action"] = np.roll(episode["action"], shift, 0)
        npz.write_npz_episode(tmp_path, f"demo_{i}", episode, ACTION)
    (warning,) = inspect_episodes(open_episodes(tmp_path)).warnings
    assert f"one row too {word}" in warning
    assert "Fix: store" in warning


def test_a_key_map_is_suggested_for_hdf5(tmp_path):
    pytest.importorskip("h5py")
    from reverie.datasets.robomimic import write_robomimic

    late = [(f"demo_{i}", make_episode(20, seed=i)) for i in range(4)]
    for _, episode in late:
        episode["action"] = np.roll(episode["action"], 1, 0)
    write_robomimic(tmp_path / "a.hdf5", late, ACTION)
    (warning,) = inspect_episodes(open_episodes(tmp_path / "a.hdf5")).warnings
    assert "--map.alignment before_obs" in warning


@pytest.mark.parametrize(
    ("shift", "alignment", "fix"),
    [
        (0, "before_obs", "read them with --map.alignment after_obs"),
        (-1, "after_obs", "store each action one row later"),
        (2, "before_obs", "store each action one row earlier"),
    ],
)
def test_the_fix_of_the_alignment_depends_on_the_key_map(
    tmp_path, shift, alignment, fix
):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        for i in range(4):
            episode = make_episode(20, seed=i)
            group = file.create_group(f"data/demo_{i}")
            group["obs/position"] = episode["position"]
            group["actions"] = np.roll(episode["action"], shift, 0)
    reader = open_episodes(path, ReaderConfig(map=KeyMap(alignment=alignment)))
    (warning,) = inspect_episodes(reader).warnings
    assert warning.endswith(f"Fix: {fix}")


def test_a_mask_with_names_without_an_episode_gives_a_warning(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.hdf5"
    write_hdf5(path, masks={"all": ["demo_0", "demo_1", "demo_2"]})
    assert inspect_episodes(open_episodes(path)).is_ok
    with h5py.File(path, "a") as file:
        file["mask/train"] = np.array(["demo_0", "demo_7", "demo_8"], "S")
    (warning,) = inspect_episodes(open_episodes(path)).warnings
    assert warning == "mask 'train' contains 2 names without an episode: demo_7, demo_8"
    with h5py.File(path, "a") as file:
        file["mask/long"] = np.array([f"demo_{i}" for i in range(10, 30)], "S")
    long = inspect_episodes(open_episodes(path)).warnings[0]
    assert "20 names" in long
    assert long.endswith("demo_17, ...")


def test_actions_outside_of_their_bounds_give_a_warning(tmp_path):
    (tmp_path / "a").mkdir()
    episodes = [make_episode(steps, seed=steps) for steps in (5, 9)]
    for number, episode in enumerate(episodes):
        episode["action"] *= 3
        npz.write_npz_episode(tmp_path / "a", f"demo_{number}", episode, ACTION)
    assert inspect_episodes(open_episodes(tmp_path / "a")).is_ok  # without bounds
    actions = np.concatenate([episode["action"][:-1] for episode in episodes])
    rows = (np.abs(actions) > 2).any(1).sum()
    assert 0 < rows < 14
    expected = f"'action' is outside of its bounds [-2, 2] in {rows} of 14 rows"
    reader = open_episodes(tmp_path / "a", ReaderConfig(action_bounds=(-2, 2)))
    assert inspect_episodes(reader).warnings == [expected]
    convert(reader, tmp_path / "b")
    converted = inspect_episodes(open_episodes(tmp_path / "b"))
    assert converted.warnings == [expected]
    assert f"  warning: {expected}" in converted.describe()
    exact = (float(actions.min()), float(actions.max()))
    reader = open_episodes(tmp_path / "a", ReaderConfig(action_bounds=exact))
    assert inspect_episodes(reader).is_ok


def test_actions_outside_of_unknown_bounds_give_a_warning(tmp_path):
    episode = make_episode(6) | {"action": np.full((7, 2), 1.5, np.float32)}
    episode["action"][0] = 0
    npz.write_npz_episode(tmp_path, "demo_0", episode, SCALED)
    spaces = {"position": Space(np.float32, (2,))}, SCALED
    DatasetMetadata(*spaces).write(tmp_path)
    (warning,) = inspect_episodes(open_episodes(tmp_path)).warnings
    assert warning == "'action' is outside of its bounds [-1, 1] in 5 of 6 rows"


def test_unusual_images_and_constant_actions_give_warnings(tmp_path):
    episode = make_episode(6) | {
        "first": np.zeros((7, 3, 16, 16), np.uint8),
        "soft": np.zeros((7, 8, 8, 3), np.float32),
        "action": np.zeros((7, 2), np.float32),
    }
    npz.write_npz_episode(tmp_path, "demo_0", episode, ACTION)
    warnings = " ".join(inspect_episodes(open_episodes(tmp_path)).warnings)
    for words in ("channels first", "stored as floats", "'action' is 0 in every row"):
        assert words in warnings


def test_statistics_match_numpy_and_are_saved(tmp_path):
    episodes = write_npz(tmp_path / "data", (5, 9, 12)).values()
    (tmp_path / "data" / "demo_9-4.npz").write_bytes(b"PK")
    found = statistics.compute_statistics(open_episodes(tmp_path / "data"))
    images = np.concatenate([e["image"] for e in episodes]) / 255
    actions = np.concatenate([e["action"][:-1] for e in episodes])
    for key, rows in (("image", images), ("action", actions)):
        expected = (rows.mean(0), rows.std(0), rows.min(0), rows.max(0))
        for found_array, array in zip(found[key], expected, strict=False):
            np.testing.assert_allclose(found_array, array, rtol=1e-5, atol=1e-6)
        assert found[key].rows == len(rows)
    path = statistics.save_statistics(tmp_path / "some.stats.npz", found)
    saved = statistics.load_statistics(path)
    assert saved.keys() == found.keys()
    for key, moments in found.items():
        for array, expected in zip(saved[key], moments, strict=True):
            np.testing.assert_array_equal(array, expected)
    assert saved["speed"].rows == 29
    with pytest.raises(UserError, match="has no statistics of a dataset"):
        statistics.load_statistics(tmp_path / "data" / "demo_0-6.npz")
    assert "speed" in statistics.format_table(found)


def test_statistics_of_cropped_images_and_of_no_episodes(tmp_path):
    write_npz(tmp_path, (5,))
    reader = open_episodes(tmp_path)

    def crop(episode):
        return {**episode, "image": episode["image"][:, 1:-1, 1:-1]}

    assert statistics.compute_statistics(reader, prepare=crop)["image"].mean.shape == (
        6,
        6,
        3,
    )
    with pytest.raises(UserError, match="no usable episode"):
        statistics.compute_statistics(reader, names=[])
