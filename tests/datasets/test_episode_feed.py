"""Batches from recorded episodes: contents, reproducibility and memory."""

from __future__ import annotations

import resource
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from episode_helpers import ACTION, make_episode, write_npz

from reverie.api import Feed, UserError
from reverie.datasets.episode_cache import EpisodeCacheConfig
from reverie.datasets.episodes import open_episodes
from reverie.datasets.feed import EpisodeFeed, pad_episodes
from reverie.datasets.readers import Reader, npz
from reverie.datasets.split import Subset, split_by_mask, split_by_seed
from reverie.rows import Window
from reverie.spaces import STEP_KEYS, Space

TRAIN = {"train": Window(4, 16)}
SMALL = EpisodeCacheConfig(memory=2e-5)  # some twenty kilobytes


class GeneratedReader(Reader):
    """Generates episodes when they are read; `place` encodes episode and row."""

    def __init__(self, lengths, width=1):
        self.origin, self.masks = "generated", {}
        self.lengths = {f"demo_{i}": rows for i, rows in enumerate(lengths)}
        self.reads = Counter()
        self._spaces = {"place": Space(np.float32, (width,))}, ACTION

    def names(self):
        return list(self.lengths)

    def rows(self, name):
        return self.lengths[name]

    def read(self, name):
        self.reads[name] += 1
        rows, number = self.lengths[name], int(name[5:])
        episode = make_episode(rows - 1, seed=number)
        place = np.zeros((rows, *self.obs_space["place"].shape), np.float32)
        place[:, 0] = 1000 * number + np.arange(rows)
        return {k: episode[k] for k in (*STEP_KEYS, "action")} | {"place": place}


def episodes_and_rows(batch):
    return (batch["stepid"] >> 32).numpy(), (batch["stepid"] & (2**32 - 1)).numpy()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def test_it_implements_feed(tmp_path):
    write_npz(tmp_path)
    feed = EpisodeFeed(open_episodes(tmp_path), TRAIN)
    assert isinstance(feed, Feed)
    assert feed.ready("train")
    batch = feed("train")
    assert batch["image"].shape == (4, 16, 8, 8, 3)
    assert batch["image"].dtype == torch.uint8
    assert {*STEP_KEYS, "action", "stepid", "consec", "position"} <= batch.keys()
    assert not any(key.startswith("log/") for key in batch)
    assert set(feed.obs_space) == {"image", "position", "speed", *STEP_KEYS}
    again = feed("train", out=batch)
    assert again is batch
    feed.write_back(batch["stepid"], {})
    feed.prioritize(batch["stepid"], batch["reward"])
    assert feed.served == 2 * 64
    feed.close()


def test_episodes_are_sampled_by_length_and_joints_are_first_rows():
    reader = GeneratedReader((2, 20, 200))
    feed = EpisodeFeed(reader, {"train": Window(50, 12)}, seed=3)
    starts = Counter()
    for _ in range(60):
        batch = feed("train")
        episode, row = episodes_and_rows(batch)
        starts.update(episode[:, 0].tolist())
        first = batch["is_first"].numpy()
        assert first[:, 0].all()
        joint = (np.diff(episode) != 0) | (np.diff(row) != 1)
        np.testing.assert_array_equal(first[:, 1:], joint)
        assert (row[:, 1:][joint] == 0).all()
        assert batch["is_last"].numpy()[:, :-1][joint].all()
        place = batch["place"].numpy()[..., 0]
        np.testing.assert_array_equal(place, 1000 * episode + row)
        last = np.array([1, 19, 199])
        assert (row[:, 0] < last[episode[:, 0]]).all()  # not in a last row
    total = sum(starts.values())
    for number, rows in enumerate((2, 20, 200)):
        share = rows / 222
        sigma = np.sqrt(total * share * (1 - share))
        assert abs(starts[number] - total * share) < 3 * sigma, number


def test_actions_are_aligned_within_a_batch(tmp_path):
    write_npz(tmp_path)
    batch = EpisodeFeed(open_episodes(tmp_path), TRAIN)("train")
    joint = batch["is_first"][:, 1:].numpy()
    moved = np.diff(batch["position"].numpy(), axis=1)
    done = 0.1 * batch["action"].numpy()[:, :-1]
    assert np.abs(moved - done)[~joint].max() < 1e-5
    late = np.roll(done, 1, 1)
    assert np.abs(moved - late)[~joint].max() > 0.01
    assert not batch["action"].numpy()[:, :-1][joint].any()


@pytest.mark.parametrize("config", [EpisodeCacheConfig(), SMALL])
@pytest.mark.parametrize("consec", [1, 3])
def test_same_seed_same_batches_with_prefetch_and_after_resuming(config, consec):
    windows = {"train": Window(3, 8, consec=consec), "report": Window(2, 5)}
    lengths = np.random.default_rng(0).integers(5, 60, 40)

    def make(prefetch=False, seed=1):
        reader = GeneratedReader(lengths, width=10)
        made = {"config": config, "seed": seed, "prefetch": prefetch}
        return EpisodeFeed(reader, windows, **made)

    plain, ahead, other = make(), make(prefetch=True), make(seed=2)
    batches = []
    for _ in range(7):
        batches.append(plain("train"))
        assert_equal(batches[-1], ahead("train"))
        assert_equal(plain("report"), ahead("report"))
    assert not torch.equal(batches[0]["stepid"], other("train")["stepid"])
    saved = ahead.state_dict()
    assert saved["train"]["step"] == 7
    resumed = make(prefetch=True)
    resumed("train")
    resumed.load_state_dict(saved)
    for _ in range(4):
        assert_equal(plain("train"), resumed("train"))
    for feed in (plain, ahead, other, resumed):
        feed.close()


def test_consecutive_chunks_continue_the_same_sequences():
    feed = EpisodeFeed(GeneratedReader([100]), {"train": Window(3, 8, consec=3)})
    pieces = [feed("train") for _ in range(4)]
    whole = torch.cat([p["stepid"] for p in pieces[:3]], 1)
    assert [int(p["consec"][0, 0]) for p in pieces] == [0, 1, 2, 0]
    first = torch.cat([p["is_first"] for p in pieces[:3]], 1)[:, 1:].numpy()
    steps = np.diff(whole.numpy())
    assert (steps[~first] == 1).all()
    assert first.sum() == (steps != 1).sum()


def test_a_dataset_larger_than_the_cache_is_sampled_by_length_and_read_about_once():
    lengths = [20] * 30 + [60] * 30
    reader = GeneratedReader(lengths, width=16)
    feed = EpisodeFeed(reader, {"train": Window(8, 10)}, config=SMALL)
    starts = Counter()
    for _ in range(400):
        starts.update(episodes_and_rows(feed("train"))[0][:, 0].tolist())
    served = 400 * 8 * 10
    unpacked = sum(reader.lengths[n] * count for n, count in reader.reads.items())
    assert unpacked < 1.5 * served
    long = sum(count for number, count in starts.items() if number >= 30)
    assert long / 3200 == pytest.approx(0.75, abs=0.06)
    assert len(starts) == 60
    assert feed._train.bytes <= feed._train.capacity


@pytest.mark.parametrize("config", [EpisodeCacheConfig(), SMALL])
def test_episode_windows_ignore_length_with_and_without_a_full_cache(config):
    reader = GeneratedReader([11, 101] * 40, width=8)
    windows = {"train": Window(8, 5, select="episodes")}
    feed = EpisodeFeed(reader, windows, config=config)
    long = [episodes_and_rows(feed("train"))[0][:, 0] % 2 for _ in range(300)]
    assert 0.42 < np.mean(long) < 0.58
    feed.close()


def test_episode_windows_stay_in_one_episode_and_prefer_rarely_used_ones():
    window = Window(8, 6, select="episodes", alpha=3.0)
    feed = EpisodeFeed(
        GeneratedReader((3, 50, 9)), {"tokenizer": window}, prefetch=True
    )
    feed("tokenizer")
    feed.count_uses("tokenizer", True)
    used = Counter()
    for _ in range(60):
        batch = feed("tokenizer")
        episode, row = episodes_and_rows(batch)
        mask = batch["mask"].numpy()
        assert (episode == episode[:, :1]).all()
        assert (np.diff(row)[mask[:, 1:] & mask[:, :-1]] == 1).all()
        assert mask.any(1).all()
        used.update(episode[:, 0].tolist())
    assert max(used.values()) < 1.2 * min(used.values())
    state = feed.state_dict()["tokenizer"]
    assert state["counts"].sum() == 480
    assert state["is_counting"]
    feed.count_uses("tokenizer", False)
    feed("tokenizer")
    assert feed.state_dict()["tokenizer"]["counts"].sum() == 480
    feed.close()


def test_bad_episodes_are_skipped_or_stop_the_run(tmp_path):
    write_npz(tmp_path, (5, 9, 12, 7))
    path = tmp_path / "demo_1-10.npz"
    path.write_bytes(path.read_bytes()[:300])
    spoilt = make_episode(12)
    spoilt["speed"][3] = np.nan
    npz.write_npz_episode(tmp_path, "demo_2", spoilt, ACTION)
    feed = EpisodeFeed(open_episodes(tmp_path), TRAIN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [feed("train") for _ in range(12)]
    words = sorted(str(w.message) for w in caught)
    assert len(words) == 2
    assert "demo_1 cannot be read" in words[0]
    assert "demo_2 'speed' has NaN or infinite entries (first in row 3)" in words[1]
    used = {n for b in batches for n in episodes_and_rows(b)[0].reshape(-1).tolist()}
    assert used == {0, 3}
    informed = EpisodeFeed(open_episodes(tmp_path), TRAIN)
    informed._train.bad |= {1, 2}
    for batch in batches:
        assert_equal(batch, informed("train"))
    strict = EpisodeFeed(
        open_episodes(tmp_path), TRAIN, config=EpisodeCacheConfig(bad="stop")
    )
    with pytest.raises(
        UserError, match=r"demo_\d .*\n  Fix: repair .*--offline.cache.bad skip"
    ):
        [strict("train") for _ in range(12)]


def test_no_usable_episode_is_an_error(tmp_path):
    write_npz(tmp_path, (5,))
    reader = open_episodes(tmp_path)
    assert reader.obs_space
    (tmp_path / "demo_0-6.npz").write_bytes(b"PK")
    feed = EpisodeFeed(reader, TRAIN)
    with (
        pytest.warns(RuntimeWarning, match="skipped"),
        pytest.raises(UserError, match="no usable episode"),
    ):
        feed("train")


def test_stored_latents_cannot_be_requested():
    with pytest.raises(UserError, match=r"Fix: set replay_context of the agent to 0"):
        EpisodeFeed(GeneratedReader([5]), {"train": Window(2, 4, context=1)})
    with pytest.raises(ValueError, match="memory must be"):
        EpisodeCacheConfig(memory=0)


def test_held_out_episodes_are_padded_and_masked():
    reader = GeneratedReader((4, 9, 6, 7, 5, 8))
    parts = split_by_seed(reader.names(), 0.5, seed=1)
    train, held = (Subset(reader, names) for names in parts)
    assert not set(train.names()) & set(held.names())
    feed = EpisodeFeed(train, TRAIN, held_out=held)
    seen = []
    for batch in feed.episodes(batch=2):
        for i, number in enumerate(batch["episode"].tolist()):
            name = held.names()[number]
            seen.append(name)
            real, length = batch["mask"][i], held.rows(name)
            assert real.tolist() == [t < length for t in range(len(real))]
            episode = held.read(name)
            for key in ("place", "action", "reward"):
                np.testing.assert_array_equal(batch[key][i, :length], episode[key])
            padding = batch["place"][i, length:]
            assert (padding == batch["place"][i, length - 1]).all()
            assert batch["is_first"][i].tolist() == [True] + [False] * (len(real) - 1)
    assert seen == held.names()
    (short,) = feed.episodes(batch=9, length=3)
    assert short["mask"].shape == (3, 3)
    assert len(list(feed.episodes(limit=2))) == 2
    report = EpisodeFeed(train, {"report": Window(4, 4)}, held_out=held)("report")
    names = {held.names()[n] for n in episodes_and_rows(report)[0].reshape(-1).tolist()}
    place = report["place"].numpy()[..., 0] // 1000
    assert {f"demo_{int(n)}" for n in place.reshape(-1)} == names
    feed.close()


def test_augmentation_has_its_own_random_generator():
    def augment(batch, rng):
        return {**batch, "noise": rng.random(batch["reward"].shape)}

    feeds = [
        EpisodeFeed(GeneratedReader([40]), TRAIN, augment=augment) for _ in range(2)
    ]
    first, again = (feed("train")["noise"] for feed in feeds)
    assert torch.equal(first, again)
    assert not torch.equal(first, feeds[0]("train")["noise"])


def test_resuming_with_another_number_of_episodes_is_an_error():
    state = EpisodeFeed(GeneratedReader([5, 6]), TRAIN).state_dict()
    with pytest.raises(UserError, match="on 2 episodes, and there are 3 now"):
        EpisodeFeed(GeneratedReader([5, 6, 7]), TRAIN).load_state_dict(state)


def test_splits_are_disjoint_complete_and_reproducible():
    names = [f"demo_{i}" for i in range(30)]
    train, held = split_by_seed(names, 0.1, seed=4)
    assert len(held) == 3
    assert sorted(train + held) == sorted(names)
    assert (train, held) == split_by_seed(names, 0.1, seed=4)
    assert held != split_by_seed(names, 0.1, seed=5)[1]
    with pytest.raises(UserError, match="Cannot hold out"):
        split_by_seed(names[:1])
    reader = GeneratedReader([5] * 4)
    reader.masks = {"a": ["demo_0", "demo_3"], "b": ["demo_1"], "c": ["demo_3"]}
    assert split_by_mask(reader, "a", "b") == (["demo_0", "demo_3"], ["demo_1"])
    with pytest.raises(UserError, match=r"no mask 'valid'. Its masks: a, b, c"):
        split_by_mask(reader, "a", "valid")
    with pytest.raises(UserError, match=r"have 1 episodes in common \(demo_3"):
        split_by_mask(reader, "a", "c")
    with pytest.raises(UserError, match="no episode 'demo_9' and 1 more"):
        Subset(reader, ["demo_9", "x"])
    part = Subset(reader, ["demo_3"])
    assert part.masks == {"a": ["demo_3"], "b": [], "c": ["demo_3"]}


def test_memory_is_bounded_for_a_dataset_much_larger_than_the_cache(tmp_path):
    """50 GB when decompressed: links to one file of zeros."""
    rows, size = 200, 128
    zeros = np.zeros((rows, size, size, 3), np.uint8)
    episode = make_episode(rows - 1, size=1) | {"image": zeros}
    path = npz.write_npz_episode(tmp_path, "demo_0", episode, ACTION)
    each = zeros.nbytes
    count = -(-50 * 10**9 // each)
    for i in range(1, count):
        (tmp_path / f"demo_{i}-{rows}.npz").hardlink_to(path)
    reader = open_episodes(tmp_path)
    assert len(reader.names()) * each >= 50e9
    config = EpisodeCacheConfig(memory=8 * each / 2**30)
    feed = EpisodeFeed(reader, {"train": Window(4, 64)}, config=config)
    for _ in range(3):
        feed("train")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(9):
        feed("train")
        assert feed._train.bytes <= feed._train.capacity
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < 8 * each  # at most the cache size again
    feed.close()


def test_padding_keeps_the_episode_index():
    rows = {"reward": np.zeros(3, np.float32), "is_first": np.ones(3, bool)}
    assert pad_episodes([(7, rows)])["episode"].tolist() == [7]
