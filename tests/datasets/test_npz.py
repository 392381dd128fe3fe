"""NPZ files of dreamerv3-torch: layout, round trips, damaged files."""

from __future__ import annotations

import pickle
import zipfile

import numpy as np
import pytest
from episode_helpers import alignment_error, write_npz
from episode_helpers import make_episode as make_moving_episode

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode
from reverie.datasets.episodes import iterate_episodes, open_episodes
from reverie.datasets.readers import evenly_spaced, natural_sort, npz
from reverie.spaces import Space

OBS = {
    "image": Space(np.dtype(np.uint8), (8, 8, 3)),
    "joints": Space(np.dtype(np.float32), (7,)),
}
ACTS = {
    "continuous": {"action": Space(np.dtype(np.float32), (4,), -1, 1)},
    "discrete": {"action": Space(np.dtype(np.int32), (), 0, 5)},
    "several": {"action": Space(np.dtype(np.int32), (3,), 0, 5)},
}


def make_episode(act_space, steps=6, seed=0, terminal=True):
    """Return an episode with random values; each action leads to the next row."""
    rng = np.random.default_rng(seed)
    rows = steps + 1
    episode = {key: space.sample(rng, rows) for key, space in OBS.items()}
    episode |= {key: space.sample(rng, rows) for key, space in act_space.items()}
    for key in act_space:
        episode[key][-1] = 0
    episode["reward"] = rng.normal(size=rows).astype(np.float32)
    episode["is_first"] = np.arange(rows) == 0
    episode["is_last"] = np.arange(rows) == steps
    episode["is_terminal"] = episode["is_last"] & terminal
    return episode


def assert_same(one, two):
    assert one.keys() == two.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], two[key], err_msg=key)
        assert one[key].dtype == two[key].dtype, key


def read_all(folder, act_space):
    return list(iterate_episodes(folder, OBS, act_space))


@pytest.mark.parametrize("kind", list(ACTS))
@pytest.mark.parametrize("terminal", [True, False])
def test_an_episode_is_unchanged_after_writing_and_reading(kind, terminal, tmp_path):
    episode = make_episode(ACTS[kind], terminal=terminal)
    path = npz.write_npz_episode(tmp_path, "ep", episode, ACTS[kind])
    assert path.name == "ep-7.npz"
    ((name, back),) = read_all(tmp_path, ACTS[kind])
    assert name == "ep"
    assert_same(episode, back)


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize("odd", [False, True], ids=["plain", "odd"])
def test_a_file_is_unchanged_after_reading_and_writing(kind, odd):
    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.integers(0, 256, (7, 8, 8, 3)).astype(np.uint8),
        "joints": rng.normal(size=(7, 7)).astype(np.float32),
        "action": rng.normal(size=(7, 4)).astype(np.float32),
        "reward": rng.normal(size=7).astype(np.float32),
        "discount": np.array([1, 1, 1, 1, 1, 1, 0], np.float32),
        "is_first": np.arange(7) == 0,
        "is_terminal": np.arange(7) == 6,
        "logprob": rng.normal(size=7).astype(np.float32),
        "log_health": rng.normal(size=7),
    }
    if kind == "discrete":
        arrays["action"] = np.eye(5, dtype=np.float32)[rng.integers(0, 5, 7)]
    arrays["action"][0] = 0
    if odd:  # a time limit with discount 1, and an explicit is_last
        arrays["discount"][-1] = 1
        arrays["is_terminal"][:] = False
        arrays["is_last"] = np.arange(7) == 6
    episode = npz.from_npz(arrays, OBS, ACTS[kind])
    assert_same(arrays, npz.to_npz(episode, ACTS[kind]))


def test_actions_move_to_the_row_in_which_they_were_chosen(tmp_path):
    arrays = {
        "image": np.zeros((3, 8, 8, 3), np.uint8),
        "joints": np.zeros((3, 7), np.float32),
        "action": np.eye(5, dtype=np.float32)[[0, 3, 2]],
        "reward": np.array([0, 1, 2], np.float32),
        "is_first": np.array([1, 0, 0], np.uint8),
        "is_terminal": np.array([0, 0, 1], np.uint8),
    }
    arrays["action"][0] = 0
    episode = npz.from_npz(arrays, OBS, ACTS["discrete"])
    assert episode["action"].tolist() == [3, 2, 0]
    assert episode["reward"].tolist() == [0, 1, 2]
    assert episode["is_last"].tolist() == [False, False, True]


def test_an_unfinished_episode_has_no_last_row(tmp_path):
    episode = make_episode(ACTS["discrete"])
    episode["is_last"][-1] = episode["is_terminal"][-1] = False
    arrays = npz.to_npz(episode, ACTS["discrete"])
    back = npz.from_npz(arrays, OBS, ACTS["discrete"])
    assert not back["is_last"].any()
    assert (arrays["discount"] == 1).all()


def test_bad_files_are_skipped_with_a_warning(tmp_path):
    episode = make_episode(ACTS["discrete"])
    good = npz.write_npz_episode(tmp_path, "a", episode, ACTS["discrete"])
    data = good.read_bytes()
    (tmp_path / "b-7.npz").write_bytes(data[: len(data) // 2])
    (tmp_path / "c-7.npz").write_bytes(b"")
    flipped = bytearray(data)
    flipped[len(data) // 3] ^= 255
    (tmp_path / "d-7.npz").write_bytes(flipped)
    other = {key: value for key, value in episode.items() if key != "joints"}
    npz.write_npz_episode(tmp_path, "e", other, ACTS["discrete"])
    with pytest.warns(RuntimeWarning) as caught:
        found = [n for n, _ in read_all(tmp_path, ACTS["discrete"])]
    assert found == ["a"]
    messages = "\n".join(str(warning.message) for warning in caught)
    for name in "bcde":
        assert f": {name} " in messages
    assert "'joints'" in messages


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_pickled_objects_are_not_loaded(tmp_path):
    with zipfile.ZipFile(tmp_path / "a-3.npz", "w") as archive:
        array = np.array([Trap()], object)
        header = b"\x93NUMPY\x01\x00"
        fields = "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        fields = fields.ljust(117) + "\n"
        body = len(fields).to_bytes(2, "little") + fields.encode() + pickle.dumps(array)
        archive.writestr("reward.npy", header + body)
    (tmp_path / "b-3.npz").write_bytes(pickle.dumps(Trap()))
    with (
        pytest.warns(RuntimeWarning, match="pickled objects"),
        pytest.raises(UserError, match="None of the 2 episodes"),
    ):
        read_all(tmp_path, ACTS["discrete"])


@pytest.mark.parametrize(
    "reward", [np.array(["one"] * 5), np.zeros(5, complex), np.float32(1)]
)
def test_rewards_that_are_no_numbers_are_bad_episodes(tmp_path, reward):
    flags = {key: np.zeros(5, bool) for key in ("is_first", "is_terminal")}
    arrays = {**flags, "reward": reward, "action": np.zeros((5, 2), np.float32)}
    np.savez(tmp_path / "episode-².npz", state=np.zeros((5, 3)), **arrays)
    with pytest.raises(UserError, match=r"expected numbers|is empty"):
        open_episodes(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no episodes in a known format"):
        read_all(tmp_path, ACTS["discrete"])


def test_spaces_are_inferred(tmp_path):
    episode = make_episode(ACTS["continuous"])
    npz.write_npz_episode(tmp_path, "a", episode, ACTS["continuous"])
    reader = open_episodes(tmp_path)
    assert {k: (s.dtype, s.shape) for k, s in reader.obs_space.items()} == {
        k: (s.dtype, s.shape) for k, s in OBS.items()
    }
    assert reader.act_space["action"].shape == (4,)


def test_discrete_actions_with_different_lower_bounds():
    space = Space(np.dtype(np.int32), (2,), np.array([0, 5]), np.array([3, 8]))
    chosen = np.array([[2, 5], [0, 7], [1, 6]], np.int32)
    coded = npz._encode(chosen, space)
    assert coded.shape == (3, 6)
    assert np.array_equal(npz._decode(coded, "action", space), chosen)


def test_npz_names_are_in_natural_order_and_lengths_need_no_suffix(tmp_path):
    write_npz(tmp_path, [4] * 11)
    (tmp_path / "demo_10-5.npz").rename(tmp_path / "demo_10.npz")
    reader = open_episodes(tmp_path)
    assert reader.names()[-2:] == ["demo_9", "demo_10"]
    assert reader.rows("demo_10") == 5
    assert natural_sort(["b2", "b10", "a"]) == ["a", "b2", "b10"]
    assert evenly_spaced(list("abcdefghij"), 3) == ["a", "e", "j"]


def test_one_hot_actions_of_npz_files_are_discrete(tmp_path):
    space = {"action": Space(np.int32, (), 0, 4)}
    episode = make_moving_episode(6) | {
        "action": np.array([3, 0, 1, 2, 2, 1, 0], np.int32)
    }
    npz.write_npz_episode(tmp_path, "a", episode, space)
    reader = open_episodes(tmp_path)
    assert reader.act_space["action"] == space["action"]
    assert_same(reader.read("a"), episode)


def test_damaged_npz_files_are_bad_episodes(tmp_path):
    write_npz(tmp_path, (5, 9, 12, 7))
    path = tmp_path / "demo_1-10.npz"
    path.write_bytes(path.read_bytes()[:200])
    with zipfile.ZipFile(tmp_path / "demo_9-4.npz", "w") as file:
        file.writestr("readme.txt", "not an array")
    (tmp_path / "demo_2-13.npz").rename(tmp_path / "demo_2-12.npz")
    reader = open_episodes(tmp_path)
    for name, complaint in (
        ("demo_1", "cannot be read"),
        ("demo_9", "has no 'reward'"),
        ("demo_2", "has 13 rows, its file name has 12"),
    ):
        with pytest.raises(BadEpisode, match=complaint):
            reader.read(name)
    assert alignment_error(reader.read("demo_0")) < 1e-5
    with pytest.raises(BadEpisode, match="cannot be read"):
        npz.read_headers(path)


def test_actions_that_are_not_one_hot_are_an_error(tmp_path):
    space = {"action": Space(np.int32, (), 0, 3)}
    episode = make_moving_episode(3) | {"action": np.array([2, 1, 0, 0], np.int32)}
    arrays = npz.to_npz(episode, space)
    for row, wrong in ((1, [0, 0, 0]), (2, [0.5, 0.5, 0]), (3, [1, 1, 0])):
        changed = arrays["action"].copy()
        changed[row] = wrong
        with pytest.raises(
            ValueError, match=f"'action' is not one-hot in step {row - 1}"
        ):
            npz.from_npz({**arrays, "action": changed}, {}, space)
