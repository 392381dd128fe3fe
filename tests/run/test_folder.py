"""The lock of a run folder, and links and special files in it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

import pytest

from reverie.api import UserError
from reverie.run import folder
from reverie.run.checkpoint import PARTIAL, Checkpoints
from reverie.run.folder import check_lock, lock_folder, open_lock, refuse_links


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_a_lock_that_is_not_a_regular_file_is_refused(tmp_path, kind):
    target = tmp_path / "target"
    target.write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    if kind in ("link", "dangling"):
        (run / ".lock").symlink_to(target if kind == "link" else tmp_path / "missing")
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(run / ".lock")
    with pytest.raises(UserError, match=r"lock file .*(\n|.)*Fix: rm "):
        lock_folder(run)
    assert target.read_text() == "kept"
    assert not (tmp_path / "missing").exists()


def test_a_lock_is_exclusive_and_its_file_is_not_changed(tmp_path):
    (tmp_path / ".lock").write_text("text of another program")
    with lock_folder(tmp_path):
        with pytest.raises(UserError, match="Another process"):
            lock_folder(tmp_path)
        assert (tmp_path / ".lock").read_text() == "text of another program"
    lock_folder(tmp_path).close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_a_lock_that_cannot_be_created_is_an_error_with_a_fix(
    tmp_path, monkeypatch, code
):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(folder, "open_descriptor", fail)
    with pytest.raises(UserError, match=rf"{os.strerror(code)}(.|\n)*Fix: "):
        lock_folder(tmp_path)


@pytest.mark.parametrize("change", ["deleted", "replaced", "moved", "lock deleted"])
def test_a_folder_that_is_not_the_locked_one_is_noticed(tmp_path, change):
    run = tmp_path / "run"
    with lock_folder(run) as lock:
        check_lock(run, lock)
        if change == "lock deleted":
            (run / ".lock").unlink()
        elif change == "moved":
            run.rename(tmp_path / "other")
        else:
            shutil.rmtree(run)
        if change == "replaced":
            run.mkdir()
            open_lock(run / ".lock").close()
        with pytest.raises(UserError, match=r"deleted, moved or unmounted(.|\n)*Fix: "):
            check_lock(run, lock)


@pytest.mark.parametrize(
    "name",
    ["ckpt", "replay", "media", "eval/failures", "metrics.jsonl", "scores.jsonl"],
)
def test_links_to_other_places_are_refused(tmp_path, name):
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / "other").symlink_to(tmp_path)  # not written to
    refuse_links(run)
    (run / name).symlink_to(tmp_path)
    with pytest.raises(UserError, match=rf"{name} is a symbolic link(.|\n)*Fix: "):
        refuse_links(run)


def test_pipes_in_place_of_logs_are_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"not a regular file(.|\n)*Fix: rm "):
        refuse_links(tmp_path)


def test_logs_that_are_hard_links_are_refused(tmp_path):
    """Lines would be added to a file in another folder."""
    run, other = tmp_path / "run", tmp_path / "other.jsonl"
    run.mkdir()
    other.write_text("kept")
    os.link(other, run / "metrics.jsonl")
    with pytest.raises(UserError, match=r"hard link(\n|.)*Fix: cp "):
        refuse_links(run)


def test_folders_nested_a_thousand_deep_are_refused(tmp_path):
    previous = os.getcwd()
    top = tmp_path / "run" / "ckpt"
    top.mkdir(parents=True)
    try:
        os.chdir(top)
        for _ in range(1200):
            os.mkdir("a")
            os.chdir("a")
        with pytest.raises(UserError, match="nested"):
            refuse_links(tmp_path / "run")
        os.chdir(previous)
        (top / "a").rename(top / f"{PARTIAL}000000001")
        refuse_links(tmp_path / "run")
        Checkpoints(top).prune()
    finally:
        os.chdir(previous)
        subprocess.run(["rm", "-r", str(top)], check=True)
