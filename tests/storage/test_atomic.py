"""Atomic writes: complete files, nothing left behind, clear errors."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from full_disk import file_size_limit

from reverie.storage.atomic import (
    atomic_write,
    ignore_unwritable,
    make_folder,
    open_append,
    write_file,
    write_json,
)
from reverie.storage.os_errors import DiskFull, WriteFailed, explain_write_errors


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


def test_a_missing_folder_is_reported_with_a_fix(tmp_path):
    with pytest.raises(WriteFailed, match=r"a\.txt could not be written(.|\n)*Fix: "):
        write_file(tmp_path / "missing" / "a.txt", b"")


def test_optional_results_are_skipped_on_a_full_disk():
    with pytest.warns(UserWarning, match="not saved"), ignore_unwritable():
        raise DiskFull("full")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_optional_results_are_skipped_in_a_read_only_folder(code, recwarn):
    with ignore_unwritable(), explain_write_errors(Path("eval.json")):
        raise OSError(code, os.strerror(code))
    assert not recwarn.list


def test_optional_results_that_are_lost_are_named():
    with (
        pytest.warns(UserWarning, match=r"not saved. eval.json .*Input/output"),
        ignore_unwritable(),
        explain_write_errors(Path("eval.json")),
    ):
        raise OSError(errno.EIO, "")


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("kept")
    for link in (target, tmp_path / "missing"):
        (tmp_path / ".a.txt.tmp").symlink_to(link)
        write_file(tmp_path / "a.txt", b"new")
        assert (tmp_path / "a.txt").read_bytes() == b"new"
    assert target.read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "target"]


def test_a_pipe_in_place_of_a_temporary_file_does_not_block(tmp_path):
    os.mkfifo(tmp_path / ".a.txt.tmp")
    write_file(tmp_path / "a.txt", b"new")
    assert (tmp_path / "a.txt").read_bytes() == b"new"


def test_a_link_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WriteFailed, match=r"symbolic link(.|\n)*Fix: remove"):
        make_folder(tmp_path / "link")
    make_folder(tmp_path / "new")
    make_folder(tmp_path / "new")
    with pytest.raises(WriteFailed, match="No such file"):
        make_folder(tmp_path / "a" / "b")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_nothing_is_appended_to_links_and_pipes(tmp_path, kind):
    path, target = tmp_path / "log", tmp_path / "target"
    target.write_text("kept")
    if kind == "link":
        path.symlink_to(target)
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    with pytest.raises(WriteFailed, match=r"Fix: rm"):
        open_append(path)
    assert target.read_text() == "kept"
