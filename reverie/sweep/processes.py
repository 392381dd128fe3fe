"""Processes that run the trials, a fixed number of them at the same time.

Each process has a slot. The CPU cores and GPUs of the machine are divided evenly among
the slots, because a run that used all cores would slow down the others more than it
gains. Processes are killed if the sweep itself is killed (on Linux).
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

from reverie.storage.atomic import open_append
from reverie.storage.limits import open_regular
from reverie.storage.os_errors import explain_write_errors

SAVE_TIMEOUT = 120.0
"""Seconds a process has to save a checkpoint and exit after it was asked to stop."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
PR_SET_PDEATHSIG = 1
ON_LINUX = sys.platform.startswith("linux")


@dataclass
class RunProcess:
    """A process that writes its output to a log file."""

    process: subprocess.Popen[bytes]
    log: Path
    slot: int
    log_start: int
    """Size of the log file when the process was started, in bytes."""
    started: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    """Time at which it is killed; set when it is asked to stop."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def poll(self) -> int | None:
        """The exit code, or None if it is still running."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.kill()
        return self.process.poll()

    def stop(self) -> None:
        """Ask it to save a checkpoint and exit."""
        if self.deadline is None:
            self.deadline = time.monotonic() + SAVE_TIMEOUT
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def error_message(self, exit_code: int) -> str:
        with open_regular(self.log) as file:
            output = file.read()[self.log_start :]
        return describe_exit(output.decode(errors="replace"), exit_code)


class ProcessSlots:
    """Starts processes in a fixed number of slots."""

    def __init__(self, program: Sequence[str], count: int, assign_gpus: bool = True):
        self.program = list(program)
        self.free = list(range(count))
        self._environments = [
            slot_environment(slot, count, assign_gpus) for slot in self.free
        ]

    def start(
        self, words: Sequence[str], log: Path, slot: int, variables: dict[str, str]
    ) -> RunProcess:
        """Start the program with these arguments and environment variables."""
        log_start = log.stat().st_size if log.exists() else 0
        with explain_write_errors(log):
            descriptor = open_append(log)
        with open(descriptor, "ab") as out:
            process = subprocess.Popen(
                [*self.program, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environments[slot], **variables},
                start_new_session=True,  # Ctrl-C is handled by the parent
                preexec_fn=kill_with_parent(),
            )
        return RunProcess(process, log, slot, log_start)


def slot_environment(slot: int, count: int, assign_gpus: bool = True) -> dict[str, str]:
    """Environment variables that assign CPU threads and a GPU to a slot.

    With `assign_gpus`, each slot gets one of several GPUs.
    """
    variables: dict[str, str] = {}
    if not any(name in os.environ for name in THREAD_VARIABLES):
        cores = len(os.sched_getaffinity(0)) if ON_LINUX else os.cpu_count() or 1
        variables |= dict.fromkeys(THREAD_VARIABLES, str(max(1, cores // count)))
    visible = os.environ.get(GPU_VARIABLE)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = visible.split(",") if visible else [str(i) for i in range(num_gpus)]
    if assign_gpus and min(count, len(gpus)) > 1:
        variables[GPU_VARIABLE] = gpus[slot % len(gpus)]
    return variables


def kill_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that has the process killed when its parent dies."""
    if not ON_LINUX:
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def set_death_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has died in the meantime
            os._exit(1)

    return set_death_signal


def describe_exit(output: str, exit_code: int) -> str:
    """The error of a failed process, from its output and exit code."""
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    errors = re.findall(r"^reverie: (.*?)(?=^  Fix: |\Z)", output, re.M | re.S)
    if exit_code == 2 and errors:
        return " ".join(errors[-1].split())
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last_line = f": {lines[-1]}" if lines else ""
    return f"exit code {exit_code}{last_line}"
