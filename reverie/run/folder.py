"""The folder of a run: what is in it, who may write to it, and with which settings.

logdir/
  config.yaml        every setting, resolved
  about.json         commit, versions and command of each start
  spaces.json        what the agent sees and does
  metrics.jsonl      all scalars
  scores.jsonl       one line an episode
  media/             pictures and videos
  ckpt/              checkpoints, newest last
  replay/            the stored steps
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

from reverie import config as configs
from reverie.api import UserError
from reverie.plugins import settings_name
from reverie.run.config import Config, find_schema
from reverie.storage.atomic import explain_full_disk, write_file, write_json

HARMLESS = (
    "logdir",
    "device",
    "compile",
    "logger.",
    "env.vector.",
    "replay.storage",
    "replay.device_memory",
    "run.steps",
    "run.overlap",
    "run.log_every",
    "run.report_every",
    "run.save_every",
    "run.eval_",
    "run.report_batches",
    "run.keep_",
    "run.max_nonfinite",
    "offline.look.",
    "offline.cache.",
    "offline.patience",
)
"""Settings that may change when a run is resumed, by how they start."""
OWN = ("ckpt", "best", "replay", "media")
"""Folders of a run in which no other run may begin."""


class RunFolder:
    """One run's folder, held by one process at a time."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    def open(self, config: Config) -> None:
        """Create or resume the folder; refuse if its settings were others."""
        self._lock = hold(self.path)
        # Before its first save a run has nothing that other settings could spoil.
        if self.config_path.exists() and (self.path / "ckpt").exists():
            refuse_changes(read_config(self.path), config, self.path)
        write_file(self.config_path, configs.dump(config).encode())
        self._write_about()

    def close(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def _write_about(self) -> None:
        path = self.path / "about.json"
        try:
            starts = json.loads(path.read_text())
        except (OSError, ValueError):
            starts = []
        starts = [*starts, about()][-100:]
        write_json(path, starts)


def hold(path: Path, what: str = "run folder") -> IO[str]:
    """Create a folder, and keep others out of it until the file is closed."""
    for inner, home in zip((path, *path.parents), path.parents, strict=False):
        if inner.name in OWN and (home / "config.yaml").is_file():
            raise UserError(
                f"The {what} {path} would lie among the files of the run {home}.\n"
                f"  Fix: --logdir {home} to go on with that run, or another folder."
            )
    if path.is_file():
        raise UserError(
            f"{path} is a file, and the {what} is to be a folder.\n"
            "  Fix: give another --logdir."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with explain_full_disk(path):
            lock = (path / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"The {what} {path} cannot be written: {error.strerror}.\n"
            "  Fix: give --logdir a folder you may write to."
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"Another process is using the {what} {path}.\n"
            "  Fix: wait for it to end, or give another --logdir."
        ) from None
    return lock


def read_config(logdir: Path) -> Config:
    """The settings a run was started with."""
    path = logdir.expanduser() / "config.yaml"
    if not path.is_file():
        raise UserError(
            f"{logdir} is not a run folder: it has no config.yaml.\n"
            "  Fix: give the --logdir of a run."
        )
    settings = configs.read_config_file(path)
    return configs.resolve(find_schema([settings]), [(str(path), settings)])


def refuse_changes(old: Config, new: Config, logdir: Path) -> None:
    """Raise unless two configs agree on all that shapes the run's result."""
    agent = settings_name(new.agent)
    resumable = (*HARMLESS, *(f"{agent}.{name}" for name in new.of_agent.resumable))
    changed = {
        key: values
        for key, values in configs.differences(old, new).items()
        if not key.startswith(resumable)
    }
    if changed:
        lines = [f"    {k}: {a!r} -> {b!r}" for k, (a, b) in changed.items()]
        raise UserError(
            f"The run in {logdir} was started with other settings:\n"
            + "\n".join(lines[:20] + (["    ..."] if len(lines) > 20 else []))
            + "\n  Fix: resume with `--logdir` alone to keep its settings, or give "
            "another --logdir."
        )


def home_of(saved: Path) -> Path:
    """The run folder that a checkpoint lies in."""
    for folder in list(saved.parents)[:2]:
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(
        f"{saved.parents[1]} is not a run folder: it has no config.yaml.\n"
        "  Fix: give the --logdir of a run; to take only its weights, start another "
        f"with --run.from_checkpoint {saved}"
    )


def place(template: str) -> Path:
    """The folder meant by `--logdir`: `{timestamp}` filled in, `~` expanded."""
    if not template.strip():
        raise UserError("--logdir is empty.\n  Fix: --logdir ~/logdir/{timestamp}")
    kaggle = Path("/kaggle/working")
    if template.startswith("~/logdir/") and kaggle.is_dir():
        template = str(kaggle / template.removeprefix("~/"))
    stamp = time.strftime("%Y%m%dT%H%M%S")
    return Path(template.replace("{timestamp}", stamp)).expanduser().absolute()


def about() -> dict[str, Any]:
    """What was run: enough to run it again."""
    packages = ("reverie", "torch", "numpy", "gymnasium", "safetensors")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": gpu,
        "versions": versions,
    }


def _commit() -> str | None:
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
