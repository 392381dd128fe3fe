"""Sampling by episode, compared to a plain list of all added steps."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.api import UserError
from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig
from reverie.replay.feed import ReplayFeed
from reverie.rows import Window
from reverie.spaces import Space
from reverie.storage.episode_windows import episode_probabilities, window_start

SPACES = {
    "action": Space(np.dtype(np.int32), (), 0, 10**6),
    "reward": Space(np.dtype(np.float32)),
    "is_first": Space(np.dtype(bool)),
    "is_last": Space(np.dtype(bool)),
    "is_terminal": Space(np.dtype(bool)),
}


def make_replay(capacity=200, streams=3, directory=None, **windows):
    return Replay(
        SPACES,
        {},
        ReplayConfig(storage="ram", segment=16),
        capacity=capacity,
        num_envs=streams,
        windows=windows,
        directory=directory,
        seed=0,
    )


class Filler:
    """Adds episodes of random lengths and keeps a list of their step ids."""

    def __init__(self, replay, streams=3, longest=20):
        self.replay, self.streams, self.longest = replay, streams, longest
        self.rng = np.random.default_rng(1)
        self.left = np.zeros(streams, int)
        self.episodes: list[list[int]] = []
        self.newest: dict[int, list[int]] = {}

    def add(self, count):
        for _ in range(count):
            slots = np.flatnonzero(self.rng.random(self.streams) < 0.8)
            if not len(slots):
                continue
            first = self.left[slots] == 0
            lengths = self.rng.integers(1, self.longest, len(slots))
            self.left[slots] = np.where(first, lengths, self.left[slots] - 1)
            zeros = np.zeros(len(slots), bool)
            ids = self.replay.add(
                {
                    "action": np.arange(len(slots), dtype=np.int32),
                    "reward": np.zeros(len(slots), np.float32),
                    "is_first": first,
                    "is_last": self.left[slots] == 0,
                    "is_terminal": zeros,
                },
                slots,
            )
            for slot, begins, step in zip(slots, first, ids, strict=True):
                if begins:
                    self.newest[slot] = []
                    self.episodes.append(self.newest[slot])
                self.newest[slot].append(int(step))

    def live(self):
        oldest = self.replay.index.first
        cut = [[i for i in rows if i >= oldest] for rows in self.episodes]
        return [rows for rows in cut if rows]


@pytest.mark.parametrize("pad", ["both", "left"])
def test_sequences_stay_in_one_episode_and_are_padded_on_the_right_sides(pad):
    window = Window(16, 7, select="episodes", pad=pad)
    replay = make_replay(train=window)
    filler = Filler(replay)
    for _ in range(40):
        filler.add(10)
        episodes = {rows[0]: rows for rows in filler.live()}
        of = {step: rows for rows in episodes.values() for step in rows}
        batch = replay.sample("train")
        for ids, mask in zip(batch["stepid"].tolist(), batch["mask"], strict=True):
            inside = [i for i, real in zip(ids, mask, strict=True) if real]
            rows = of[inside[0]]
            at = rows.index(inside[0])
            assert inside == rows[at : at + len(inside)]
            first = int(np.argmax(mask))
            assert mask[first : first + len(inside)].all()
            if first > 0:
                assert at == 0
            if not mask[-1]:
                assert pad == "both"
                assert inside[-1] == rows[-1]
            # At least one transition: a row whose next row is stored.
            assert len(inside) > 1 or (pad == "both" and inside[0] == rows[-1]) or at


def test_left_padded_sequences_end_with_a_transition():
    replay = make_replay(train=Window(64, 6, select="episodes", pad="left"))
    Filler(replay).add(60)
    assert replay.sample("train")["mask"][:, -2:].all()


def test_sequences_padded_on_both_sides_contain_a_transition():
    replay = make_replay(train=Window(64, 6, select="episodes", pad="both"))
    Filler(replay).add(60)
    mask = replay.sample("train")["mask"]
    assert (mask[:, 1:] & mask[:, :-1]).any(1).all()


def test_ready_after_one_transition():
    window = Window(4, 9, select="episodes")
    replay = make_replay(streams=1, train=window)
    filler = Filler(replay, 1, longest=3)
    feed = ReplayFeed(replay, {"train": window})
    assert not feed.ready("train")
    filler.left[:] = 0
    while len(replay) < 2:
        filler.add(1)
    assert feed.ready("train") == (len(filler.episodes) == 1)
    filler.add(6)
    assert feed.ready("train")
    assert feed("train")["mask"].shape == (4, 9)


def test_sampling_raises_if_the_last_transition_is_evicted():
    window = Window(4, 3, select="episodes")
    replay = make_replay(capacity=8, streams=1, train=window)
    row = {key: np.zeros(1, space.dtype) for key, space in SPACES.items()}
    for first in (True, False):
        replay.add({**row, "is_first": np.array([first])})
    assert replay.ready("train")
    for _ in range(8):
        replay.add({**row, "is_first": np.array([True])})
    assert not replay.ready("train")
    with pytest.raises(UserError, match="8 steps, but no two consecutive"):
        replay.sample("train")
    replay.add(row)
    assert replay.ready("train")
    assert replay.sample("train")["mask"].any()


def test_episodes_are_equally_likely_independent_of_length():
    window = Window(5000, 4, select="episodes")
    replay = make_replay(streams=3, train=window)
    filler = Filler(replay)
    filler.add(60)
    episodes = [rows for rows in filler.live() if len(rows) > 1]
    of = {step: i for i, rows in enumerate(episodes) for step in rows}
    batch = replay.sample("train")
    chosen = [of[i] for i in batch["stepid"][:, 0].tolist()]
    share = np.bincount(chosen, minlength=len(episodes)) / 5000
    np.testing.assert_allclose(share, 1 / len(episodes), atol=0.025)


def test_counted_uses_make_an_episode_less_likely():
    window = Window(8, 4, select="episodes", alpha=5.0)
    replay = make_replay(streams=1, train=window)
    filler = Filler(replay, 1)
    filler.add(100)
    sampler = replay._samplers["train"].episode_sampler
    replay.sample("train")
    assert not sampler.counts.any()  # counting is off
    replay.count_uses("train", True)
    for _ in range(40):
        replay.sample("train")
    assert sampler.counts.sum() == 8 * 40
    total = replay.index.total
    filler.left[:] = 0
    filler.add(12)  # new episodes
    batch = replay.sample("train")
    assert (batch["stepid"][:, 0] >= total).all()


def test_probabilities_decrease_with_uses():
    np.testing.assert_allclose(
        episode_probabilities(np.array([0, 1, 3]), 1.0), [4 / 7, 2 / 7, 1 / 7]
    )
    np.testing.assert_allclose(episode_probabilities(np.array([0, 9]), 0.0), [0.5, 0.5])


def test_probabilities_are_finite_for_a_large_alpha():
    counts = np.array([5, 5, 900])
    np.testing.assert_allclose(episode_probabilities(counts, 1000.0), [0.5, 0.5, 0])
    window = Window(8, 4, select="episodes", alpha=1000.0)
    replay = make_replay(streams=1, train=window)
    replay.count_uses("train", True)
    filler = Filler(replay, 1)
    filler.add(30)
    for _ in range(20):
        replay.sample("train")
    filler.left[:] = 0
    filler.add(1)  # an episode that was never sampled, but has no transition yet
    assert replay.sample("train")["mask"].any(1).all()


def test_window_start_around_a_step():
    step, offset, length = np.array([0, 3]), np.array([2, 0]), np.array([4, 4])
    assert window_start(step, offset, length, 3, "both").tolist() == [-2, 3]
    assert window_start(step, offset, length, 3, "left").tolist() == [0, 1]


def test_counts_are_saved_and_removed_with_evicted_episodes(tmp_path):
    window = Window(8, 5, select="episodes", alpha=2.0)
    replay = make_replay(capacity=120, directory=tmp_path, train=window)
    filler = Filler(replay)
    replay.count_uses("train", True)
    for _ in range(30):
        filler.add(9)
        replay.sample("train")
    state = replay.save()
    expected = [replay.sample("train") for _ in range(4)]
    again = make_replay(capacity=120, directory=tmp_path, train=window)
    again.load(state)
    for batch in expected:
        found = again.sample("train")
        for key in batch:
            np.testing.assert_array_equal(found[key], batch[key], err_msg=key)
    filler.add(20)
    replay.episodes.remove_evicted()
    assert replay.episodes.rows.sum() == 120
    lengths = [len(rows) for rows in filler.live()]
    assert sorted(replay.episodes.rows[replay.episodes.rows > 0]) == sorted(lengths)


def test_a_lost_file_loses_only_its_rows(tmp_path):
    window = Window(8, 5, select="episodes", alpha=2.0)
    replay = make_replay(capacity=120, directory=tmp_path, train=window)
    Filler(replay).add(60)
    state = replay.save()
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-1])
    again = make_replay(capacity=120, directory=tmp_path, train=window)
    with pytest.warns(RuntimeWarning):
        again.load(state)
    assert again.episodes.rows.sum() == len(again) < 120
    mask = again.sample("train")["mask"]
    assert mask.any(1).all()


def test_recorded_episodes_are_sampled():
    window = Window(8, 5, select="episodes")
    replay = make_replay(train=window)
    for length in (4, 9):
        replay.add_episode(
            {
                "action": np.arange(length, dtype=np.int32),
                "reward": np.zeros(length, np.float32),
                "is_first": np.arange(length) == 0,
                "is_last": np.arange(length) == length - 1,
                "is_terminal": np.zeros(length, bool),
            }
        )
    assert replay.episodes.rows.tolist() == [4, 9]
    batch = replay.sample("train")
    steps = np.diff(batch["stepid"], axis=1)[
        batch["mask"][:, 1:] & batch["mask"][:, :-1]
    ]
    assert (steps == 1).all()


def test_an_episode_continues_after_all_its_rows_were_evicted():
    """One environment adds no steps while the other fills the replay."""
    window = Window(8, 5, select="episodes")
    replay = make_replay(capacity=20, streams=2, train=window)

    def add(slot, first, count=1):
        for t in range(count):
            flags = {k: np.zeros(1, bool) for k in ("is_last", "is_terminal")}
            replay.add(
                {
                    "action": np.zeros(1, np.int32),
                    "reward": np.zeros(1, np.float32),
                    "is_first": np.array([first and t == 0]),
                    **flags,
                },
                np.array([slot]),
            )

    add(0, True)
    add(1, True, 3)
    add(0, False)
    for _ in range(4):
        add(1, True, 6)
    replay.sample("train")  # all rows of the first episode are evicted
    add(0, False, 3)
    replay.episodes.remove_evicted()
    assert replay.episodes.rows.sum() == 20
    batch = replay.sample("train")
    streams = replay.index.stream[batch["stepid"] % 20]
    assert (streams == streams[:, :1]).all()
