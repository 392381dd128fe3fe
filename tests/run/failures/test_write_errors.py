"""Runs on a disk that fails, is read-only, or whose folder is deleted."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import nullcontext

import pytest

from reverie.run.online_run import OnlineRun
from reverie.storage import array_file, atomic


def one_sentence(code: int, error: str) -> None:
    assert code == 2, error
    messages = [line for line in error.splitlines() if line.startswith("reverie: ")]
    assert len(messages) == 1, error
    assert "\n  Fix: " in error


class FailingDisk:
    """Makes a function of `os` fail for paths or descriptors inside of a folder."""

    def __init__(self, monkeypatch, function: str, part: str, code: int):
        self.calls, real = 0, getattr(os, function)

        def fail(target, *arguments, **options):
            path = target
            if isinstance(target, int):
                path = os.readlink(f"/proc/self/fd/{target}")
            if part in str(path):
                self.calls += 1
                raise OSError(code, os.strerror(code), str(path))
            return real(target, *arguments, **options)

        monkeypatch.setattr(os, function, fail)


@pytest.mark.extended_except("fsync-/ckpt/-5", "mkdir-/ckpt/-122")
@pytest.mark.parametrize(
    ("function", "part", "code"),
    [
        ("fsync", "/ckpt/", errno.EIO),
        ("fsync", "/replay/", errno.ENODEV),
        ("rename", "/ckpt/", errno.ESTALE),
        ("replace", "/replay/", errno.EACCES),
        ("mkdir", "/ckpt/", errno.EROFS),
        ("mkdir", "/ckpt/", errno.EDQUOT),
    ],
)
def test_a_failing_disk_stops_the_run_and_the_last_checkpoint_stays(
    command, monkeypatch, function, part, code
):
    run = command()
    assert run.train(100)[0] == 0
    before = run.newest()
    with monkeypatch.context() as patch:
        disk = FailingDisk(patch, function, part, code)
        result, error = run.train(300)
    assert disk.calls
    one_sentence(result, error)
    assert os.strerror(code) in error
    assert run.newest() == before
    assert not list(run.logdir.rglob(".partial-*"))
    assert run.train(200)[0] == 0


def test_errors_of_the_threads_that_write_segments_stop_the_run(command, monkeypatch):
    run = command(**{"replay.storage": "disk", "run.save_every": 0})
    run.switch("pixels")
    assert run.train(100)[0] == 0
    before = run.newest()

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(array_file, "create_file", fail)
        result, error = run.train(600)
    one_sentence(result, error)
    assert "/replay/" in error
    assert run.newest() == before


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_errors_at_the_start_are_one_sentence(command, monkeypatch, code):
    run = command()
    assert run.train(100)[0] == 0
    before = run.newest()

    def fail(path):
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "create_file", fail)
        result, error = run.train(200)
    one_sentence(result, error)
    assert "config.yaml" in error
    assert run.newest() == before


@pytest.mark.parametrize("what", ["run", "run/ckpt", "run/replay", "run/.lock"])
def test_folders_that_are_deleted_during_a_run(command, monkeypatch, what):
    run = command()
    assert run.train(100)[0] == 0
    save, done = OnlineRun.save, []

    def delete_after_save(self):
        save(self)
        if not done:
            done.append(True)
            target = run.folder / what
            shutil.rmtree(target) if target.is_dir() else target.unlink()

    monkeypatch.setattr(OnlineRun, "save", delete_after_save)
    expected = pytest.warns(RuntimeWarning) if what == "run/replay" else nullcontext()
    with expected:
        result, error = run.train(300)
    if what in ("run", "run/.lock"):
        one_sentence(result, error)
        assert f"{run.logdir} was deleted, moved or unmounted" in error
        assert not (run.logdir / "ckpt").exists() or what != "run"
    else:
        assert result == 0, error
        assert run.newest()[1] == 300


def test_a_deleted_segment_is_named_at_the_next_save_and_the_run_continues(
    command, monkeypatch
):
    run = command()
    assert run.train(100)[0] == 0
    deleted = sorted((run.logdir / "replay").glob("*.safetensors"))[0]
    save = OnlineRun.save

    def delete_after_save(self):
        save(self)
        deleted.unlink(missing_ok=True)

    monkeypatch.setattr(OnlineRun, "save", delete_after_save)
    with pytest.warns(RuntimeWarning, match=deleted.name):
        result, error = run.train(150, **{"run.save_every": 10})
    assert result == 0, error


def test_logs_that_cannot_be_written_do_not_stop_the_run(command, monkeypatch):
    code = errno.EROFS
    run = command(**{"logger.outputs": "jsonl,media,tensorboard"})
    run.switch("pixels")
    assert run.train(100)[0] == 0
    real = os.write

    def fail(descriptor, data):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "metrics.jsonl" in path or "tfevents" in path:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        result, error = run.train(200)
    assert result == 0, error
    assert error.count("Writing the jsonl log failed, the run continues") == 1
    assert os.strerror(code) in error
    assert run.train(300)[0] == 0
    assert {50, 100, 150, 200, 250, 300} <= {line["step"] for line in run.metrics()}
