"""Segments that are written by threads while steps are read, changed and saved."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import numpy as np
import pytest
from test_replay import EXTRAS, make_replay, make_rows

from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig
from reverie.replay.segment_files import listed_files
from reverie.rows import Window
from reverie.spaces import Space
from reverie.storage import array_file
from reverie.storage.limits import InvalidFile
from reverie.storage.os_errors import DiskFull

WINDOWS = {"train": Window(4, 5, context=1)}
STREAMS, SEGMENT = 2, 8


@pytest.fixture
def gate(monkeypatch):
    """Files are not written until this event is set."""
    opened = threading.Event()
    write = array_file.write_arrays

    def late(*arguments):
        assert opened.wait(120)
        return write(*arguments)

    monkeypatch.setattr(array_file, "write_arrays", late)
    yield opened
    opened.set()


def make(path, **options):
    config = ReplayConfig(storage="disk", segment=SEGMENT)
    settings = {"capacity": 200, "streams": STREAMS, "directory": path}
    return make_replay(config=config, **settings, **WINDOWS, **options)


def fill(replay, turns, rng):
    rows = [make_rows(rng, STREAMS) for _ in range(turns)]
    ids = np.concatenate([replay.add(row) for row in rows])
    return ids, {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}


def read(replay, ids):
    out = {key: space.zeros(len(ids)) for key, space in replay.spaces.items()}
    assert replay.read(ids, out)
    return out


def test_steps_of_pending_files_can_be_read_and_changed(gate, tmp_path):
    replay = make(tmp_path, exact_extras=True)
    ids, rows = fill(replay, 8, np.random.default_rng(0))
    assert replay.files.first_unwritten == 0  # the first segment is pending
    rng = np.random.default_rng(1)
    fresh = make_rows(rng, 3)
    changed = ids[[1, 4, 6]]
    replay.write_back(changed, {key: fresh[key] for key in EXTRAS})
    for key in EXTRAS:
        rows[key][[1, 4, 6]] = fresh[key]
    for before in (True, False):
        for key, value in read(replay, ids).items():
            np.testing.assert_array_equal(value, rows[key], err_msg=key)
        if before:
            gate.set()
            state = replay.save()
            assert replay.files.first_unwritten == 16
    replay.close()
    again = make(tmp_path, exact_extras=True)
    again.load(state)
    for key, value in read(again, ids).items():
        np.testing.assert_array_equal(value, rows[key], err_msg=key)
    again.close()


def test_files_are_intact_if_extras_change_while_they_are_written(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(array_file, "_WRITE_BYTES", 1 << 12)
    space = Space(np.float32, (2048,))
    config = ReplayConfig(storage="disk", segment=64)
    replay = Replay(
        {"is_first": Space(bool)},
        {"wide": space},
        config,
        capacity=512,
        num_envs=1,
        windows=WINDOWS,
        directory=tmp_path,
        seed=0,
    )
    row = {"is_first": np.zeros(1, bool), "wide": space.zeros(1)}
    for step in range(512):
        ids = replay.add(row)
        written = max(0, replay.files.first_unwritten - 64)
        recent = np.arange(written, ids[-1] + 1)
        values = np.broadcast_to(np.float32(step + 1), (len(recent), 2048))
        replay.write_back(recent, {"wide": values})
    state = replay.save()
    replay.close()
    for record in listed_files(state["files"]):
        assert array_file.find_corruption(tmp_path, record) is None
        file = array_file.read_layout(tmp_path, record)
        wide = file.open(tmp_path)[1]["wide"]
        assert (wide == wide[:, :1]).all()  # old or new, but not parts of both


def test_adding_waits_if_the_tail_is_full(gate, tmp_path):
    replay = make(tmp_path)
    rng = np.random.default_rng(0)
    _, rows = fill(
        replay, 14, rng
    )  # 28 steps: three segments are pending, the tail holds 32
    thread = threading.Thread(target=fill, args=(replay, 4, rng))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    gate.set()
    thread.join(30)
    assert not thread.is_alive()
    assert len(replay) == 36
    out = read(replay, np.arange(28))
    for key, value in out.items():
        np.testing.assert_array_equal(value, rows[key], err_msg=key)
    replay.close()


def test_segments_that_failed_to_be_written_are_written_later(monkeypatch, tmp_path):
    write, failing = array_file.write_arrays, [True]

    def sometimes(*arguments):
        if failing[0]:
            raise DiskFull("full")
        return write(*arguments)

    monkeypatch.setattr(array_file, "write_arrays", sometimes)
    replay = make(tmp_path)
    rng = np.random.default_rng(0)
    rows = []

    def add() -> None:
        row = make_rows(rng, STREAMS)
        replay.add(row)
        rows.append(row)

    with pytest.raises(DiskFull):
        [add() for _ in range(20)]
    failing[0] = False
    held = len(replay)
    assert held == STREAMS * len(rows)  # the row that could not be added is not stored
    fill(replay, 10, rng)
    out = read(replay, np.arange(held))
    for key, value in out.items():
        expected = np.concatenate([row[key] for row in rows])
        np.testing.assert_array_equal(value, expected, err_msg=key)
    replay.close()


def test_pending_files_are_not_deleted(gate, tmp_path):
    replay = make(tmp_path)
    ids, rows = fill(replay, 8, np.random.default_rng(0))
    threading.Timer(0.2, gate.set).start()
    replay.delete_unused_files([])
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    np.testing.assert_array_equal(read(replay, ids)["image"], rows["image"])
    replay.close()


def rows_files(path):
    return sorted(p for p in path.glob("*.safetensors") if "extras" not in p.name)


@pytest.mark.parametrize("exact", [True, False])
def test_deleted_files_are_written_again_if_the_steps_are_in_memory(tmp_path, exact):
    config = ReplayConfig(storage="ram", segment=SEGMENT)
    replay = make_replay(60, STREAMS, config, tmp_path, exact_extras=exact, **WINDOWS)
    rng = np.random.default_rng(0)
    fill(replay, 20, rng)
    replay.save()
    fill(replay, 14, rng)  # the first segments are partly evicted
    fresh = make_rows(rng, 3)
    replay.write_back(np.array([20, 30, 40]), {key: fresh[key] for key in EXTRAS})
    saved = [record.name for record in listed_files(replay.save()["files"])]
    ids = np.arange(replay.index.first, replay.index.total)
    expected = read(replay, ids)
    for name in saved[::2]:
        (tmp_path / name).unlink()
    with pytest.warns(RuntimeWarning, match="was deleted while in use") as caught:
        state = replay.save()
    text = "\n".join(str(warning.message) for warning in caught)
    listed = {record.name for record in listed_files(state["files"])}
    assert all(name in text or name in listed for name in saved[::2])
    replay.close()
    again = make_replay(60, STREAMS, config, tmp_path, exact_extras=exact, **WINDOWS)
    again.load(state)
    assert len(again) == len(ids)
    for key, value in read(again, ids).items():
        if exact or key not in EXTRAS:
            np.testing.assert_array_equal(value, expected[key], err_msg=key)
    again.close()


@pytest.mark.parametrize("count", [1, 3])
def test_a_save_continues_without_the_steps_of_deleted_files(tmp_path, count):
    replay = make(tmp_path)
    rng = np.random.default_rng(0)
    fill(replay, 30, rng)
    replay.save()
    deleted = rows_files(tmp_path)[1 : 1 + count]
    for path in deleted:
        path.unlink()
    fill(replay, 4, rng)
    with pytest.warns(RuntimeWarning, match="was deleted while in use") as caught:
        state = replay.save()
    text = "\n".join(str(warning.message) for warning in caught)
    assert all(path.name in text for path in deleted)
    assert "continues without steps 8 to 15" in text
    assert len(replay) == 68 - count * SEGMENT
    fill(replay, 4, rng)
    replay.sample("train")
    replay.save()
    replay.close()
    again = make(tmp_path)
    again.load(state)
    assert len(again) == 68 - count * SEGMENT
    again.close()


def test_a_deleted_folder_is_created_again(tmp_path):
    config = ReplayConfig(storage="ram", segment=SEGMENT)
    path = tmp_path / "replay"
    replay = make_replay(60, STREAMS, config, path, **WINDOWS)
    ids, rows = fill(replay, 20, np.random.default_rng(0))
    replay.save()
    shutil.rmtree(path)
    with pytest.warns(RuntimeWarning, match="was deleted while in use"):
        state = replay.save()
    replay.close()
    again = make_replay(60, STREAMS, config, path, **WINDOWS)
    again.load(state)
    for key, value in read(again, ids).items():
        np.testing.assert_array_equal(value, rows[key], err_msg=key)
    again.close()


@pytest.mark.parametrize(
    "name",
    ["../a.txt", "..", "", "a\0b", "a\\b", "quarantine", "a.safetensors", None, 3],
)
def test_names_that_are_not_segments_are_refused(tmp_path, name):
    replay = make(tmp_path / "replay")
    fill(replay, 20, np.random.default_rng(0))
    state = replay.save()
    (tmp_path / "a.txt").write_text("kept")
    first, count, record, extras = state["files"][0]
    state["files"][0] = [first, count, [name, 4, 0], extras]
    with pytest.raises(InvalidFile, match="not a file of the replay"):
        replay.load(state)
    with pytest.raises(InvalidFile, match="not a file of the replay"):
        replay.delete_unused_files([state])
    assert (tmp_path / "a.txt").read_text() == "kept"
    assert (tmp_path / "replay" / record.name).exists()
    replay.close()


@pytest.mark.parametrize("files", [{}, "text", 3, None])
def test_a_list_of_files_must_be_a_list(files):
    with pytest.raises(InvalidFile, match="not valid"):
        listed_files(files)


@pytest.mark.parametrize(
    "entry", [[], [0, 1], [-1, 8, None, None], [0, 0, None, None], ["0", 8, None, None]]
)
def test_a_list_of_files_with_another_structure_is_refused(tmp_path, entry):
    replay = make(tmp_path)
    fill(replay, 4, np.random.default_rng(0))
    with pytest.raises(InvalidFile, match="not valid"):
        replay.load({**replay.save(), "files": [entry]})
    replay.close()


def test_too_many_open_files_do_not_cost_any_steps(tmp_path, monkeypatch):
    replay = make(tmp_path)
    ids, rows = fill(replay, 30, np.random.default_rng(0))
    state = replay.save()
    read(replay, ids)  # maps all files
    limit, opened = 2, array_file.ArrayFile.open

    def limited(self, directory):
        if len(replay.store._maps) >= limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(self, directory)

    monkeypatch.setattr(array_file.ArrayFile, "open", limited)
    replay.store._maps.clear()
    for key, value in read(replay, ids).items():
        np.testing.assert_array_equal(value, rows[key], err_msg=key)
    limit = 0
    replay.store._maps.clear()
    with pytest.raises(OSError, match="Too many open files"):
        read(replay, ids)
    with pytest.raises(OSError, match="Too many open files"):
        replay.load(state)
    assert not (tmp_path / "quarantine").exists()
    replay.close()
