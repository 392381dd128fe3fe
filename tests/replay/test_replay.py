"""The replay, compared to a plain list of all added steps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.replay import column_store
from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig
from reverie.replay.feed import ReplayFeed
from reverie.rows import Window
from reverie.spaces import Space

SPACES = {
    "image": Space(np.dtype(np.uint8), (20, 20, 3)),
    "vector": Space(np.dtype(np.float32), (3,)),
    "action": Space(np.dtype(np.int32), (), 0, 1000),
    "reward": Space(np.dtype(np.float32)),
    "is_first": Space(np.dtype(bool)),
    "is_last": Space(np.dtype(bool)),
    "is_terminal": Space(np.dtype(bool)),
    "log/extra": Space(np.dtype(np.float32)),
}
EXTRAS = {
    "deter": Space(np.dtype(np.float32), (300,)),
    "stoch": Space(np.dtype(np.uint8), (4,)),
}


def make_replay(
    capacity=100, streams=2, config=None, directory=None, seed=0, **windows
):
    exact = windows.pop("exact_extras", False)
    return Replay(
        SPACES,
        EXTRAS,
        config or ReplayConfig(online=False, storage="ram"),
        capacity=capacity,
        num_envs=streams,
        windows=windows or {"train": Window(4, 5)},
        directory=directory,
        seed=seed,
        exact_extras=exact,
    )


def make_rows(rng, count, first=None):
    """Random rows; the image repeats the reward, to detect mixed-up rows."""
    tag = rng.integers(0, 250, count)
    return {
        "image": np.broadcast_to(tag[:, None, None, None], (count, 20, 20, 3)).astype(
            np.uint8
        ),
        "vector": rng.normal(size=(count, 3)).astype(np.float32),
        "action": rng.integers(0, 1000, count).astype(np.int32),
        "reward": tag.astype(np.float32),
        "is_first": (rng.random(count) < 0.15) if first is None else first,
        "is_last": rng.random(count) < 0.1,
        "is_terminal": rng.random(count) < 0.05,
        "log/extra": np.zeros(count, np.float32),
        "deter": rng.normal(size=(count, 300)).astype(np.float32),
        "stoch": rng.integers(0, 9, (count, 4)).astype(np.uint8),
    }


class Reference:
    """A list of (stream, row) of all added steps."""

    def __init__(self, capacity, streams):
        self.capacity = capacity
        self.steps = []
        self.stream = list(range(streams))
        self.num_streams = streams

    def add(self, rows, slots):
        for i, slot in enumerate(slots):
            row = {key: value[i].copy() for key, value in rows.items()}
            self.steps.append((self.stream[slot], row))

    def new_stream(self, slot):
        self.stream[slot] = self.num_streams
        self.num_streams += 1

    def windows(self, span):
        """All complete windows: start id -> ids."""
        live = range(max(0, len(self.steps) - self.capacity), len(self.steps))
        by_stream = {}
        for g in live:
            by_stream.setdefault(self.steps[g][0], []).append(g)
        return {
            ids[i]: ids[i : i + span]
            for ids in by_stream.values()
            for i in range(len(ids) - span + 1)
        }


def check_batch(reference, window, batch):
    complete = reference.windows(window.span)
    for row in range(window.batch):
        ids = batch["stepid"][row].tolist()
        if window.consec == 1:
            assert complete[ids[0]] == ids
        stored = [reference.steps[g][1] for g in ids]
        for key in (*SPACES, *EXTRAS):
            if key.startswith("log/"):
                assert key not in batch
            elif key not in ("is_first", "is_last"):
                expected = np.stack([step[key] for step in stored])
                np.testing.assert_array_equal(batch[key][row], expected, err_msg=key)
        first = np.array([step["is_first"] for step in stored])
        last = np.array([step["is_last"] for step in stored])
        last[:-1] |= first[1:]
        first[0] = True
        np.testing.assert_array_equal(batch["is_first"][row], first)
        np.testing.assert_array_equal(batch["is_last"][row], last)


@pytest.mark.extended_except("0-ram", "1-disk")
@pytest.mark.parametrize("storage", ["ram", "disk"])
@pytest.mark.parametrize("seed", range(6))
def test_batches_equal_a_plain_list_of_all_steps(seed, storage, tmp_path, monkeypatch):
    monkeypatch.setattr(column_store, "MAX_OPEN_MAPS", 3)
    monkeypatch.setattr(column_store, "MAX_RESIDENT_BYTES", 20_000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + seed % 3)
    rng = np.random.default_rng(seed)
    streams = int(rng.integers(1, 6))
    capacity = int(rng.integers(streams * 8, 300))
    windows = {"long": Window(3, 5, context=1), "short": Window(7, 2)}
    config = ReplayConfig(online=False, storage=storage, segment=16)
    replay = make_replay(capacity, streams, config, tmp_path, seed, **windows)
    reference = Reference(capacity, streams)
    for turn in range(400):
        if rng.random() < 0.7:
            slots = np.arange(streams)
            named = None
        else:  # some environments skip a step
            slots = named = np.flatnonzero(rng.random(streams) < 0.6)
            if not len(slots):
                continue
        rows = make_rows(rng, len(slots))
        ids = replay.add(rows, named)
        assert ids.tolist() == list(
            range(len(reference.steps), len(reference.steps) + len(slots))
        )
        reference.add(rows, slots)
        if rng.random() < 0.02:
            slot = int(rng.integers(streams))
            replay.new_stream(slot)
            reference.new_stream(slot)
        if rng.random() < 0.2:
            some = rng.integers(0, len(reference.steps), 9)  # some are evicted
            some = np.unique(some)
            new = make_rows(rng, len(some))
            extras = {key: new[key] for key in EXTRAS}
            replay.write_back(some, extras)
            for i, g in enumerate(some):
                reference.steps[g][1].update({k: v[i] for k, v in extras.items()})
        if turn % 5 == 0:
            assert len(replay) == min(capacity, len(reference.steps))
            for name, window in windows.items():
                complete = reference.windows(window.span)
                assert replay.num_windows(name) == len(complete)
                assert replay.index.window_starts(window.span).tolist() == sorted(
                    complete
                )
                if complete:
                    check_batch(reference, window, replay.sample(name))
    replay.close()


def test_every_window_is_equally_likely():
    rng = np.random.default_rng(0)
    replay = make_replay(60, 3, train=Window(50, 4))
    for turn in range(100):
        late = None if turn % 3 else np.array([0, 2])
        replay.add(make_rows(rng, 3 if late is None else 2), late)
    starts = replay.index.window_starts(4)
    counts = dict.fromkeys(starts.tolist(), 0)
    for _ in range(400):
        for g in replay.sample("train")["stepid"][:, 0]:
            counts[int(g)] += 1
    expected = 400 * 50 / len(starts)
    chi = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi < len(starts) + 4 * np.sqrt(2 * len(starts))


def test_few_complete_windows_among_many_steps_are_found():
    rng = np.random.default_rng(0)
    replay = make_replay(2000, 200, train=Window(20, 5))
    for _ in range(4):
        replay.add(make_rows(rng, 200))
    replay.add(make_rows(rng, 2), np.array([7, 9]))
    assert replay.num_windows("train") == 2
    starts = set(replay.sample("train")["stepid"][:, 0].tolist())
    assert starts == {7, 9}


def test_consecutive_chunks_overlap_by_the_context():
    rng = np.random.default_rng(0)
    window = Window(2, 3, context=1, consec=3)
    replay = make_replay(100, 1, train=window)
    for _ in range(60):
        replay.add(make_rows(rng, 1, first=np.zeros(1, bool)))
    chunks = [replay.sample("train") for _ in range(4)]
    for k, (a, b) in enumerate(pairwise(chunks[:3])):
        np.testing.assert_array_equal(a["stepid"][:, -1:], b["stepid"][:, :1])
        np.testing.assert_array_equal(a["consec"], np.full((2, 4), k))
    assert chunks[0]["is_first"][:, 0].all()
    assert not chunks[1]["is_first"].any()
    assert not chunks[2]["is_first"].any()
    assert (chunks[3]["consec"] == 0).all()
    assert chunks[3]["is_first"][:, 0].all()


def test_is_last_is_set_before_a_reset_also_between_chunks():
    rng = np.random.default_rng(0)
    replay = make_replay(100, 1, train=Window(4, 3, consec=2))
    for t in range(30):
        rows = make_rows(rng, 1, first=np.array([t % 3 == 0]))
        rows["is_last"][:] = False
        replay.add(rows)
    one, two = replay.sample("train"), replay.sample("train")
    joined = np.concatenate([one["is_last"], two["is_last"]], 1)
    ids = np.concatenate([one["stepid"], two["stepid"]], 1)
    expected = (ids + 1) % 3 == 0
    expected[:, -1] = False
    np.testing.assert_array_equal(joined, expected)


def test_a_sequence_evicted_between_chunks_is_replaced():
    rng = np.random.default_rng(0)
    replay = make_replay(20, 1, train=Window(8, 3, consec=2))
    for _ in range(20):
        replay.add(make_rows(rng, 1))
    before = replay.sample("train")["stepid"][:, 0]
    for _ in range(8):
        replay.add(make_rows(rng, 1))
    batch = replay.sample("train")
    evicted = before < replay.index.first
    assert evicted.any()
    np.testing.assert_array_equal(batch["consec"][:, 0], np.where(evicted, 0, 1))
    np.testing.assert_array_equal(batch["stepid"][~evicted, 0], before[~evicted] + 3)


def test_online_sampling_returns_every_new_step_once():
    rng = np.random.default_rng(0)
    config = ReplayConfig(storage="ram")
    windows = {"train": Window(2, 4), "report": Window(1, 5, online=False)}
    replay = make_replay(1000, 3, config, **windows)
    seen = []
    for t in range(80):
        replay.add(make_rows(rng, 3))
        while replay.metrics()["online"] >= 2:
            seen.extend(replay.sample("train")["stepid"].reshape(-1).tolist())
        if t > 8:
            replay.sample("report")
    assert len(seen) == len(set(seen))
    assert set(range(3 * 80 - 24)) <= set(seen)


def test_a_capacity_below_one_window_raises_with_the_needed_capacity():
    with pytest.raises(UserError, match="capacity 9"):
        make_replay(8, 2, ReplayConfig(capacity=8), train=Window(1, 5))
    make_replay(9, 2, ReplayConfig(capacity=9), train=Window(1, 5))


def test_the_capacity_of_a_short_run_holds_one_window():
    replay = make_replay(3, 2, train=Window(1, 5))
    assert replay.capacity == 9


def test_a_row_of_the_wrong_shape_raises_with_its_key():
    replay = make_replay()
    rows = make_rows(np.random.default_rng(0), 2)
    rows["vector"] = rows["vector"][:, :2]
    with pytest.raises(AssertionError, match="vector"):
        replay.add(rows)


def test_ready_at_batch_times_length_steps():
    replay = make_replay(100, 2, train=Window(4, 5))
    rng = np.random.default_rng(0)
    for t in range(11):
        assert replay.ready("train") == (t >= 10)
        replay.add(make_rows(rng, 2))


def test_the_feed_returns_tensors_and_writes_extras_back():
    rng = np.random.default_rng(0)
    window = Window(3, 4, context=1)
    replay = make_replay(100, 2, train=window)
    feed = ReplayFeed(replay, {"train": window})
    for _ in range(20):
        replay.add(make_rows(rng, 2))
    assert feed.ready("train")
    batch = feed("train")
    assert batch["image"].shape == (3, 5, 20, 20, 3)
    assert batch["stepid"].dtype == torch.int64
    extras = {"deter": torch.ones(3, 4, 300)}
    feed.write_back(batch["stepid"][:, 1:], extras)
    ids = batch["stepid"][0, 1:].numpy()
    out = {"deter": np.zeros((4, 300), np.float32)}
    replay.store.gather(ids, out)
    assert (out["deter"] == 1).all()


def test_the_feed_does_not_overwrite_batches_in_use():
    rng = np.random.default_rng(0)
    window = Window(3, 4)
    replay = make_replay(100, 2, train=window)
    for _ in range(50):
        replay.add(make_rows(rng, 2))
    feed = ReplayFeed(replay, {"train": window})
    held = [feed("train")["vector"][1:] for _ in range(4)]  # views keep it alive
    copies = [tensor.clone() for tensor in held]
    for _ in range(10):
        feed("train")
    for tensor, copy in zip(held, copies, strict=True):
        assert torch.equal(tensor, copy)
    assert len(feed._sampler._buffers["train"]) <= 6


@pytest.mark.parametrize("name", ["capacity", "segment"])
def test_a_size_of_zero_raises(name):
    with pytest.raises(UserError, match=f"replay.{name} is 0"):
        ReplayConfig(**{name: 0})
