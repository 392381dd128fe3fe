"""Atomic writes: complete files, nothing left behind, clear errors."""

from __future__ import annotations

import json
import os

import pytest
from full_disk import file_size_limit

from reverie.storage.atomic import (
    DiskFull,
    atomic_write,
    ignore_unwritable,
    write_file,
    write_json,
)


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced(tmp_path, sync):
    path = tmp_path / "a.txt"
    write_file(path, b"old", sync)
    write_file(path, b"new", sync)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_json_can_be_read_back(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1, 2.5]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, 2.5]}


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.txt"
    write_file(path, b"old")

    def interrupted():
        with atomic_write(path) as temporary:
            temporary.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_full_disk_is_reported_with_a_fix_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    write_file(path, b"old")
    with (
        file_size_limit(1000),
        pytest.raises(DiskFull, match=r"disk is full: .*a\.txt(.|\n)*Fix: free"),
    ):
        write_file(path, bytes(10_000))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_other_errors_are_not_changed(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "missing" / "a.txt", b"")


def test_optional_results_are_skipped_on_a_full_disk():
    with pytest.warns(UserWarning, match="not saved"), ignore_unwritable():
        raise DiskFull("full")
