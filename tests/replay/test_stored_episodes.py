"""Episodes read from a replay, and recorded episodes added to it."""

from __future__ import annotations

import numpy as np
from replay_episodes import stored_episodes
from test_replay import make_replay, make_rows

from reverie.replay.config import ReplayConfig
from reverie.rows import Window


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
        expected = np.stack([row["vector"][slot] for row in added[which]])
        np.testing.assert_array_equal(episode["vector"], expected)
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
