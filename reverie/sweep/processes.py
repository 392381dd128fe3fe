"""Runs as processes of their own, some at a time, that end when their parent does.

Each has a slot. Slots share the cores of the machine and its GPUs evenly: a run that
took all threads would slow down its neighbours more than it gains.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

GRACE = 120.0
"""Seconds to save in, for a run that is told to stop."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GPUS = "CUDA_VISIBLE_DEVICES"
PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """A process that writes what it says to a file."""

    process: subprocess.Popen[bytes]
    log: Path
    slot: int
    offset: int
    """Where in the file its own words begin."""
    started: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    """When to lose patience with it, once it was told to stop."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.kill()
        return self.process.poll()

    def stop(self) -> None:
        """Ask it to save and end."""
        if self.deadline is None:
            self.deadline = time.monotonic() + GRACE
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def complaint(self, code: int) -> str:
        """Why it failed, in one sentence."""
        said = self.log.read_bytes()[self.offset :]
        return explain(said.decode(errors="replace"), code)


class Slots:
    """Room for so many processes."""

    def __init__(self, program: Sequence[str], count: int, any_gpu: bool = True):
        self.program = list(program)
        self.free = list(range(count))
        self._shares = [shares(slot, count, any_gpu) for slot in range(count)]

    def start(
        self, words: Sequence[str], log: Path, slot: int, more: dict[str, str]
    ) -> Child:
        """Start the program with these words in a slot that was taken."""
        offset = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*self.program, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._shares[slot], **more},
                start_new_session=True,  # Ctrl-C is the parent's
                preexec_fn=follow_into_death(),
            )
        return Child(process, log, slot, offset)


def shares(slot: int, count: int, any_gpu: bool = True) -> dict[str, str]:
    """What the environment tells a process about its part of the machine.

    It gets one of several GPUs, unless it was told which one to use.
    """
    found: dict[str, str] = {}
    if not any(name in os.environ for name in THREADS):
        cores = len(os.sched_getaffinity(0)) if _on_linux() else os.cpu_count() or 1
        found |= dict.fromkeys(THREADS, str(max(1, cores // count)))
    listed = os.environ.get(GPUS)
    gpus = listed.split(",") if listed else [str(i) for i in range(_gpus())]
    if any_gpu and min(count, len(gpus)) > 1:
        found[GPUS] = gpus[slot % len(gpus)]
    return found


def follow_into_death() -> Callable[[], None] | None:
    """What a new process does first, so that it is killed if its parent dies."""
    if not _on_linux():
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def follow() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it is dead already
            os._exit(1)

    return follow


def explain(text: str, code: int) -> str:
    """What a process that ended with this code said last."""
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}."
    said = re.findall(r"^reverie: (.*?)(?=^  Fix: |\Z)", text, re.M | re.S)
    if code == 2 and said:
        return " ".join(said[-1].split())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    return f"it ended with exit code {code}{last}"


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _on_linux() -> bool:
    return sys.platform.startswith("linux")
