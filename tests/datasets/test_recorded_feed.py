"""Batches cut from recorded episodes: what they hold, that they repeat, and memory."""

from __future__ import annotations

import resource
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from walks import ACTION, slip, walk, write_npz

from reverie.api import Feed, UserError
from reverie.datasets.episode_format import BadEpisode
from reverie.datasets.feed import RecordingFeed, RecordingsConfig, padded
from reverie.datasets.readers import Reader, npz, open_reader
from reverie.datasets.split import Subset, split_by_mask, split_by_seed, split_reader
from reverie.rows import Window
from reverie.spaces import FLAGS, Space

TRAIN = {"train": Window(4, 16)}
SMALL = RecordingsConfig(memory=2e-5)  # some twenty kilobytes


class Walks(Reader):
    """Episodes made up when they are read; `position` tells episode and row."""

    def __init__(self, lengths, width=1):
        self.origin, self.masks = "walks", {}
        self.lengths = {f"walk_{i}": rows for i, rows in enumerate(lengths)}
        self.reads = Counter()
        self._spaces = {"place": Space(np.float32, (width,))}, ACTION

    def names(self):
        return list(self.lengths)

    def rows(self, name):
        return self.lengths[name]

    def read(self, name):
        self.reads[name] += 1
        rows, number = self.lengths[name], int(name[5:])
        episode = walk(rows - 1, seed=number)
        place = np.zeros((rows, *self.obs_space["place"].shape), np.float32)
        place[:, 0] = 1000 * number + np.arange(rows)
        return {k: episode[k] for k in (*FLAGS, "action")} | {"place": place}


def numbers(batch):
    return (batch["stepid"] >> 32).numpy(), (batch["stepid"] & (2**32 - 1)).numpy()


def equal(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def test_a_feed_is_one_of_ours(tmp_path):
    write_npz(tmp_path)
    feed = RecordingFeed(open_reader(tmp_path), TRAIN)
    assert isinstance(feed, Feed)
    assert feed.ready("train")
    batch = feed("train")
    assert batch["image"].shape == (4, 16, 8, 8, 3)
    assert batch["image"].dtype == torch.uint8
    assert {*FLAGS, "action", "stepid", "consec", "position"} <= batch.keys()
    assert not any(key.startswith("log/") for key in batch)
    assert set(feed.obs_space) == {"image", "position", "speed", *FLAGS}
    again = feed("train", out=batch)
    assert again is batch
    feed.write_back(batch["stepid"], {})
    feed.prioritize(batch["stepid"], batch["reward"])
    assert feed.served == 2 * 64
    feed.close()


def test_episodes_come_up_by_their_length_and_begin_at_every_joint():
    reader = Walks((2, 20, 200))
    feed = RecordingFeed(reader, {"train": Window(50, 12)}, seed=3)
    starts = Counter()
    for _ in range(60):
        batch = feed("train")
        episode, row = numbers(batch)
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
        assert (row[:, 0] < last[episode[:, 0]]).all()  # nothing begins at an end
    total = sum(starts.values())
    for number, rows in enumerate((2, 20, 200)):
        share = rows / 222
        sigma = np.sqrt(total * share * (1 - share))
        assert abs(starts[number] - total * share) < 3 * sigma, number


def test_actions_lead_from_row_to_row_within_a_batch(tmp_path):
    write_npz(tmp_path)
    batch = RecordingFeed(open_reader(tmp_path), TRAIN)("train")
    joint = batch["is_first"][:, 1:].numpy()
    moved = np.diff(batch["position"].numpy(), axis=1)
    done = 0.1 * batch["action"].numpy()[:, :-1]
    assert np.abs(moved - done)[~joint].max() < 1e-5
    late = np.roll(done, 1, 1)
    assert np.abs(moved - late)[~joint].max() > 0.01
    assert not batch["action"].numpy()[:, :-1][joint].any()


@pytest.mark.parametrize("config", [RecordingsConfig(), SMALL])
@pytest.mark.parametrize("consec", [1, 3])
def test_the_same_seed_gives_the_same_batches_whoever_cuts_them(config, consec):
    windows = {"train": Window(3, 8, consec=consec), "report": Window(2, 5)}
    lengths = np.random.default_rng(0).integers(5, 60, 40)

    def make(prefetch=False, seed=1):
        reader = Walks(lengths, width=10)
        made = {"config": config, "seed": seed, "prefetch": prefetch}
        return RecordingFeed(reader, windows, **made)

    plain, ahead, other = make(), make(prefetch=True), make(seed=2)
    batches = []
    for _ in range(7):
        batches.append(plain("train"))
        equal(batches[-1], ahead("train"))
        equal(plain("report"), ahead("report"))
    assert not torch.equal(batches[0]["stepid"], other("train")["stepid"])
    saved = ahead.state_dict()
    assert saved["train"]["step"] == 7
    resumed = make(prefetch=True)
    resumed("train")
    resumed.load_state_dict(saved)
    for _ in range(4):
        equal(plain("train"), resumed("train"))
    for feed in (plain, ahead, other, resumed):
        feed.close()


def test_consecutive_pieces_go_on_where_the_last_one_stopped():
    feed = RecordingFeed(Walks([100]), {"train": Window(3, 8, consec=3)})
    pieces = [feed("train") for _ in range(4)]
    whole = torch.cat([p["stepid"] for p in pieces[:3]], 1)
    assert [int(p["consec"][0, 0]) for p in pieces] == [0, 1, 2, 0]
    first = torch.cat([p["is_first"] for p in pieces[:3]], 1)[:, 1:].numpy()
    steps = np.diff(whole.numpy())
    assert (steps[~first] == 1).all()
    assert first.sum() == (steps != 1).sum()


def test_more_than_fits_is_served_in_its_share_and_unpacked_about_once():
    lengths = [20] * 30 + [60] * 30
    reader = Walks(lengths, width=16)
    feed = RecordingFeed(reader, {"train": Window(8, 10)}, config=SMALL)
    starts = Counter()
    for _ in range(400):
        starts.update(numbers(feed("train"))[0][:, 0].tolist())
    served = 400 * 8 * 10
    unpacked = sum(reader.lengths[n] * count for n, count in reader.reads.items())
    assert unpacked < 1.5 * served
    long = sum(count for number, count in starts.items() if number >= 30)
    assert long / 3200 == pytest.approx(0.75, abs=0.06)
    assert len(starts) == 60
    assert feed._train.bytes <= feed._train.capacity


@pytest.mark.parametrize("config", [RecordingsConfig(), SMALL])
def test_windows_by_episode_ask_for_no_length_whether_all_fits_or_not(config):
    reader = Walks([11, 101] * 40, width=8)
    windows = {"train": Window(8, 5, select="episodes")}
    feed = RecordingFeed(reader, windows, config=config)
    long = [numbers(feed("train"))[0][:, 0] % 2 for _ in range(300)]
    assert 0.42 < np.mean(long) < 0.58
    feed.close()


def test_windows_by_episode_stay_in_theirs_and_prefer_the_seldom_served():
    window = Window(8, 6, select="episodes", alpha=3.0)
    feed = RecordingFeed(Walks((3, 50, 9)), {"tokenizer": window}, prefetch=True)
    feed("tokenizer")
    feed.count_uses("tokenizer", True)
    used = Counter()
    for _ in range(60):
        batch = feed("tokenizer")
        episode, row = numbers(batch)
        mask = batch["mask"].numpy()
        assert (episode == episode[:, :1]).all()
        assert (np.diff(row)[mask[:, 1:] & mask[:, :-1]] == 1).all()
        assert mask.any(1).all()
        used.update(episode[:, 0].tolist())
    assert max(used.values()) < 1.2 * min(used.values())
    state = feed.state_dict()["tokenizer"]
    assert state["counts"].sum() == 480
    assert state["counting"]
    feed.count_uses("tokenizer", False)
    feed("tokenizer")
    assert feed.state_dict()["tokenizer"]["counts"].sum() == 480
    feed.close()


def test_bad_episodes_are_named_and_passed_over_or_fatal(tmp_path):
    write_npz(tmp_path, (5, 9, 12, 7))
    path = tmp_path / "demo_1-10.npz"
    path.write_bytes(path.read_bytes()[:300])
    spoilt = walk(12)
    spoilt["speed"][3] = np.nan
    npz.write_folder_file(tmp_path, "demo_2", spoilt, ACTION)
    feed = RecordingFeed(open_reader(tmp_path), TRAIN)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batches = [feed("train") for _ in range(12)]
    words = sorted(str(w.message) for w in said)
    assert len(words) == 2
    assert "demo_1 cannot be read" in words[0]
    assert "demo_2 'speed' has NaN or infinite entries (first in row 3)" in words[1]
    used = {n for b in batches for n in numbers(b)[0].reshape(-1).tolist()}
    assert used == {0, 3}
    knowing = RecordingFeed(open_reader(tmp_path), TRAIN)
    knowing._train.bad |= {1, 2}
    for batch in batches:
        equal(batch, knowing("train"))
    strict = RecordingFeed(
        open_reader(tmp_path), TRAIN, config=RecordingsConfig(bad="stop")
    )
    with pytest.raises(
        UserError, match=r"demo_\d .*\n  Fix: mend .*--offline.keep.bad skip"
    ):
        [strict("train") for _ in range(12)]


def test_nothing_usable_is_one_sentence(tmp_path):
    write_npz(tmp_path, (5,))
    reader = open_reader(tmp_path)
    assert reader.obs_space
    (tmp_path / "demo_0-6.npz").write_bytes(b"PK")
    feed = RecordingFeed(reader, TRAIN)
    with (
        pytest.warns(RuntimeWarning, match="skipped"),
        pytest.raises(UserError, match="no episode that can be used"),
    ):
        feed("train")


def test_an_agent_that_wants_stored_latents_is_told():
    with pytest.raises(UserError, match=r"Fix: --dreamer.replay_context 0"):
        RecordingFeed(Walks([5]), {"train": Window(2, 4, context=1)})
    with pytest.raises(ValueError, match="memory must be"):
        RecordingsConfig(memory=0)


def test_whole_episodes_held_out_are_padded_under_a_mask():
    train, held = split_reader(Walks((4, 9, 6, 7, 5, 8)), 0.5, seed=1)
    assert not set(train.names()) & set(held.names())
    feed = RecordingFeed(train, TRAIN, held_out=held)
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
    report = RecordingFeed(train, {"report": Window(4, 4)}, held_out=held)("report")
    names = {held.names()[n] for n in numbers(report)[0].reshape(-1).tolist()}
    place = report["place"].numpy()[..., 0] // 1000
    assert {f"walk_{int(n)}" for n in place.reshape(-1)} == names
    feed.close()


def test_a_batch_may_be_prepared_with_chance_of_its_own():
    def prepare(batch, rng):
        return {**batch, "noise": rng.random(batch["reward"].shape)}

    feeds = [RecordingFeed(Walks([40]), TRAIN, prepare=prepare) for _ in range(2)]
    first, again = (feed("train")["noise"] for feed in feeds)
    assert torch.equal(first, again)
    assert not torch.equal(first, feeds[0]("train")["noise"])


def test_a_run_goes_on_only_with_the_recordings_it_began_with():
    state = RecordingFeed(Walks([5, 6]), TRAIN).state_dict()
    with pytest.raises(UserError, match="from 2 episodes, and there are 3 now"):
        RecordingFeed(Walks([5, 6, 7]), TRAIN).load_state_dict(state)


def test_splits_are_disjoint_whole_and_repeat():
    names = [f"demo_{i}" for i in range(30)]
    train, held = split_by_seed(names, 0.1, seed=4)
    assert len(held) == 3
    assert sorted(train + held) == sorted(names)
    assert (train, held) == split_by_seed(names, 0.1, seed=4)
    assert held != split_by_seed(names, 0.1, seed=5)[1]
    with pytest.raises(UserError, match="cannot be held out"):
        split_by_seed(names[:1])
    reader = Walks([5] * 4)
    reader.masks = {"a": ["walk_0", "walk_3"], "b": ["walk_1"], "c": ["walk_3"]}
    assert split_by_mask(reader, "a", "b") == (["walk_0", "walk_3"], ["walk_1"])
    with pytest.raises(UserError, match=r"no mask 'valid', but a, b, c"):
        split_by_mask(reader, "a", "valid")
    with pytest.raises(UserError, match=r"share 1 episodes \(walk_3"):
        split_by_mask(reader, "a", "c")
    with pytest.raises(UserError, match="no episode 'walk_9' and 1 more"):
        Subset(reader, ["walk_9", "x"])
    part = Subset(reader, ["walk_3"])
    assert part.masks == {"a": ["walk_3"], "b": [], "c": ["walk_3"]}


def test_memory_stays_flat_over_a_folder_far_larger_than_it(tmp_path):
    """Fifty gigabytes, unpacked: links to one file of zeros, which packs to nothing."""
    rows, size = 200, 128
    zeros = np.zeros((rows, size, size, 3), np.uint8)
    episode = walk(rows - 1, size=1) | {"image": zeros}
    path = npz.write_folder_file(tmp_path, "demo_0", episode, ACTION)
    each = zeros.nbytes
    count = -(-50 * 10**9 // each)
    for i in range(1, count):
        (tmp_path / f"demo_{i}-{rows}.npz").hardlink_to(path)
    reader = open_reader(tmp_path)
    assert len(reader.names()) * each >= 50e9
    config = RecordingsConfig(memory=8 * each / 2**30)
    feed = RecordingFeed(reader, {"train": Window(4, 64)}, config=config)
    for _ in range(3):
        feed("train")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(9):
        feed("train")
        assert feed._train.bytes <= feed._train.capacity
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < 8 * each  # as much again as may be kept
    feed.close()


def test_slips_are_seen_by_these_tests_and_bad_episodes_by_name():
    assert slip(walk(5)) < 1e-6
    assert issubclass(BadEpisode, ValueError)
    rows = {"reward": np.zeros(3, np.float32), "is_first": np.ones(3, bool)}
    assert padded([(7, rows)])["episode"].tolist() == [7]
