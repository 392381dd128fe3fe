"""Errors of the operating system: one sentence, what to do, and the class to catch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from reverie.storage.os_errors import (
    FILE_ERRORS,
    DiskFull,
    WriteFailed,
    describe_error,
    explain_write_errors,
)

CASES = {
    errno.EIO: "check the disk or network folder",
    errno.ESTALE: "its disk is mounted",
    errno.ENODEV: "its disk is mounted",
    errno.ENOENT: "its disk is mounted",
    errno.EROFS: "get write permission",
    errno.EACCES: "get write permission",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "free some space",
    errno.EMFILE: "ulimit -n 4096",
    errno.EISDIR: "move /data/run/file to another place",
}


@pytest.mark.parametrize("code", CASES, ids=errno.errorcode.get)
def test_a_write_error_names_the_file_the_reason_and_a_fix(code):
    with (
        pytest.raises(WriteFailed) as caught,
        explain_write_errors(Path("/data/run/file")),
    ):
        raise OSError(code, os.strerror(code))
    message, _, fix = str(caught.value).partition("\n  Fix: ")
    assert "/data/run/file could not be written" in message
    assert os.strerror(code) in message
    assert CASES[code] in fix
    assert caught.value.errno == code
    assert isinstance(caught.value, DiskFull) == (code in (errno.EDQUOT, errno.EFBIG))


@pytest.mark.parametrize("code", CASES, ids=errno.errorcode.get)
def test_other_errors_about_files_have_a_sentence_with_a_fix(code):
    assert code in FILE_ERRORS
    for name in ("/data/run/file", b"/data/run/file", None, 3):
        message = describe_error(code, name)
        assert message.count("\n") == 1
        assert "\n  Fix: " in message


def test_errors_that_are_not_about_files_are_not_changed():
    with (
        pytest.raises(OSError, match="no code"),
        explain_write_errors(Path("/data/run/file")),
    ):
        raise OSError("no code")
    assert errno.EPIPE not in FILE_ERRORS
    assert errno.ECHILD not in FILE_ERRORS
