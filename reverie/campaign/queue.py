"""The queue of a campaign: a folder from which workers claim runs.

    queue/NAME.json      the run: task, method, seed, command
    queue/NAME.0.claim   the first attempt, created by the worker that runs it
    queue/NAME.0.end     how that attempt ended: finished, failed or stopped
    queue/NAME.1.claim   the next attempt

Workers on several machines may share the folder. A claim is created exclusively, so
only one worker gets it. That worker then changes the file every few seconds
(heartbeat). If another worker sees no change for `stale_seconds`, measured on its own
clock because clocks of machines differ, the attempt is lost, and the next attempt of
the run can be claimed. A worker whose claim was taken over stops its run.

On the same machine a worker that has ended is detected at once: each worker holds a
lock, which the operating system releases when its process ends, also after `kill -9`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import threading
import time
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from reverie.run.folder import is_locked, open_lock
from reverie.storage.atomic import make_folder, write_file, write_json
from reverie.storage.limits import check_name, read_json
from reverie.storage.os_errors import explain_write_errors
from reverie.storage.system import lock_file, open_flags

QUEUE, WORKERS, RUNS = "queue", "workers", "runs"
"""Folders of a campaign: the queue, locks of workers, and run folders."""

Result = Literal["finished", "failed", "stopped"]
RunState = Literal["waiting", "running", "finished", "failed", "stopped", "lost"]
"""`waiting`: no attempt yet; `lost`: the worker of the last attempt has ended or sends
no heartbeats. Other states are those of the last attempt."""

MAX_RUN_SECONDS = 1e9
"""Longer times in the file of an attempt are ignored."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Identifies a machine until it reboots (Linux). The lock of a worker is tested only if
its claim has the id of this machine."""

_ATTEMPT_FILE = re.compile(r"(?P<name>.+)\.(?P<attempt>\d+)\.(?P<kind>claim|end)")


@dataclass(frozen=True)
class QueuedRun:
    """One run of a campaign, as stored in its file."""

    name: str
    """Name of its file and its run folder."""
    task: str
    method: str
    seed: int
    command: list[str]
    """Arguments of `reverie`, without `--logdir`."""
    frames: int = 0
    """Simulator frames of the complete run."""


class Attempt(NamedTuple):
    """An attempt to run, by one worker."""

    number: int
    claim: Mapping[str, Any]
    """Content of the claim: `worker`, `machine`, `boot` (boot id) and `beat` (number
    of heartbeats)."""
    result: Result | None = None
    """How it ended; None if it has not."""
    error: str = ""
    seconds: float = 0.0


@dataclass
class RunStatus:
    """The attempts of a run and the state that follows from them."""

    run: QueuedRun
    attempts: list[Attempt] = field(default_factory=list)
    state: RunState = "waiting"

    @property
    def failures(self) -> int:
        return sum(attempt.result == "failed" for attempt in self.attempts)

    @property
    def error(self) -> str:
        """Error of the last attempt that failed."""
        errors = [a.error for a in self.attempts if a.result == "failed"]
        return errors[-1] if errors else ""

    @property
    def seconds(self) -> float:
        """Time of all attempts that have ended."""
        return sum(attempt.seconds for attempt in self.attempts)


@dataclass
class Claim:
    """A run that this worker has claimed."""

    run: QueuedRun
    attempt: int
    path: Path  # of the file `.claim`
    beat: int = 0  # number of heartbeats

    @property
    def next_path(self) -> Path:
        """Claim of the next attempt; it exists if another worker took over the run."""
        return self.path.with_name(f"{self.run.name}.{self.attempt + 1}.claim")


class Queue:
    """Reads the queue of a campaign; after `open_worker`, also claims runs."""

    def __init__(self, folder: Path, stale_seconds: float = 60.0):
        self.folder = folder
        self.path = folder / QUEUE
        self.stale_seconds = stale_seconds
        self.worker = ""  # name of this worker; empty if it only reads the queue
        self._lock: IO[str] | None = None
        self._boot = ""  # boot id of this machine, if workers can be locked
        self._seen: dict[str, tuple[Any, float]] = {}
        """Last content of each claim of other workers, and when it was first read."""
        self._alive: set[str] = set()
        """Claims whose heartbeat or lock this process has seen."""
        self._finished: dict[str, RunStatus] = {}
        """Finished runs, whose files are not read again."""

    def add(self, runs: list[QueuedRun]) -> None:
        """Write the files of runs that are not in the queue yet."""
        make_folder(self.path)
        make_folder(self.folder / RUNS)
        for run in runs:
            path = self.path / f"{run.name}.json"
            if not path.exists():
                write_shared(path, json.dumps(asdict(run), indent=1) + "\n")

    def open_worker(self) -> None:
        """Create the lock of this worker, which shows that its process runs."""
        make_folder(self.folder / WORKERS)
        self.worker = f"{platform.node() or 'worker'}-{secrets.token_hex(4)}"
        self._lock = open_lock(self._lock_path(self.worker))
        with contextlib.suppress(OSError):  # a file system without locks
            lock_file(self._lock)
            self._boot = boot_id()

    def close_worker(self) -> None:
        if self._lock is not None:
            self._lock_path(self.worker).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def run_folder(self, name: str) -> Path:
        return self.folder / RUNS / name

    def statuses(self) -> list[RunStatus]:
        """Read the state of all runs, in the order of their names."""
        names = sorted(os.listdir(self.path)) if self.path.is_dir() else []
        found: dict[str, RunStatus] = {}
        for file in [name for name in names if name.endswith(".json")]:
            name = file.removesuffix(".json")
            if name in self._finished:
                found[name] = self._finished[name]
                continue
            with contextlib.suppress(OSError, ValueError, TypeError):
                run = QueuedRun(**read_json(self.path / file))
                if run.name == check_name(name) and _is_valid(run):
                    found[name] = RunStatus(run)
        ends = {name for name in names if name.endswith(".end")}
        matches = [m for name in names if (m := _ATTEMPT_FILE.fullmatch(name))]
        for match in sorted(matches, key=lambda m: int(m["attempt"])):
            name = match["name"]
            is_unfinished = name in found and name not in self._finished
            if match["kind"] == "claim" and is_unfinished:
                found[name].attempts.append(self._read_attempt(match, ends))
        for name, status in found.items():
            status.state = self._state(status)
            if status.state == "finished":
                self._finished[name] = status
        return list(found.values())

    def has_live_worker(self, status: RunStatus) -> bool:
        """True if the worker of a run has sent a heartbeat or holds its lock."""
        if status.state != "running":
            return False
        return f"{status.run.name}.{status.attempts[-1].number}" in self._alive

    def claim(self, status: RunStatus) -> Claim | None:
        """Claim the next attempt of a run; None if another worker has claimed it."""
        number = status.attempts[-1].number + 1 if status.attempts else 0
        path = self.path / f"{status.run.name}.{number}.claim"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | open_flags("O_BINARY")
        with explain_write_errors(path):
            try:
                os.close(os.open(path, flags, 0o666))
            except FileExistsError:
                return None
        claim = Claim(status.run, number, path)
        try:
            self.heartbeat(claim)
        except BaseException:  # a full disk: the run can be claimed again
            path.unlink(missing_ok=True)
            raise
        return claim

    def heartbeat(self, claim: Claim) -> bool:
        """Write a heartbeat to a claim; False if another worker took over the run."""
        if claim.next_path.exists():
            return False
        claim.beat += 1
        content = {
            "worker": self.worker,
            "machine": platform.node(),
            "boot": self._boot,
            "beat": claim.beat,
        }
        write_file(claim.path, json.dumps(content).encode(), sync=False)
        return True

    def end_attempt(
        self, claim: Claim, result: Result, error: str = "", seconds: float = 0.0
    ) -> None:
        """Record how an attempt ended, unless another worker has taken over the run."""
        if not claim.next_path.exists():
            content = {"result": result, "error": error, "seconds": round(seconds, 1)}
            write_json(claim.path.with_suffix(".end"), content)

    def _read_attempt(self, match: re.Match[str], ends: set[str]) -> Attempt:
        """Read the claim of an attempt and, if it is among `ends`, how it ended."""
        name, number = match["name"], int(match["attempt"])
        content = _read(self.path / match[0])
        if f"{name}.{number}.end" not in ends:
            return Attempt(number, content)
        end = _read(self.path / f"{name}.{number}.end")
        result, seconds = end.get("result"), end.get("seconds")
        if result not in typing.get_args(Result):
            result = "failed"
        if not isinstance(seconds, int | float) or not 0 <= seconds < MAX_RUN_SECONDS:
            seconds = 0.0
        return Attempt(number, content, result, str(end.get("error", "")), seconds)

    def _state(self, status: RunStatus) -> RunState:
        """Return the state that follows from the attempts of a run."""
        if not status.attempts:
            return "waiting"
        results = [attempt.result for attempt in status.attempts]
        if "finished" in results:
            return "finished"
        last = status.attempts[-1]
        if last.result is not None:
            return last.result
        return "lost" if self._is_lost(status.run.name, last) else "running"

    def _is_lost(self, name: str, attempt: Attempt) -> bool:
        """True if the worker of an attempt has ended or sends no heartbeats."""
        worker = str(attempt.claim.get("worker", ""))
        if worker and worker == self.worker:
            return False
        key, now = f"{name}.{attempt.number}", time.monotonic()
        content, first_seen = self._seen.get(key, (None, now))
        if content != attempt.claim:
            if content is not None:
                self._alive.add(key)
            content, first_seen = attempt.claim, now
        self._seen[key] = content, first_seen
        if worker and boot_id() and attempt.claim.get("boot") == boot_id():
            is_running = is_locked(self._lock_path(worker))
            if is_running:
                self._alive.add(key)
            # the worker may have recorded the end since the folder was read
            return not is_running and not (self.path / f"{key}.end").exists()
        return now - first_seen > self.stale_seconds

    def _lock_path(self, worker: str) -> Path:
        return self.folder / WORKERS / f"{Path(worker).name}.lock"


def write_shared(path: Path, text: str) -> None:
    """Write a file that several workers may write at the same time."""
    # part of the name of the temporary file, so that each writer has its own
    writer = f"-{platform.node()}-{os.getpid()}-{threading.get_ident()}"
    write_file(path, text.encode(), writer=writer)


def boot_id() -> str:
    """Return the boot id of this machine; empty if the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _is_valid(run: QueuedRun) -> bool:
    """True if the values of a file have the types of the fields."""
    texts = [run.task, run.method, *run.command]
    numbers = (run.seed, run.frames)
    is_list = isinstance(run.command, list)
    return is_list and {*map(type, texts)} == {str} and {*map(type, numbers)} == {int}


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON file; return {} if it is being created or is damaged."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
