"""Atomic file writes, used for replay segments, datasets, checkpoints and results.

A file is written under a temporary name, flushed to the disk and then renamed, so a
file that has its final name is complete, even after a crash or a power failure. If the
disk is full, the temporary file is deleted and `DiskFull` explains what to do.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reverie.api import UserError

TEMPORARY = ".tmp"
"""Suffix of files that are still being written."""


class DiskFull(UserError):
    """A file could not be written because the disk (or a quota) is full."""


@contextmanager
def atomic_write(path: Path, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path; rename it to `path` if the block succeeds.

    If the block fails, the temporary file is deleted and an existing `path` is kept.
    Without `sync` the file survives a crash of the program, but not of the machine.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    with explain_full_disk(path):
        try:
            yield temporary
            if sync:
                fsync(temporary)
            os.replace(temporary, path)
            if sync:
                fsync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_file(path: Path, data: bytes, sync: bool = True) -> None:
    """Write or replace a file atomically."""
    with atomic_write(path, sync) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, data: Any) -> None:
    write_file(path, (json.dumps(data, indent=1) + "\n").encode())


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    if sys.platform == "win32":
        if path.is_dir():
            return  # Windows cannot open folders
        descriptor = os.open(path, os.O_RDWR)  # it flushes only files that it may write
    else:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Raise `DiskFull` where the block fails because there is no space left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DiskFull(
            f"The disk is full: {path} could not be written "
            f"({os.strerror(error.errno)}). Files that were saved before are intact.\n"
            "  Fix: free some space (or raise the quota) and run the same command "
            "again."
        ) from None


@contextmanager
def ignore_unwritable() -> Iterator[None]:
    """Skip writing to a read-only folder or a full disk, where it is optional."""
    try:
        yield
    except DiskFull:
        warnings.warn("The disk is full; the result is not saved.", stacklevel=3)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
