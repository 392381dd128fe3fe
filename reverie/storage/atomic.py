"""Atomic file writes, used for replay segments, datasets, checkpoints and results.

A file is written under a temporary name, flushed to the disk and then renamed, so a
file that has its final name is complete, even after a crash or a power failure. If it
cannot be written, the temporary file is deleted and `WriteFailed` explains what to do.
An existing temporary file is deleted, never opened, because it could be a symbolic link
to another file.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reverie.storage.limits import InvalidFile, open_descriptor
from reverie.storage.os_errors import NOT_PERMITTED, WriteFailed, explain_write_errors
from reverie.storage.system import open_flags

TEMPORARY = ".tmp"
"""Suffix of files that are still being written."""


@contextmanager
def atomic_write(path: Path, sync: bool = True, writer: str = "") -> Iterator[Path]:
    """Yield a temporary path; rename it to `path` if the block succeeds.

    If the block fails, the temporary file is deleted and an existing `path` is kept.
    Without `sync` the file survives a crash of the program, but not of the machine. If
    several processes write the same file, each needs its own name as `writer`.
    """
    temporary = path.with_name(f".{path.name}{writer}{TEMPORARY}")
    with explain_write_errors(path):
        try:
            os.close(create_file(temporary))
            yield temporary
            if sync:
                fsync(temporary)
            os.replace(temporary, path)
            if sync:
                fsync(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def create_file(path: Path) -> int:
    """Create a file and return its file descriptor.

    An existing file, left by a process that was killed, is deleted first.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | open_flags("O_BINARY")
    return os.open(path, flags, 0o666)


def open_append(path: Path) -> int:
    """Open a file for appending, or create it; return its file descriptor."""
    try:
        return open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except InvalidFile as error:
        raise WriteFailed(
            f"{path} {error}, so nothing can be appended to it.\n  Fix: rm {path}"
        ) from None


def make_folder(path: Path, parents: bool = False) -> None:
    """Create a folder of a run or dataset, unless it exists.

    A symbolic link is refused: files would be written and deleted somewhere else.
    """
    refuse_link(path)
    with explain_write_errors(path):
        path.mkdir(parents=parents, exist_ok=True)


def make_parent(path: Path) -> None:
    """Create the folder of a file that will be written, if it does not exist."""
    with explain_write_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)


def refuse_link(path: Path) -> None:
    """Raise if a path that will be written to is a symbolic link."""
    if path.is_symlink():
        raise WriteFailed(
            f"{path} is a symbolic link, which is not followed when files are written."
            f"\n  Fix: remove the link (rm {path}), or put a folder or file there."
        )


def write_file(path: Path, data: bytes, sync: bool = True, writer: str = "") -> None:
    """Write or replace a file atomically."""
    with atomic_write(path, sync, writer) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, data: Any) -> None:
    write_file(path, (json.dumps(data, indent=1) + "\n").encode())


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    if sys.platform == "win32":
        if path.is_dir():
            return  # Windows cannot open folders
        descriptor = os.open(path, os.O_RDWR)  # needed to flush a file on Windows
    else:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def ignore_unwritable() -> Iterator[None]:
    """Ignore failed writes of optional files; warn unless the folder is read-only."""
    try:
        yield
    except WriteFailed as error:
        if error.errno not in NOT_PERMITTED:
            # without the rest of the message, which describes how to repeat the command
            reason = str(error).partition(" Files that were saved")[0]
            warnings.warn(f"The result is not saved. {reason}", stacklevel=3)
