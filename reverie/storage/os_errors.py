"""Messages with a fix for file errors of the operating system.

The user can correct the cause (a read-only or failing disk, a folder that was deleted
or unmounted, missing permissions, limits) and run the same command again, so these
errors are reported without a traceback.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reverie.api import UserError


def _codes(names: str) -> tuple[int, ...]:
    """Return the error codes of these names that this platform has."""
    return tuple(getattr(errno, n) for n in names.split() if hasattr(errno, n))


FULL = _codes("ENOSPC EDQUOT EFBIG")  # disk or quota is full, or file too large
NOT_PERMITTED = _codes("EACCES EPERM EROFS")
EXHAUSTED = _codes("EMFILE ENFILE ENOMEM")  # too many open files, or out of memory
FILE_INTACT = (*EXHAUSTED, errno.EACCES, errno.EPERM)
"""Codes of failed reads that do not mean that the file is damaged."""
_MISSING = _codes("ENOENT ENOTDIR ESTALE ENODEV ENXIO")
_PATH_EXISTS = _codes("EEXIST EISDIR ENOTEMPTY ELOOP")
_DISK_OR_NETWORK = _codes(
    "EIO EINTR EBUSY ETXTBSY ENOLCK ENOTCONN ECONNRESET ECONNABORTED ETIMEDOUT "
    "EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH EREMOTEIO ENOLINK EUCLEAN ENOMEDIUM"
)
TOO_MANY_FILES = os.strerror(errno.EMFILE)
FILE_ERRORS = (
    *(*FULL, *NOT_PERMITTED, *_MISSING, *_PATH_EXISTS, *_DISK_OR_NETWORK),
    *_codes("EMFILE ENFILE ENAMETOOLONG"),
)
"""All codes that concern a file, its disk, or the number of open files."""


class WriteFailed(UserError):
    """A file could not be written; `errno` is the code of the operating system."""

    errno: int = 0


class DiskFull(WriteFailed):
    """A file could not be written because the disk (or a quota) is full."""


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise every `OSError` of the block as `WriteFailed` or `DiskFull`."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise write_error(error.errno, path) from None


def write_error(code: int, path: Path) -> WriteFailed:
    """Return the error that explains why `path` could not be written."""
    kind, start = WriteFailed, ""
    if code in FULL:
        kind, start = DiskFull, "The disk is full: "
    failed = kind(
        f"{start}{path} could not be written ({os.strerror(code)}). Files that were "
        f"saved before are intact.\n  Fix: {fix_for(code, path)}"
    )
    failed.errno = code
    return failed


def describe_error(code: int, name: str | bytes | int | None) -> str:
    """Return a message with a fix; `name` is the path of the file, if known."""
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None
    if code in (errno.EMFILE, errno.ENFILE):
        problem = TOO_MANY_FILES
    elif code in FULL:
        problem = f"The disk is full ({path})" if path else "The disk is full"
    else:
        what = path or "A file"
        problem = f"{what} cannot be read or written ({os.strerror(code)})"
    return f"{problem}.\n  Fix: {fix_for(code, path)}"


def fix_for(code: int | None, path: Path | None) -> str:
    """Return the fix for an error of the operating system."""
    folder = path.parent if path else "the folder"
    if code in FULL:
        return "free some space (or raise the quota) and run the same command again."
    if code in (errno.EMFILE, errno.ENFILE):
        return (
            "raise the limit of open files with `ulimit -n 4096` and run the same "
            "command again."
        )
    if code in NOT_PERMITTED:
        return (
            f"get write permission for {folder}, or choose another folder, and run the "
            "same command again."
        )
    if code in _MISSING:
        return (
            f"check that {folder} exists and that its disk is mounted, and run the "
            "same command again."
        )
    if code in _PATH_EXISTS:
        return f"choose another path, or move {path or 'it'} to another place."
    return (
        f"check the disk or network folder of {folder}, or choose another folder, and "
        "run the same command again."
    )
