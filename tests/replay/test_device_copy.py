"""A device copy returns the same batches as the replay on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_replay import EXTRAS, make_replay, make_rows

from reverie.replay import device_copy
from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig, SelectorFractions
from reverie.replay.device_copy import as_words, copied_spaces, device_bytes, word_dtype
from reverie.replay.feed import ReplayFeed
from reverie.replay.staging import PackedBatch
from reverie.rows import Window
from reverie.spaces import Space

WINDOWS = {
    "plain": Window(4, 5),
    "train": Window(3, 4, context=1, consec=3),
    "report": Window(2, 6, online=False, select="uniform"),
    "episodes": Window(3, 4, select="episodes", alpha=1.0),
}
CONFIGS = {
    "uniform": ReplayConfig(storage="ram", online=False),
    "online": ReplayConfig(storage="ram"),
    "mixture": ReplayConfig(storage="ram", fracs=SelectorFractions(0.4, 0.3, 0.3)),
}


def make_feeds(config, directory=None, capacity=90, streams=3, **options):
    """Return feeds of two equal replays, without and with a device copy."""
    replays = [
        make_replay(
            capacity,
            streams,
            config,
            directory and directory / name,
            **WINDOWS,
            **options,
        )
        for name in ("host", "device")
    ]
    feeds = [
        ReplayFeed(replay, WINDOWS, on_device=on_device)
        for replay, on_device in zip(replays, (False, True), strict=True)
    ]
    return feeds


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for key in one:
        assert one[key].dtype == two[key].dtype, key
        assert torch.equal(one[key], two[key]), key


def act_and_train(feeds, seed=0, turns=120, names=tuple(WINDOWS), outs=None):
    """Add, sample and write back with both feeds; all batches must be equal."""
    rng = np.random.default_rng(seed)
    outs = {} if outs is None else outs
    for turn in range(turns):
        rows = make_rows(rng, 3)
        for feed in feeds:
            feed.replay.add(rows)
        if turn < 25 or turn % 3:
            continue
        for name in names:
            host, device = feeds[0](name), feeds[1](name, outs.get(name))
            assert_equal(host, device)
            if turn % 2:
                outs[name] = device
            shape = host["stepid"].shape
            extras = {
                "deter": torch.from_numpy(rng.normal(size=(*shape, 300))).float(),
                "stoch": torch.from_numpy(rng.integers(0, 9, (*shape, 4))).byte(),
            }
            stale = host["stepid"] - int(rng.integers(0, 2)) * 40  # some are evicted
            priority = torch.from_numpy(rng.random(shape))
            for feed in feeds:
                feed.write_back(stale, extras)
                if feed.replay.config.fracs.priority:
                    feed.prioritize(host["stepid"], priority)


@pytest.mark.parametrize("kind", CONFIGS)
def test_batches_and_extras_equal_those_of_the_host(kind):
    feeds = make_feeds(CONFIGS[kind])
    act_and_train(feeds)
    metrics = [feed.replay.metrics() for feed in feeds]
    assert metrics[0] == metrics[1]
    assert metrics[0]["updates"] > 100


def test_a_step_that_occurs_twice_keeps_the_last_extras():
    feeds = make_feeds(CONFIGS["uniform"])
    rng = np.random.default_rng(0)
    for _ in range(30):
        rows = make_rows(rng, 3)
        for feed in feeds:
            feed.replay.add(rows)
    assert_equal(feeds[0]("plain"), feeds[1]("plain"))
    stepid = torch.tensor([5, 7, 5, 5, 7, 9])
    extras = {
        "deter": torch.arange(6.0)[:, None].expand(6, 300).contiguous(),
        "stoch": torch.arange(6).byte()[:, None].expand(6, 4).contiguous(),
    }
    for feed in feeds:
        feed.write_back(stepid, extras)
    copy = feeds[1].device_copy
    deter = copy.columns["deter"].view(torch.float32)
    assert deter[[5, 7, 9], 0].tolist() == [3, 4, 5]
    for _ in range(10):
        assert_equal(feeds[0]("plain"), feeds[1]("plain"))


@pytest.mark.parametrize("storage", ["ram", "disk"])
@pytest.mark.parametrize("kind", ["online", "mixture"])
def test_a_save_has_the_extras_of_the_device_and_resumes_exactly(
    tmp_path, storage, kind
):
    fracs = CONFIGS[kind].fracs
    config = ReplayConfig(storage=storage, segment=16, fracs=fracs)
    feeds = make_feeds(config, tmp_path, exact_extras=True)
    act_and_train(feeds, turns=60)
    states = [feed.replay.save() for feed in feeds]
    again = make_feeds(config, tmp_path, exact_extras=True)
    for feed, state in zip(again, states, strict=True):
        feed.replay.load(state)
    act_and_train(feeds, seed=7, turns=50)
    act_and_train(again, seed=7, turns=50)
    for old, new in zip(feeds, again, strict=True):
        for name in WINDOWS:
            assert_equal(old(name), new(name))


def test_loading_replaces_the_device_copy(tmp_path):
    config = ReplayConfig(storage="ram", segment=16, online=False)
    feeds = make_feeds(config, tmp_path)
    act_and_train(feeds, turns=40)
    states = [feed.replay.save() for feed in feeds]
    act_and_train(feeds, seed=3, turns=40)
    for feed, state in zip(feeds, states, strict=True):
        feed.replay.load(state)
    for _ in range(5):
        for name in WINDOWS:
            one, two = feeds[0](name), feeds[1](name)
            for key in one.keys() - EXTRAS.keys():  # extras of old files may differ
                assert torch.equal(one[key], two[key]), key


def test_many_steps_are_uploaded_in_parts(monkeypatch):
    monkeypatch.setattr(device_copy, "UPLOAD_BYTES", 70 * 1504)
    feeds = make_feeds(CONFIGS["uniform"], capacity=500)
    rng = np.random.default_rng(0)
    for _ in range(3):
        rows = make_rows(rng, 150)
        rows["is_first"][:] = np.arange(150) == 0
        for feed in feeds:
            feed.replay.add_episode(rows)
    for _ in range(5):
        for name in WINDOWS:
            assert_equal(feeds[0](name), feeds[1](name))


def test_batches_can_be_copied_into_given_tensors():
    feeds = make_feeds(CONFIGS["uniform"])
    act_and_train(feeds, turns=40)
    first = feeds[1]("plain")
    mine = {key: torch.zeros_like(value) for key, value in first.items()}
    feeds[0]("plain")
    assert feeds[1]("plain", mine) is mine
    assert_equal(feeds[0]("plain"), mine)
    again = feeds[0]("plain", mine)
    assert again is mine
    assert_equal(feeds[1]("plain", first), mine)
    assert isinstance(first, PackedBatch)


def test_only_wide_keys_and_extras_are_copied():
    spaces = {
        "image": Space(np.uint8, (8, 8, 4)),
        "reward": Space(np.float32),
        "index": Space(np.uint8, (3,)),
    }
    extras = {"index": spaces["index"]}
    assert copied_spaces(spaces, extras).keys() == {"image", "index"}
    assert device_bytes(spaces, extras, 99) == 100 * (256 + 3 + 17)
    assert [word_dtype(n).itemsize for n in (256, 12, 6, 3)] == [8, 4, 2, 1]


def test_words_can_be_viewed_at_any_offset():
    column = torch.zeros((5, 2), dtype=torch.int64)
    values = torch.arange(33, dtype=torch.uint8)[1:].reshape(2, 16)
    words = as_words(values, column)
    assert torch.equal(words.view(torch.uint8), values)


def test_a_lost_file_is_skipped(tmp_path):
    config = ReplayConfig(storage="disk", segment=16, online=False)
    replay = Replay(
        *(make_replay().spaces, {}),
        config,
        capacity=200,
        num_envs=2,
        windows={"train": Window(2, 4)},
        directory=tmp_path,
        seed=0,
    )
    rng = np.random.default_rng(0)
    for _ in range(90):
        replay.add(make_rows(rng, 2))
    replay.files.wait()  # threads write the files
    sorted(tmp_path.iterdir())[1].unlink()
    feed = ReplayFeed(replay, replay.windows, on_device=True)
    with pytest.warns(RuntimeWarning, match="lost while in use"):
        feed("train")
    for _ in range(20):
        batch = feed("train")
        tag = batch["image"][:, :, 0, 0, 0].float()
        assert torch.equal(tag, batch["reward"])


CUDA = torch.device("cuda")


def cuda_pair(config, on_device, **options):
    """The same replay twice, with a feed on the CPU and one on the GPU."""
    host, other = (make_replay(90, 3, config, **WINDOWS, **options) for _ in range(2))
    return [
        ReplayFeed(host, WINDOWS),
        ReplayFeed(other, WINDOWS, CUDA, on_device=on_device),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [False, True], ids=["staged", "device"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_batches_on_the_gpu_equal_those_of_the_host(kind, on_device):
    feeds = cuda_pair(CONFIGS[kind], on_device)
    to_gpu = feeds[1]

    class OnCpu:
        """The feed of the GPU, with tensors on the CPU."""

        replay = to_gpu.replay

        def __call__(self, name, out=None):
            batch = to_gpu(name)
            return {key: value.cpu() for key, value in batch.items()}

        def write_back(self, stepid, extras):
            moved = {key: value.to(CUDA) for key, value in extras.items()}
            to_gpu.write_back(stepid.to(CUDA), moved)

        def prioritize(self, stepid, priority):
            to_gpu.prioritize(stepid.to(CUDA), priority.to(CUDA))

    act_and_train([feeds[0], OnCpu()])
    assert feeds[0].replay.metrics() == to_gpu.replay.metrics()


@pytest.mark.gpu
def test_sampling_and_writing_do_not_wait_for_the_gpu():
    config = ReplayConfig(storage="ram", fracs=SelectorFractions(0.5, 0.5, 0.0))
    replay = make_replay(90, 3, config, **WINDOWS)
    rng = np.random.default_rng(0)
    for _ in range(40):
        replay.add(make_rows(rng, 3))
    feed = ReplayFeed(replay, WINDOWS, CUDA, prefetch=True, on_device=True)
    batch = feed("plain")
    extras = {key: torch.ones_like(batch[key]) for key in EXTRAS}
    priority = torch.ones(batch["stepid"].shape, device=CUDA)
    feed.prioritize(batch["stepid"], priority)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        replay.add(make_rows(rng, 3))
        torch.cuda._sleep(200_000_000)
        batch = feed("plain", batch)
        feed.write_back(batch["stepid"], extras)
        feed.prioritize(batch["stepid"], priority)
        assert not torch.cuda.current_stream().query(), "the host waited for the GPU"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    all_ids = torch.arange(0, 200, device=CUDA)
    one = {k: torch.ones((200, *s.shape), device=CUDA) for k, s in EXTRAS.items()}
    one["stoch"] = one["stoch"].byte()
    feed.write_back(all_ids, one)
    assert (feed("plain")["deter"] == 1).all()
    feed.flush()


@pytest.mark.gpu
def test_write_back_can_be_captured_in_a_cuda_graph():
    feeds = cuda_pair(CONFIGS["uniform"], on_device=True)
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = make_rows(rng, 3)
        for feed in feeds:
            feed.replay.add(rows)
    host, gpu = feeds
    batch = gpu("plain")
    extras = {key: torch.zeros_like(batch[key]) for key in EXTRAS}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        gpu.write_back(batch["stepid"] - 1000, extras)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        gpu.write_back(batch["stepid"], extras)
    host("plain")
    for turn in range(8):
        expected, batch = host("plain"), gpu("plain", batch)
        for key in expected:
            assert torch.equal(expected[key], batch[key].cpu()), key
        for key in EXTRAS:
            extras[key].fill_(turn)
        graph.replay()
        host.write_back(expected["stepid"], {k: v.cpu() for k, v in extras.items()})
