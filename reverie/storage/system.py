"""Functions of the operating system that differ between Linux, macOS and Windows.

The modules `fcntl` and `resource` do not exist on Windows, so they are imported inside
the functions that use them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import signal
import sys
import time
from typing import IO, Any

RETRY_SECONDS = 0.02
"""Time between two attempts to lock a file."""


def open_flags(*names: str) -> int:
    """Return flags of `os.open` by name, without those that this system does not have.

    `O_BINARY` exists on Windows only, where line ends are translated without it.
    """
    return functools.reduce(operator.or_, (getattr(os, name, 0) for name in names), 0)


def lock_file(file: IO[Any], exclusive: bool = True, seconds: float = 0.0) -> None:
    """Lock an open file until it is closed.

    Waits up to this many seconds, then raises `BlockingIOError` if another process has
    locked it. Windows has no shared locks, so all locks are exclusive there. On
    platforms without file locks (WebAssembly) this has no effect.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _try_lock(file, exclusive)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_SECONDS)


def _try_lock(file: IO[Any], exclusive: bool) -> None:
    """Lock a file, or raise `BlockingIOError` if another process has locked it."""
    try:
        import fcntl
    except ImportError:
        with contextlib.suppress(ImportError):
            msvcrt: Any = importlib.import_module("msvcrt")
            file.seek(0)
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            except PermissionError as error:
                raise BlockingIOError(*error.args) from error
        return
    fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def peak_memory() -> int | None:
    """Return the largest resident memory of this process in bytes; None if unknown."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def physical_memory() -> int | None:
    """Return the memory of the machine in bytes; None if unknown."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def signal_name(number: int) -> str:
    """Return a name such as SIGKILL; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
