"""The run folder: its files, its lock, and the settings that a resumed run may change.

logdir/
  config.yaml        all settings, resolved
  about.json         commit, versions and command of each start, and how it ended
  run_id             id in the list of the user's runs, for runs that import modules
                     of the user (`trust.py`)
  spaces.json        observation and action spaces of the agent
  metrics.jsonl      all scalars
  scores.jsonl       one line per episode
  media/             images and videos
  ckpt/              checkpoints, newest last
  best/              checkpoint with the lowest evaluation loss (offline training)
  replay/            replay buffer
  eval_replay/       replay buffer of the evaluation episodes of `train_eval`
  recordings/        episodes that were saved in `reverie play`
  eval.json, eval/   result, videos and figures of `reverie eval`
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from reverie import config as configs
from reverie.api import UserError
from reverie.log.jsonl import METRICS, SCORES
from reverie.plugins import settings_name
from reverie.run.checkpoint import PARTIAL
from reverie.run.config import (
    ABOUT_FILE,
    CONFIG_FILE,
    Config,
    find_schema,
    import_paths,
    import_paths_of,
)
from reverie.run.first_command import find_first_command
from reverie.run.trust import check_trusted, register
from reverie.storage.atomic import refuse_link, write_file, write_json
from reverie.storage.limits import (
    InvalidFile,
    open_descriptor,
    open_regular,
    read_json,
)
from reverie.storage.os_errors import NOT_PERMITTED, write_error
from reverie.storage.system import lock_file

CHANGEABLE_ON_RESUME = (
    *("logdir", "device", "compile", "logger.", "env.vector.", "explore.until"),
    *("actors.address", "actors.cpus", "actors.restarts", "actors.timeout"),
    *("replay.storage", "replay.device_memory", "run.steps", "run.overlap"),
    *("run.log_every", "run.report_every", "run.save_every", "run.eval_"),
    *("run.report_batches", "run.keep_", "run.max_nonfinite"),
    *("run.rank_timeout", "run.train_devices"),
    *("offline.eval.", "offline.cache.", "offline.patience"),
    *("offline.epochs", "offline.report_epochs"),
)
"""Prefixes of the settings that may change when a run is resumed."""
SUBFOLDERS = ("ckpt", "best", "replay", "eval_replay", "media", "eval", "recordings")
"""Folders of a run that cannot be the folder of another run."""
LOG_FILES = (METRICS, SCORES)
LOCK = ".lock"
"""File in the run folder that a process locks while it uses the folder."""
MAX_STARTS = 100
"""Number of last starts of a run that `about.json` describes."""
MAX_ERROR = 2000
"""Characters of an error message that are kept."""
MAX_NESTING = 16
"""Maximum depth of the folders in a run folder."""
INVALID_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""Codes of errors that are caused by a path that cannot be created."""


def open_run_folder(path: Path, config: Config) -> IO[str]:
    """Create or open a run folder, lock it, and write its config and `about.json`.

    Raises if the folder has a checkpoint of a run with other settings. Returns the
    lock; closing it releases the folder.
    """
    lock = lock_folder(path)
    try:
        refuse_links(path)
        is_same_run = _has_same_settings(path, config)
        register(path, import_paths_of(config).values())
        write_config(path, config)
        starts, start = _read_starts(path), system_info()
        start["first_command"] = start["command"]
        if is_same_run:
            start["first_command"] = find_first_command(starts) or start["command"]
        write_json(path / ABOUT_FILE, [*starts, start][-MAX_STARTS:])
    except BaseException:
        lock.close()
        raise
    return lock


def _has_same_settings(path: Path, config: Config) -> bool:
    """True if a folder has a run with these settings, which this start continues.

    Raises if it has a checkpoint of a run with other settings. A run without a
    checkpoint starts from scratch, so its settings may change.
    """
    if not (path / "config.yaml").exists():
        return False
    try:
        check_unchanged(read_config(path), config, path)
    except UserError:
        if (path / "ckpt").exists():
            raise
        return False
    return True


def _read_starts(path: Path) -> list[Any]:
    """Return the entries of `about.json`, one for each start of the run."""
    try:
        return list(read_json(path / ABOUT_FILE))
    except (OSError, ValueError, TypeError):
        return []


def record_end(path: Path, error: Exception | None) -> None:
    """Write how this process of the run ended to the last entry of `about.json`.

    Without an error, the run is recorded as finished. If a signal stopped the run, this
    function is not called.
    """
    starts = _read_starts(path)
    if not starts or not isinstance(starts[-1], dict):
        return
    if error is None:
        starts[-1]["finished"] = True
    else:
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        starts[-1]["error"] = f"{name}{error}"[:MAX_ERROR]
    with contextlib.suppress(OSError, UserError):  # such as a full disk
        write_json(path / ABOUT_FILE, starts)


class ExitRecord(NamedTuple):
    """How the last process of a run ended; the defaults if a signal ended it."""

    finished: bool = False
    error: str = ""


def read_exit_record(path: Path) -> ExitRecord:
    """Read from `about.json` how the last process of a run ended."""
    starts = _read_starts(path)
    if not starts or not isinstance(starts[-1], dict):
        return ExitRecord()
    last = starts[-1]
    return ExitRecord(bool(last.get("finished")), str(last.get("error", "")))


class NewFiles:
    """Deletes the files that were added to a folder since this object was created.

    If the folder did not exist, it and its new parents are deleted, too.
    """

    def __init__(self, path: Path):
        self.path = path
        self._before = set(path.iterdir()) if path.is_dir() else set()
        self._created = [p for p in (path, *path.parents) if not p.exists()]

    def delete(self) -> None:
        if not self.path.is_dir():
            return
        for path in set(self.path.iterdir()) - self._before:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for folder in self._created:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def write_config(path: Path, config: Config) -> None:
    """Write the resolved settings of a run to its folder."""
    write_file(path / "config.yaml", configs.dump(config).encode())


def lock_folder(path: Path, kind: str = "run folder") -> IO[str]:
    """Create a folder and lock it, so that no other process can use it.

    Returns the lock file; closing it releases the lock. `kind` is the name of the
    folder in messages.
    """
    for inner, parent in zip((path, *path.parents), path.parents, strict=False):
        if inner.name in SUBFOLDERS and (parent / "config.yaml").is_file():
            raise UserError(
                f"The {kind} {path} is inside the folder of the run {parent}.\n"
                f"  Fix: --logdir {parent} to resume that run, or another folder."
            )
    if path.is_file():
        raise UserError(
            f"The {kind} {path} is a file, not a folder.\n"
            "  Fix: choose another --logdir."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path / LOCK)
    except OSError as error:
        if error.errno not in (*NOT_PERMITTED, *INVALID_PATH):
            raise write_error(error.errno or errno.EIO, path / LOCK) from None
        raise UserError(
            f"The {kind} {path} cannot be written: {error.strerror}.\n"
            "  Fix: choose a --logdir that you have permission to write to."
        ) from None
    try:
        lock_file(lock)
    except OSError as error:
        lock.close()
        if not isinstance(error, BlockingIOError) and error.errno != errno.EACCES:
            raise write_error(error.errno or errno.EIO, path / LOCK) from None
        raise UserError(
            f"Another process is using the {kind} {path}.\n"
            "  Fix: wait until it has ended, or choose another --logdir."
        ) from None
    return lock


def open_lock(path: Path) -> IO[str]:
    """Open or create a lock file, which stays empty."""
    try:
        return open(open_descriptor(path, os.O_RDWR | os.O_CREAT), "w")
    except InvalidFile as error:
        raise UserError(
            f"The lock file {path} {error}.\n  Fix: rm {path}, if no other program "
            "uses it."
        ) from None


def is_locked(path: Path) -> bool:
    """True if another process holds this lock."""
    try:
        with open_regular(path) as file:
            lock_file(file, exclusive=False)
    except BlockingIOError:
        return True
    except (OSError, InvalidFile):
        return False
    return False


def check_lock(path: Path, lock: IO[str]) -> None:
    """Raise if a run folder was deleted, moved or replaced since it was locked."""
    try:
        is_same = os.path.samestat(os.fstat(lock.fileno()), os.lstat(path / LOCK))
    except OSError:
        is_same = False
    if not is_same:
        raise UserError(
            f"The run folder {path} was deleted, moved or unmounted during the run, so "
            "it cannot be saved there.\n  Fix: restore the folder or mount its disk, "
            "and run the same command again."
        )


def refuse_links(
    path: Path, subfolders: Sequence[str] = SUBFOLDERS, files: Sequence[str] = LOG_FILES
) -> None:
    """Raise if these folders or files of a run are or contain symbolic links."""
    for name in (*subfolders, *files):
        refuse_link(path / name)
    for name in files:
        if (path / name).exists() and not (path / name).is_file():
            raise UserError(
                f"{path / name} is not a regular file.\n  Fix: rm {path / name}"
            )
        if (path / name).exists() and (path / name).stat().st_nlink > 1:
            raise UserError(
                f"{path / name} is a hard link: lines of this run would be added to "
                "the same file in another folder.\n"
                f"  Fix: cp {path / name} {path / name}.copy && "
                f"mv {path / name}.copy {path / name}"
            )
    for name in subfolders:
        for folder, names, _ in os.walk(path / name):
            if len(Path(folder).relative_to(path).parts) > MAX_NESTING:
                raise UserError(
                    f"{path / name} has folders nested more than {MAX_NESTING} deep, "
                    "which a run does not create.\n  Fix: move them to another place."
                )
            # incomplete checkpoints are deleted, not written to
            names[:] = [inner for inner in names if not inner.startswith(PARTIAL)]
            for inner in names:
                refuse_link(Path(folder, inner))


def read_config(logdir: Path, replaces_task: bool = False) -> Config:
    """Return the saved config of a run.

    Raises if it names code to import that is not trusted; with `replaces_task` the task
    may be anything, because the caller uses another one.
    """
    path = logdir.expanduser() / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"{logdir} is not a run folder: it has no config.yaml.\n"
            "  Fix: give the --logdir of a run."
        )
    settings = configs.read_config_file(path)

    def check(names: dict[str, str]) -> None:
        if replaces_task:
            names.pop("task", None)
        check_trusted(logdir, names.items())

    check(import_paths([settings]))  # before plug-ins are imported to parse settings
    config = config_from_settings(settings, str(path))
    check(import_paths_of(config))  # settings may also be set by patterns of names
    return config


def config_from_settings(
    settings: dict[str, Any], origin: str = "the saved config"
) -> Config:
    """Return the config with these settings.

    `origin` describes where they come from, for error messages.
    """
    return configs.resolve(find_schema([settings]), [(origin, settings)])


def check_unchanged(old: Config, new: Config, logdir: Path) -> None:
    """Raise unless two configs differ only in settings that may change on resuming."""
    agent = settings_name(new.agent)
    changeable = (
        *CHANGEABLE_ON_RESUME,
        *(f"{agent}.{name}" for name in new.agent_config.changeable_on_resume),
    )
    changed = {
        key: values
        for key, values in configs.differences(old, new).items()
        if not key.startswith(changeable)
    }
    if changed:
        lines = [f"    {k}: {a!r} -> {b!r}" for k, (a, b) in changed.items()]
        raise UserError(
            f"The run in {logdir} was started with other settings:\n"
            + "\n".join(lines[:20] + (["    ..."] if len(lines) > 20 else []))
            + "\n  Fix: resume with `--logdir` alone to keep its settings, or choose "
            "another --logdir."
        )


def run_folder_of(checkpoint: Path) -> Path:
    """Return the run folder that contains a checkpoint."""
    for folder in list(checkpoint.parents)[:2]:
        if (folder / "config.yaml").is_file():
            return folder
    parents = checkpoint.absolute().parents
    raise UserError(
        f"{parents[min(1, len(parents) - 1)]} is not a run folder: it has no "
        "config.yaml.\n"
        "  Fix: give the --logdir of a run. To use only its weights, start another run "
        f"with --run.from_checkpoint {checkpoint}"
    )


def resolve_logdir(template: str) -> Path:
    """Return the folder of `--logdir`, with `{timestamp}` and `~` replaced."""
    if not template.strip():
        raise UserError("--logdir is empty.\n  Fix: --logdir ~/logdir/{timestamp}")
    kaggle = Path("/kaggle/working")  # the folder that is kept after a session
    if template.startswith("~/logdir/") and kaggle.is_dir():
        template = str(kaggle / template.removeprefix("~/"))
    stamp = time.strftime("%Y%m%dT%H%M%S")
    return Path(template.replace("{timestamp}", stamp)).expanduser().absolute()


def system_info() -> dict[str, Any]:
    """Return command, commit, package versions and hardware, to reproduce a run."""
    versions = {}
    for name in ("reverie", "torch", "numpy", "gymnasium", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
    }


def _commit() -> str | None:
    """Return the git commit of this package; None outside of a clone."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return None
    try:
        process = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
