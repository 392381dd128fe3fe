"""Episodes from a replay and in files, including those of dreamerv3-torch."""

from __future__ import annotations

import pickle
import zipfile

import numpy as np
import pytest
from test_replay import make_replay, make_rows

from reverie.api import UserError
from reverie.datasets.readers import npz
from reverie.replay.config import ReplayConfig
from reverie.replay.stored_episodes import stored_episodes
from reverie.rows import Window
from reverie.spaces import Space
from reverie.storage import episodes as store

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
    """An episode of ours: each row's action leads to the next row."""
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


def same(one, two):
    assert one.keys() == two.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], two[key], err_msg=key)
        assert one[key].dtype == two[key].dtype, key


@pytest.mark.parametrize("kind", list(ACTS))
@pytest.mark.parametrize("terminal", [True, False])
def test_ours_survives_a_trip_through_npz(kind, terminal, tmp_path):
    episode = make_episode(ACTS[kind], terminal=terminal)
    path = npz.write_folder_file(tmp_path, "ep", episode, ACTS[kind])
    assert path.name == "ep-7.npz"
    ((name, back),) = npz.read_folder(tmp_path, OBS, ACTS[kind])
    assert name == "ep"
    same(episode, back)


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize("odd", [False, True], ids=["plain", "odd"])
def test_npz_survives_a_trip_through_ours(kind, odd):
    rng = np.random.default_rng(0)
    theirs = {
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
        theirs["action"] = np.eye(5, dtype=np.float32)[rng.integers(0, 5, 7)]
    theirs["action"][0] = 0
    if odd:  # a time limit that says so, and an explicit is_last
        theirs["discount"][-1] = 1
        theirs["is_terminal"][:] = False
        theirs["is_last"] = np.arange(7) == 6
    ours = npz.to_ours(theirs, OBS, ACTS[kind])
    same(theirs, npz.to_theirs(ours, ACTS[kind]))


def test_an_action_moves_to_the_row_it_was_chosen_in(tmp_path):
    theirs = {
        "image": np.zeros((3, 8, 8, 3), np.uint8),
        "joints": np.zeros((3, 7), np.float32),
        "action": np.eye(5, dtype=np.float32)[[0, 3, 2]],
        "reward": np.array([0, 1, 2], np.float32),
        "is_first": np.array([1, 0, 0], np.uint8),
        "is_terminal": np.array([0, 0, 1], np.uint8),
    }
    theirs["action"][0] = 0
    ours = npz.to_ours(theirs, OBS, ACTS["discrete"])
    assert ours["action"].tolist() == [3, 2, 0]
    assert ours["reward"].tolist() == [0, 1, 2]
    assert ours["is_last"].tolist() == [False, False, True]


def test_an_unfinished_episode_stays_unfinished(tmp_path):
    episode = make_episode(ACTS["discrete"])
    episode["is_last"][-1] = episode["is_terminal"][-1] = False
    theirs = npz.to_theirs(episode, ACTS["discrete"])
    back = npz.to_ours(theirs, OBS, ACTS["discrete"])
    assert not back["is_last"].any()
    assert (theirs["discount"] == 1).all()


def test_bad_files_are_named_and_skipped(tmp_path):
    episode = make_episode(ACTS["discrete"])
    good = npz.write_folder_file(tmp_path, "a", episode, ACTS["discrete"])
    data = good.read_bytes()
    (tmp_path / "b-7.npz").write_bytes(data[: len(data) // 2])
    (tmp_path / "c-7.npz").write_bytes(b"")
    flipped = bytearray(data)
    flipped[len(data) // 3] ^= 255
    (tmp_path / "d-7.npz").write_bytes(flipped)
    other = {key: value for key, value in episode.items() if key != "joints"}
    npz.write_folder_file(tmp_path, "e", other, ACTS["discrete"])
    with pytest.warns(RuntimeWarning) as caught:
        found = [n for n, _ in npz.read_folder(tmp_path, OBS, ACTS["discrete"])]
    assert found == ["a"]
    said = "\n".join(str(warning.message) for warning in caught)
    for name in ("b-7.npz", "c-7.npz", "d-7.npz", "e-7.npz"):
        assert name in said
    assert "'joints'" in said


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_a_planted_pickle_is_refused_not_run(tmp_path):
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
        list(npz.read_folder(tmp_path, OBS, ACTS["discrete"]))


def test_reading_stops_at_the_limit_and_can_begin_with_the_newest(tmp_path):
    for i in range(5):
        episode = make_episode(ACTS["discrete"], seed=i)
        npz.write_folder_file(tmp_path, f"ep{i}", episode, ACTS["discrete"])
    arguments = (tmp_path, OBS, ACTS["discrete"])
    assert len(list(npz.read_folder(*arguments, limit=1))) == 1
    assert len(list(npz.read_folder(*arguments, limit=7))) == 2
    newest = npz.read_folder(*arguments, limit=1, newest_first=True)
    assert [name for name, _ in newest] == ["ep4"]


def test_an_empty_folder_says_so(tmp_path):
    with pytest.raises(UserError, match="holds no episodes"):
        list(npz.read_folder(tmp_path, OBS, ACTS["discrete"]))


def test_spaces_are_read_off_a_file(tmp_path):
    episode = make_episode(ACTS["continuous"])
    path = npz.write_folder_file(tmp_path, "a", episode, ACTS["continuous"])
    obs_space, act_space = npz.infer_spaces(path)
    assert {k: (s.dtype, s.shape) for k, s in obs_space.items()} == {
        k: (s.dtype, s.shape) for k, s in OBS.items()
    }
    assert act_space["action"].shape == (4,)


def test_episode_files_round_trip_and_detect_damage(tmp_path):
    episodes = {f"ep{i}": make_episode(ACTS["several"], seed=i) for i in range(3)}
    for name, episode in episodes.items():
        store.write_episode(tmp_path, name, episode)
    paths = sorted(tmp_path.iterdir())
    assert [path.stem.rsplit("-", 2)[0] for path in paths] == list(episodes)
    for path, episode in zip(paths, episodes.values(), strict=True):
        same(store.read_episode(path), episode)
    victim = sorted(tmp_path.iterdir())[1]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.raises(ValueError, match="wrong checksum"):
        store.read_episode(victim)


def test_stored_episodes_can_be_read_and_added_to_another_replay():
    rng = np.random.default_rng(0)
    window = Window(2, 3)
    replay = make_replay(100, 2, train=window)
    added = []
    for _ in range(4):
        length = int(rng.integers(4, 7))
        rows = []
        for t in range(length):
            row = make_rows(rng, 2, first=np.full(2, t == 0))
            row["is_last"][:] = t == length - 1
            replay.add(row)
            rows.append(row)
        added.append(rows)
    replay.add(make_rows(rng, 2, first=np.ones(2, bool)))  # not over yet
    episodes = list(stored_episodes(replay))
    assert len(episodes) == 8
    for i, episode in enumerate(episodes):
        slot, which = divmod(i, 4)
        want = np.stack([row["vector"][slot] for row in added[which]])
        np.testing.assert_array_equal(episode["vector"], want)
    assert len(list(stored_episodes(replay, partial=True))) == 10

    other = make_replay(1000, 2, train=window)
    for episode in episodes:
        other.add_episode({k: v for k, v in episode.items() if k != "deter"})
    assert len(other) == sum(len(e["reward"]) for e in episodes)
    for one, two in zip(episodes, stored_episodes(other), strict=True):
        np.testing.assert_array_equal(one["image"], two["image"])
        assert (two["deter"] == 0).all()
    other.add(make_rows(rng, 2))
    assert other.sample("train")["stepid"].shape == (2, 3)


def test_recorded_episodes_are_sampled_online_once():
    rng = np.random.default_rng(0)
    config = ReplayConfig(storage="ram")
    replay = make_replay(1000, 2, config, train=Window(1, 4))
    ids = []
    for _ in range(5):
        ids += replay.add_episode(make_rows(rng, 20)).tolist()
    seen = []
    while replay.metrics()["online"]:
        seen += replay.sample("train")["stepid"].reshape(-1).tolist()
    assert seen == ids


def test_choices_that_count_from_different_numbers_survive_the_round_trip():
    space = Space(np.dtype(np.int32), (2,), np.array([0, 5]), np.array([3, 8]))
    chosen = np.array([[2, 5], [0, 7], [1, 6]], np.int32)
    coded = npz._encode(chosen, space)
    assert coded.shape == (3, 6)
    assert np.array_equal(npz._decode(coded, "action", space), chosen)
