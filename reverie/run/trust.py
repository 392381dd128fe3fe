"""Checks code that the config of a run names as `package.module:name` before import.

Importing a module executes it with the permissions of the user, and a run folder may
come from another user. A module that a saved config names is imported only if

- this user started the run on this machine: the folder contains a random id
  (`run_id`), and the list of the user's runs has that id with the same modules;
- or the command line (in Python: the call) names the module;
- or the command has `--trust` (in Python: `trust=True`).

The list is `reverie/runs.jsonl` in the state directory of the user (`XDG_STATE_HOME`,
by default `~/.local/state`). It has one line per run that names a module.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from reverie.api import UserError
from reverie.storage.atomic import write_file
from reverie.storage.system import lock_file, open_flags

ID_FILE = "run_id"
"""File with the id of a run, in its folder."""
RUN_LIST = "runs.jsonl"
"""File with the list of the user's runs, in the state folder."""
MAX_RUNS = 10_000
"""Maximum number of lines of the list; the oldest are deleted."""
MAX_LINE = 2_000
"""Maximum number of characters of a line of the list."""
LOCK_SECONDS = 10.0
"""Time to wait for other processes that add a run to the list."""


class _Allowed(NamedTuple):
    """Modules that saved configs may import in the current context."""

    everything: bool
    modules: frozenset[str]


_NOTHING = _Allowed(False, frozenset())
_allowed: ContextVar[_Allowed] = ContextVar("_allowed", default=_NOTHING)


@contextlib.contextmanager
def allow(names: Iterable[str] = (), everything: bool = False) -> Iterator[None]:
    """Context in which saved configs may import these modules, or everything.

    Nested contexts add to the allowed modules.
    """
    before = _allowed.get()
    modules = before.modules | {_module_of(name) for name in names}
    token = _allowed.set(_Allowed(before.everything or everything, modules))
    try:
        yield
    finally:
        _allowed.reset(token)


def is_everything_allowed() -> bool:
    """True inside `allow(everything=True)`."""
    return _allowed.get().everything


def check_trusted(folder: Path, names: Iterable[tuple[str, str]]) -> None:
    """Raise unless the import paths in a stored config may be imported.

    `folder` contains the config, and `names` are pairs of setting and import path.
    """
    allowed = _allowed.get()
    if allowed.everything:
        return
    unknown = [
        (k, name) for k, name in names if _module_of(name) not in allowed.modules
    ]
    if not unknown or {name for _, name in unknown} <= _listed_names(folder):
        return
    settings = " and ".join(
        f"{setting} {name[:200]!r}" for setting, name in unknown[:4]
    )
    raise UserError(
        f"{folder} was not created by you on this machine, and its config imports "
        f"code: {settings}.\n  Fix: add --trust to the command (in Python: trust=True) "
        "if you trust this code to run with your permissions."
    )


def register(folder: Path, names: Iterable[str]) -> None:
    """Add a run to the list of the user's runs, if it names modules.

    A list that cannot be written is not an error: the run then needs `--trust` when it
    is used again, which a warning explains.
    """
    paths = sorted({*names})
    if not paths or {*paths} <= _listed_names(folder):
        return
    run_id = secrets.token_hex(16)
    line = json.dumps([run_id, *paths])
    problem = "its import paths are too long" if len(line) > MAX_LINE else ""
    if not problem:
        try:
            _append(_state_folder(), line)
        except (OSError, RuntimeError, UserError) as error:
            problem = getattr(error, "strerror", None) or str(error).split("\n")[0]
    if problem:
        warnings.warn(
            f"{folder} cannot be added to the list of your runs ({problem}). Add "
            "--trust (in Python: trust=True) to later commands that use it.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    write_file(folder / ID_FILE, f"{run_id}\n".encode())


def _module_of(name: str) -> str:
    """Return the module of an import path `package.module:name`."""
    return name.partition(":")[0]


def _listed_names(folder: Path) -> set[str]:
    """Return the import paths that the list of the user's runs has for a folder."""
    run_id = _read_id(folder / ID_FILE)
    if not run_id:
        return set()
    try:
        lines = (_state_folder() / RUN_LIST).read_text().splitlines()
    except (OSError, RuntimeError, ValueError):
        return set()
    prefix = json.dumps([run_id])[:-1]  # without the closing bracket
    for line in reversed(lines):
        if line.startswith(prefix):
            try:
                return {*json.loads(line)[1:]}
            except (ValueError, TypeError):  # an incomplete line
                return set()
    return set()


def _read_id(path: Path) -> str:
    """Return the id in a file; empty if it contains no id or is not a regular file."""
    path = path.expanduser()
    flags = os.O_RDONLY | open_flags("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
    try:
        if path.is_symlink():  # not every system has O_NOFOLLOW
            return ""
        with open(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            text = file.read(64).strip()
    except OSError:
        return ""
    return text.decode() if re.fullmatch(rb"[0-9a-f]{32}", text) else ""


def _state_folder() -> Path:
    """Return the state folder; raises `RuntimeError` if the user has no home folder."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "")
    if not state.is_absolute():
        state = Path("~/.local/state").expanduser()
    return state / "reverie"


def _append(folder: Path, line: str) -> None:
    """Append a line to the list atomically; other processes wait for it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    with open(descriptor, "w") as lock:
        lock_file(lock, seconds=LOCK_SECONDS)
        path = folder / RUN_LIST
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            lines = []
        kept = [old for old in lines if len(old) <= MAX_LINE][-(MAX_RUNS - 1) :]
        write_file(path, "\n".join([*kept, line, ""]).encode())
