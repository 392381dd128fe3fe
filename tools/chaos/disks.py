"""Sections `kills`, `errors` and `space`: faults while files are written."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from functools import partial
from pathlib import Path

from chaos import shim
from chaos.processes import run
from chaos.runs import reference, resume, train_arguments
from chaos.sections import Section

KILLS = {
    "at fsync": "fsync",
    "before rename": "rename",
    "after rename": "after_rename",
    "at unlink": "unlink",
    "in a write": "write",
    "at mkdir": "mkdir",
}
"""Kinds of file calls at which the process is killed."""
ERRORS = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.ESTALE,
)
"""Errors with which file calls fail."""
ERROR_CALLS = (
    *("open", "write", "fsync", "rename", "unlink", "mkdir"),
    *("truncate", "read", "list", "stat"),
)
"""Kinds of file calls that fail."""

# constants of Linux for `unshare`, `mount` and `umount2`
CLONE_NEWNS = 0x20000
MS_NOSUID, MS_REMOUNT, MS_REC, MS_PRIVATE = 2, 32, 16384, 1 << 18
MNT_DETACH = 2


def kill_trial(name: str, rng: random.Random, folder: Path) -> list[str]:
    """Kill the run at random file calls, up to three times, then resume it."""
    logdir, storage = folder / "run", rng.choice(["disk", "ram"])
    arguments = train_arguments(storage)
    kind = KILLS[name]
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randint(1, max(1, reference(storage)[1][kind]))
        arm = partial(shim.arm, logdir, kind, at)
        outcome = run([*arguments, "--logdir", str(logdir)], folder, before=arm)
        if problems := outcome.problems([0, -9]):
            return problems
    return resume(logdir, folder, arguments)


def error_trial(name: str, rng: random.Random, folder: Path) -> list[str]:
    """Let file calls fail; the run must print a fix, and then resume without faults."""
    logdir, storage = folder / "run", rng.choice(["disk", "ram"])
    arguments, number = train_arguments(storage), getattr(errno, name)
    kind, persistent = rng.choice(ERROR_CALLS), rng.random() < 0.7
    at = rng.randint(1, max(1, reference(storage)[1][kind]))
    arm = partial(shim.arm, logdir, kind, at, number, persistent)
    outcome = run([*arguments, "--logdir", str(logdir)], folder, before=arm)
    found = outcome.problems() or resume(logdir, folder, arguments, "subset")
    fails = "all calls from" if persistent else "call"
    return [f"({fails} {kind} {at}, {storage}) {text}" for text in found]


def space_trial(name: str, rng: random.Random, folder: Path) -> list[str]:
    """Train on a file system that is too small, then resume with enough space."""
    disk, arguments = folder / "disk", train_arguments(rng.choice(["disk", "ram"]))
    disk.mkdir()
    size = rng.randint(8, 300) * 1024 if name == "size" else 64 << 20
    files = rng.randint(4, 60) if name == "inodes" else 4096
    _mount(disk, f"size={size},nr_inodes={files}")
    try:
        logdir = disk / "run"
        outcome = run([*arguments, "--logdir", str(logdir)], folder)
        if problems := outcome.problems():
            return [f"({size} bytes, {files} files) {text}" for text in problems]
        _mount(disk, "size=64m,nr_inodes=4096", MS_REMOUNT)
        return resume(logdir, folder, arguments, "subset")
    finally:
        _libc().umount2(str(disk).encode(), MNT_DETACH)


def mounts_skip_reason() -> str:
    """Enter a new mount namespace; return why it is not possible, or an empty text."""
    if os.geteuid() != 0:
        return "mounting a tmpfs needs root"
    libc = _libc()
    if libc.unshare(CLONE_NEWNS) != 0:
        return f"no mount namespace: {os.strerror(ctypes.get_errno())}"
    if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return f"mounts cannot be made private: {os.strerror(ctypes.get_errno())}"
    return ""


def _mount(path: Path, options: str, flags: int = 0) -> None:
    """Mount a tmpfs."""
    arguments = (b"tmpfs", str(path).encode(), b"tmpfs", flags | MS_NOSUID)
    if _libc().mount(*arguments, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount of {path} with {options}")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_ulong,
        ctypes.c_char_p,
    ]
    return libc


SECTIONS = [
    Section(
        "kills",
        "SIGKILL at the n-th file call of a kind; writes are torn",
        lambda: tuple(KILLS),
        kill_trial,
        shim.skip_reason,
    ),
    Section(
        "errors",
        "error numbers of the n-th, or all later, file calls of a kind",
        lambda: [errno.errorcode[number] for number in ERRORS],
        error_trial,
        shim.skip_reason,
    ),
    Section(
        "space",
        "a tmpfs with too few bytes or inodes",
        lambda: ("size", "inodes"),
        space_trial,
        mounts_skip_reason,
    ),
]
