"""Files of arrays that are links, pipes, or cannot be opened at the moment."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from reverie.storage import array_file
from reverie.storage.array_file import (
    GatheredRows,
    find_corruption,
    quarantine,
    write_arrays,
)
from reverie.storage.limits import InvalidFile


@pytest.fixture
def file(tmp_path):
    return write_arrays(tmp_path, "a-3", {"x": np.arange(3)})


def test_a_link_is_used_only_if_links_are_followed(tmp_path, file):
    path = tmp_path / file.record.name
    path.rename(tmp_path / "target")
    path.symlink_to(tmp_path / "target")
    assert find_corruption(tmp_path, file.record) == "is a symbolic link"
    with pytest.raises(InvalidFile, match="symbolic link"):
        file.open(tmp_path)
    assert find_corruption(tmp_path, file.record, follow_links=True) is None
    followed = array_file.read_layout(tmp_path, file.record, follow_links=True)
    np.testing.assert_array_equal(followed.open(tmp_path)[1]["x"], np.arange(3))


def test_a_pipe_does_not_block(tmp_path, file):
    (tmp_path / file.record.name).unlink()
    os.mkfifo(tmp_path / file.record.name)
    assert find_corruption(tmp_path, file.record) == "is not a regular file"
    with pytest.raises(InvalidFile, match="not a regular file"):
        file.open(tmp_path)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EACCES])
def test_a_file_that_cannot_be_opened_now_is_not_called_damaged(
    tmp_path, file, code, monkeypatch
):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(array_file, "open_regular", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        find_corruption(tmp_path, file.record)
    monkeypatch.undo()
    assert find_corruption(tmp_path, file.record) is None


def test_a_disk_that_cannot_read_a_file_has_damaged_it(tmp_path, file, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(array_file, "open_regular", fail)
    assert "cannot be read (Input/output" in find_corruption(tmp_path, file.record)


def test_damaged_files_are_not_moved_through_a_link(tmp_path, file):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "quarantine").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match=r"could not be moved .*symbolic link"):
        quarantine(tmp_path, file.record.name, "is damaged", "It is not used.")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / file.record.name).exists()


def test_a_link_without_a_target_is_moved_itself(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "missing")
    with pytest.warns(RuntimeWarning, match="moved to"):
        quarantine(tmp_path, "a", "is a symbolic link", "It is not used.")
    assert (tmp_path / "quarantine" / "a").is_symlink()


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / ".a-3.tmp").symlink_to(tmp_path / "target")
    write_arrays(tmp_path, "a-3", {"x": np.arange(3)})
    assert (tmp_path / "target").read_text() == "kept"


def test_arrays_that_overlap_are_refused(tmp_path):
    """Copies of them would take more memory than the size of the file."""
    file = write_arrays(tmp_path, "a-3", {"x": np.arange(3), "y": np.arange(3)})
    path = tmp_path / file.record.name
    data = path.read_bytes()
    assert data.count(b"[24,48]") == 1
    path.write_bytes(data.replace(b"[24,48]", b"[0,24] "))
    with pytest.raises(InvalidFile, match="overlap"):
        array_file.read_layout(tmp_path, file.record._replace(size=len(data) - 24))


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_gathered_rows_are_written_as_the_array_they_describe(
    tmp_path, monkeypatch, block_bytes
):
    monkeypatch.setattr(array_file, "_WRITE_BYTES", block_bytes)
    rng = np.random.default_rng(0)
    sources = {
        "image": rng.integers(0, 256, (50, 3, 5), np.uint8),
        "reward": rng.standard_normal(50).astype(np.float32),
        "is_first": rng.random(50) < 0.5,
    }
    rows = rng.permutation(50)[:37]
    gathered = {k: GatheredRows(source, rows) for k, source in sources.items()}
    file = write_arrays(tmp_path, "a-37", {**gathered, "row": rows})
    copied = {key: source[rows] for key, source in sources.items()}
    assert file == write_arrays(tmp_path, "a-37", {**copied, "row": rows})
    assert find_corruption(tmp_path, file.record) is None
    for key, value in file.open(tmp_path)[1].items():
        np.testing.assert_array_equal(value, {**copied, "row": rows}[key])
