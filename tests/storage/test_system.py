"""Locks and sizes, also on systems without `fcntl`, `resource` and `sysconf`."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from reverie.storage import atomic
from reverie.storage.system import (
    lock_file,
    open_flags,
    peak_memory,
    physical_memory,
)


def test_a_locked_file_cannot_be_locked_again(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        lock_file(first)
        with pytest.raises(OSError, match="unavailable"):
            lock_file(second, seconds=0.05)
    with path.open("w") as third:
        lock_file(third)


def test_shared_locks_exclude_only_exclusive_ones(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second, path.open("w") as third:
        lock_file(first, exclusive=False)
        lock_file(second, exclusive=False)
        with pytest.raises(OSError, match="unavailable"):
            lock_file(third)


def test_windows_locks_the_first_byte(tmp_path, monkeypatch):
    calls, is_locked = [], [True, False]

    def locking(descriptor, mode, count):
        calls.append((mode, count))
        if is_locked.pop(0):
            raise PermissionError(13, "Permission denied")

    monkeypatch.setitem(sys.modules, "fcntl", None)
    fake = SimpleNamespace(locking=locking, LK_NBLCK=2)
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    with (tmp_path / "lock").open("w") as file:
        lock_file(file, seconds=10)  # the first attempt fails
        assert calls == [(2, 1), (2, 1)]
        is_locked.append(True)
        with pytest.raises(BlockingIOError):
            lock_file(file)


def test_systems_without_locks_do_not_lock(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", None)
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as other:
        lock_file(first)
        lock_file(other)


def test_sizes_are_unknown_without_posix(monkeypatch):
    peak, physical = peak_memory(), physical_memory()
    assert peak is not None
    assert physical is not None
    assert 10**7 < peak < physical
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delattr(os, "sysconf")
    assert peak_memory() is None
    assert physical_memory() is None


def test_flags_that_do_not_exist_are_left_out(monkeypatch):
    assert open_flags("O_NONBLOCK", "O_NO_SUCH_FLAG") == os.O_NONBLOCK
    monkeypatch.delattr(os, "O_NONBLOCK")
    assert open_flags("O_NONBLOCK") == 0


def test_windows_flushes_files_that_are_open_for_writing(tmp_path, monkeypatch):
    opened = []
    real_open = os.open

    def open_file(path, flags):
        opened.append((path, flags))
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(sys, "platform", "win32")
    path = tmp_path / "file"
    path.write_bytes(b"data")
    atomic.fsync(path)
    atomic.fsync(tmp_path)  # Windows cannot open folders
    assert opened == [(path, os.O_RDWR)]
