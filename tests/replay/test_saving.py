"""Saving and loading a replay, also after crashes and with damaged files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from test_replay import EXTRAS, SPACES, make_replay, make_rows

from reverie.api import UserError
from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig, SelectorFractions
from reverie.replay.segment_files import listed_files
from reverie.rows import Window
from reverie.spaces import Space

WINDOWS = {"train": Window(4, 5, context=1), "chunks": Window(2, 4, consec=3)}


def config(storage="ram", **options):
    return ReplayConfig(storage=storage, segment=16, **options)


def fill(replay, rng, turns, streams=3):
    for _ in range(turns):
        replay.add(make_rows(rng, streams))


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], two[key], err_msg=key)


def through_checkpoint(state):
    """Convert arrays to tensors, as a checkpoint does."""
    if isinstance(state, dict):
        return {key: through_checkpoint(value) for key, value in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state


def files_in(path):
    return sorted(p.name for p in path.iterdir() if p.is_file())


def train(replay, rng, turns):
    """Add, sample and write back as a run does; returns all batches."""
    batches = []
    for _ in range(turns):
        replay.add(make_rows(rng, 3))
        for name in WINDOWS:
            batch = replay.sample(name)
            batches.append(batch)
            extras = make_rows(rng, batch["stepid"].size)
            shape = batch["stepid"].shape
            extras = {k: extras[k].reshape(*shape, *EXTRAS[k].shape) for k in EXTRAS}
            replay.write_back(batch["stepid"], extras)
            replay.prioritize(batch["stepid"], rng.random(shape))
    return batches


@pytest.mark.parametrize("turns", [20, 90], ids=["filling", "full"])
@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_a_resumed_replay_is_bit_identical(storage, turns, tmp_path):
    fracs = SelectorFractions(0.4, 0.3, 0.3)
    arguments = (150, 3, config(storage, fracs=fracs), tmp_path)
    replay = make_replay(*arguments, exact_extras=True, **WINDOWS)
    rng = np.random.default_rng(1)
    fill(replay, rng, 20)
    train(replay, rng, turns)
    state = replay.save()
    rng_state = rng.bit_generator.state
    expected = train(replay, rng, 12)
    replay.save()  # a later save without a checkpoint
    again = make_replay(*arguments, seed=5, exact_extras=True, **WINDOWS)
    again.load(through_checkpoint(state))
    rng.bit_generator.state = rng_state
    for one, two in zip(expected, train(again, rng, 12), strict=True):
        assert_equal(one, two)


@pytest.mark.parametrize("before", ["ram", "disk"])
@pytest.mark.parametrize("after", ["ram", "disk"])
def test_a_replay_can_change_between_memory_and_disk(before, after, tmp_path):
    rng = np.random.default_rng(0)
    replay = make_replay(150, 3, config(before), tmp_path, exact_extras=True, **WINDOWS)
    fill(replay, rng, 70)
    train(replay, rng, 5)
    state = replay.save()
    expected = [replay.sample("train") for _ in range(20)]
    other = make_replay(150, 3, config(after), tmp_path, **WINDOWS)
    other.load(state)
    for batch in expected:
        assert_equal(batch, other.sample("train"))


def test_a_save_writes_only_new_steps(tmp_path):
    rng = np.random.default_rng(0)
    replay = make_replay(1000, 3, config(), tmp_path, **WINDOWS)
    fill(replay, rng, 100)
    replay.save()
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files_in(tmp_path)}
    fill(replay, rng, 10)
    replay.delete_unused_files([replay.save()])
    after = {name: (tmp_path / name).stat().st_mtime_ns for name in files_in(tmp_path)}
    assert len(set(before) - set(after)) == 1  # the partial segment was replaced
    assert all(after[name] == before[name] for name in set(after) & set(before))


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_unused_files_are_deleted_and_needed_files_kept(storage, tmp_path):
    rng = np.random.default_rng(0)
    replay = make_replay(150, 3, config(storage), tmp_path, **WINDOWS)
    states, sizes = [], []
    fill(replay, rng, 20)
    for _ in range(30):
        train(replay, rng, 7)
        states = [*states, replay.save()][-2:]
        (tmp_path / ".0000-half.tmp").write_bytes(b"left by a crash")
        replay.delete_unused_files(states)
        sizes.append(len(files_in(tmp_path)))
        for state in states:
            assert {r.name for r in listed_files(state["files"])} <= set(
                files_in(tmp_path)
            )
    assert max(sizes) < 40
    assert not list(tmp_path.glob(".*"))


def test_segments_are_plain_safetensors_files(tmp_path):
    replay = make_replay(100, 3, config(), tmp_path, **WINDOWS)
    fill(replay, np.random.default_rng(0), 10)
    replay.save()
    columns = load_file(tmp_path / files_in(tmp_path)[0])
    assert columns["image"].shape == (16, 20, 20, 3)


@pytest.mark.parametrize("storage", ["ram", "disk"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "empty"])
def test_a_damaged_file_is_reported_and_quarantined(storage, damage, tmp_path):
    rng = np.random.default_rng(0)
    replay = make_replay(200, 3, config(storage), tmp_path, **WINDOWS)
    fill(replay, rng, 60)
    state = replay.save()
    victim = tmp_path / state["files"][3][2].name
    lost = set(range(48, 64))
    data = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    elif damage == "truncated":
        victim.write_bytes(data[:-100])
    elif damage == "empty":
        victim.write_bytes(b"")
    else:
        data[len(data) // 2] ^= 4
        victim.write_bytes(data)
    again = make_replay(200, 3, config(storage), tmp_path, **WINDOWS)
    with pytest.warns(RuntimeWarning, match=victim.name):
        again.load(through_checkpoint(state))
    assert (tmp_path / "quarantine" / victim.name).exists() == (damage != "missing")
    assert len(again) == 180 - 16
    for _ in range(100):
        ids = again.sample("train")["stepid"]
        assert not lost & set(ids.reshape(-1).tolist())
        assert (np.diff(ids, axis=1) == 3).all()  # no window crosses the gap
    train(again, rng, 80)  # until the gap is evicted
    state = again.save()
    again.delete_unused_files([state])
    once_more = make_replay(200, 3, config(storage), tmp_path, **WINDOWS)
    once_more.load(state)
    assert len(once_more) == len(again) == 200


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_losing_the_newest_file_starts_new_streams(storage, tmp_path):
    rng = np.random.default_rng(0)
    replay = make_replay(200, 3, config(storage), tmp_path, **WINDOWS)
    fill(replay, rng, 50)
    state = replay.save()
    (tmp_path / state["files"][-1][2].name).unlink()
    again = make_replay(200, 3, config(storage), tmp_path, **WINDOWS)
    with pytest.warns(RuntimeWarning, match="continues without"):
        again.load(state)
    fill(again, rng, 20)
    for g in again.index.window_starts(6):
        ids = again.index.window_ids(np.array([g]), 6)[0]
        assert (ids < 144).all() or (ids >= 150).all()
    again.load(again.save())
    assert len(again) == 200 - 6


def test_a_replay_without_any_of_its_files_is_empty(tmp_path):
    replay = make_replay(200, 3, config(), tmp_path, **WINDOWS)
    fill(replay, np.random.default_rng(0), 20)
    state = replay.save()
    for name in files_in(tmp_path):
        (tmp_path / name).unlink()
    again = make_replay(200, 3, config(), tmp_path, **WINDOWS)
    with pytest.warns(RuntimeWarning):
        again.load(state)
    assert len(again) == 0
    fill(again, np.random.default_rng(0), 20)
    assert again.sample("train")["stepid"].min() >= 60


def test_loading_other_shapes_raises(tmp_path):
    replay = make_replay(100, 3, config(), tmp_path, **WINDOWS)
    fill(replay, np.random.default_rng(0), 5)
    state = replay.save()
    spaces = {**SPACES, "vector": Space(np.dtype(np.float32), (4,))}
    other = Replay(
        spaces,
        EXTRAS,
        config(),
        capacity=100,
        num_envs=3,
        windows=WINDOWS,
        directory=tmp_path,
        seed=0,
    )
    with pytest.raises(UserError, match="vector"):
        other.load(state)


@pytest.mark.parametrize(
    "change",
    [
        {"stream_end": np.full(3, -7)},
        {"stream_end": np.full(3, 1 << 62)},
        {"stream_end": np.zeros((3, 2), int)},
        {"env_stream": np.zeros((3, 2), int)},
        {"env_stream": np.full(3, -1)},
    ],
)
def test_a_state_that_does_not_fit_the_steps_raises(change, tmp_path):
    replay = make_replay(100, 3, config(), tmp_path, **WINDOWS)
    fill(replay, np.random.default_rng(0), 5)
    state = replay.save()
    state["index"] |= change
    with pytest.raises(ValueError, match=r"the index of the replay|of another length"):
        make_replay(100, 3, config(), tmp_path, **WINDOWS).load(state)


def test_more_environments_on_resume_start_new_streams(tmp_path):
    rng = np.random.default_rng(0)
    replay = make_replay(400, 3, config(), tmp_path, **WINDOWS)
    fill(replay, rng, 40)
    state = replay.save()
    wider = make_replay(400, 5, config(), tmp_path, **WINDOWS)
    wider.load(state)
    fill(wider, rng, 20, streams=5)
    for g in wider.index.window_starts(6):
        ids = wider.index.window_ids(np.array([g]), 6)[0]
        assert len(set(np.diff(ids))) == 1


def test_without_saving_only_counters_are_restored(tmp_path):
    replay = make_replay(200, 3, config(save=False), tmp_path, **WINDOWS)
    fill(replay, np.random.default_rng(0), 20)
    state = replay.save()
    assert files_in(tmp_path) == []
    again = make_replay(200, 3, config(save=False), tmp_path, **WINDOWS)
    again.load(state)
    assert len(again) == 0
    assert again.add(make_rows(np.random.default_rng(0), 3)).tolist() == [60, 61, 62]


@pytest.mark.extended
@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_a_full_disk_raises_and_loses_nothing(storage, tmp_path):
    # A limit on the file size makes writes fail as on a full disk.
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from pathlib import Path
from test_replay import make_replay, make_rows
from test_saving import WINDOWS, config, fill, train, assert_equal
from reverie.storage.os_errors import DiskFull
path = Path({str(tmp_path)!r})
rng = np.random.default_rng(0)
replay = make_replay(200, 3, config({storage!r}), path, exact_extras=True, **WINDOWS)
fill(replay, rng, 40)
state = replay.save()
replay.delete_unused_files([state])
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
caught = 0
for attempt in range(3):
    try:
        train(replay, rng, 6)
        replay.save()
    except DiskFull as error:
        caught += 1
        message = str(error)
assert caught == 3, caught
assert "The disk is full" in message and "Fix:" in message, message
assert not list(path.glob(".*")), "temporary files are left"
again = make_replay(200, 3, config({storage!r}), path, **WINDOWS)
again.load(state)
assert len(again) == 120
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
train(replay, rng, 6)
state = replay.save()  # works again when there is space
once_more = make_replay(200, 3, config({storage!r}), path, **WINDOWS)
once_more.load(state)
assert_equal(replay.sample("train"), once_more.sample("train"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
@pytest.mark.parametrize(
    "storage", [pytest.param("ram", marks=pytest.mark.slow), "disk"]
)
def test_the_last_state_can_be_loaded_after_a_kill_at_any_time(storage, tmp_path):
    script = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from pathlib import Path
from test_replay import make_replay
from test_saving import WINDOWS, config, fill, train
path = Path(sys.argv[1])
def plain(x):
    return x.tolist() if isinstance(x, np.ndarray) else int(x)
replay = make_replay(300, 3, config({storage!r}), path / "replay", **WINDOWS)
rng = np.random.default_rng()
state = None
if (path / "index.json").exists():
    state = json.loads((path / "index.json").read_text())
    import warnings; warnings.simplefilter("error")
    replay.load(state)
    first, total = state["index"]["first"], state["index"]["total"]
    assert len(replay) == total - first, (len(replay), first, total)
    print("resumed", total, flush=True)
else:
    fill(replay, rng, 20)
print("ready", flush=True)
while True:
    train(replay, rng, 3)
    state = replay.save()
    (path / "index.tmp").write_text(json.dumps(state, default=plain))
    os.replace(path / "index.tmp", path / "index.json")
    replay.delete_unused_files([state])
"""
    rng = np.random.default_rng(0)
    total = 0
    for trial in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = process.stdout.readline()
        if line.startswith("resumed"):
            assert int(line.split()[1]) >= total
            total = int(line.split()[1])
            line = process.stdout.readline()
        assert line == "ready\n", process.stderr.read()
        while trial == 2 and not (tmp_path / "index.json").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)  # at least one state is saved, also on a slow machine
        time.sleep(rng.random() * 0.3)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert total > 0
    leftovers = files_in(tmp_path / "replay")
    assert len(leftovers) < 100


@pytest.mark.parametrize("how", ["deleted", "shortened"])
def test_a_file_lost_while_in_use_is_skipped(tmp_path, how):
    rng = np.random.default_rng(0)
    replay = make_replay(300, 3, config("disk"), tmp_path, **WINDOWS)
    fill(replay, rng, 90)
    replay.sample("train")
    path = tmp_path / replay.files.segments[4].rows.record.name
    if how == "deleted":
        replay.store.close()  # unmap all files
        path.unlink()
    else:
        train(replay, rng, 15)  # maps all files
        os.truncate(path, 0)
    with pytest.warns(RuntimeWarning, match="without steps 64 to 79"):
        batches = train(replay, rng, 15)
    used = set(np.concatenate([b["stepid"].reshape(-1) for b in batches]).tolist())
    assert not used & set(range(64, 80))
    assert len(replay) == 300 - 16
    state = replay.save()
    again = make_replay(300, 3, config("disk"), tmp_path, **WINDOWS)
    again.load(state)
    assert len(again) == len(replay)


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_a_replay_can_load_its_own_last_save(storage, tmp_path):
    rng = np.random.default_rng(0)
    arguments = (300, 3, config(storage), tmp_path)
    replay = make_replay(*arguments, exact_extras=True, **WINDOWS)
    fill(replay, rng, 80)
    train(replay, rng, 5)
    state = replay.save()
    rng_state = rng.bit_generator.state
    expected = train(replay, rng, 10)
    replay.load(state)
    rng.bit_generator.state = rng_state
    for one, two in zip(expected, train(replay, rng, 10), strict=True):
        assert_equal(one, two)
