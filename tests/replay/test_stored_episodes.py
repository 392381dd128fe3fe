"""Episodes from a replay and in files, including those of dreamerv3-torch."""

from __future__ import annotations

import numpy as np
import pytest
from test_replay import make_replay, make_rows

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
