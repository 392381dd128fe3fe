"""Build and control `shim.c`, which injects faults into file calls.

The library must be loaded before Python starts (`LD_PRELOAD`), so `tools/chaos.py`
starts itself again with it. Trials are forked from that process, and each trial selects
its own faults (`arm`).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
KINDS = (  # of file calls
    *("open", "write", "fsync", "rename", "after_rename", "unlink", "mkdir"),
    *("truncate", "read", "list", "stat"),
)


def build(folder: Path) -> tuple[Path | None, str]:
    """Compile the shim; return its path, or None and the reason."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "there is no C compiler (cc, gcc or clang)"
    path = folder / "shim.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE)]
    done = subprocess.run([*command, "-ldl"], capture_output=True, text=True)
    if done.returncode != 0:
        return None, f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}"
    return path, ""


def skip_reason() -> str:
    """Why faults cannot be injected in this process; empty if they can."""
    if _library() is None:
        return "the LD_PRELOAD shim is not loaded (no C compiler, or not Linux)"
    return ""


def arm(
    folder: Path, kind: str = "", at: int = 0, error: int = 0, persistent: bool = False
):
    """Count the file calls below a folder; inject a fault at the `at`-th of a kind.

    The call fails with the error number `error`; 0 kills the process instead. With
    `persistent`, all later calls of the kind fail with the error, too.
    """
    library = _library()
    assert library is not None, skip_reason()
    arguments = (str(folder).encode(), kind.encode(), at, error, persistent)
    if library.chaos_arm(*arguments) != 0:
        raise ValueError(f"unknown kind of file call {kind!r}")


def counts() -> dict[str, int]:
    """Number of file calls of each kind since `arm`."""
    library = _library()
    assert library is not None, skip_reason()
    return {kind: library.chaos_count(kind.encode()) for kind in KINDS}


def _library() -> ctypes.CDLL | None:
    """Return the functions of this process; None if the shim is not loaded."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "chaos_arm"):
        return None
    library.chaos_count.restype = ctypes.c_long
    library.chaos_arm.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_int,
    ]
    return library
