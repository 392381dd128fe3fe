"""Segments that are written by threads while steps are read, changed and saved."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from test_replay import EXTRAS, make_replay, make_rows

from reverie.replay.config import ReplayConfig
from reverie.rows import Window
from reverie.storage import array_file
from reverie.storage.atomic import DiskFull

WINDOWS = {"train": Window(4, 5, context=1)}
STREAMS, SEGMENT = 2, 8


@pytest.fixture
def gate(monkeypatch):
    """Files are not written until this event is set."""
    opened = threading.Event()
    write = array_file.write_arrays

    def late(*arguments):
        assert opened.wait(30)
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
