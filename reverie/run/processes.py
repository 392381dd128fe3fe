"""Starts and stops the processes of `reverie sweep` and `reverie campaign`.

A number of slots limits how many processes run at the same time. The CPU cores and GPUs
of the machine are divided evenly among the slots: if every run used all cores, they
would slow each other down. On Linux, processes are killed if the process that started
them is killed.
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
from reverie.storage.system import signal_name

PROGRAM = (sys.executable, "-m", "reverie")
"""Program that the processes run, without its arguments."""

SAVE_TIMEOUT = 120.0
"""Seconds a process has to save a checkpoint and exit after it was asked to stop."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
PR_SET_PDEATHSIG = 1  # constant of Linux, for `prctl`
ON_LINUX = sys.platform.startswith("linux")


@dataclass
class RunProcess:
    """A process of `reverie` that writes its output to a log file."""

    process: subprocess.Popen[bytes]
    log: Path
    slot: int
    log_start: int
    """Size of the log file when the process was started, in bytes."""
    started: float = field(default_factory=time.monotonic)
    kill_time: float | None = None
    """Time at which it is killed if it still runs; set by `stop`."""

    @property
    def stop_requested(self) -> bool:
        return self.kill_time is not None

    @property
    def seconds(self) -> float:
        """Time since it was started."""
        return time.monotonic() - self.started

    def poll(self) -> int | None:
        """Return the exit code, or None if running; kill it after `kill_time`."""
        if self.kill_time is not None and time.monotonic() > self.kill_time:
            self.kill()
        return self.process.poll()

    def stop(self) -> None:
        """Ask it to save a checkpoint and exit (SIGTERM)."""
        if not self.stop_requested:
            self.kill_time = time.monotonic() + SAVE_TIMEOUT
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def kill(self) -> None:
        """Kill it and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def error_message(self, exit_code: int) -> str:
        """Return the error of the process from its log."""
        with open_regular(self.log) as file:
            output = file.read()[self.log_start :]
        return describe_exit(output.decode(errors="replace"), exit_code)


def stop_processes(
    processes: Sequence[RunProcess],
    poll_seconds: float,
    while_waiting: Callable[[], None] = lambda: None,
) -> None:
    """Stop processes, which save a checkpoint first, and wait until they have ended."""
    try:
        for process in processes:
            process.stop()
        while any(process.poll() is None for process in processes):
            while_waiting()
            time.sleep(poll_seconds)
    finally:
        for process in processes:
            process.kill()


class ProcessSlots:
    """Starts processes in a number of slots.

    `processes` is the number of processes that the program starts (`--devices`), and
    `gpus` the number of GPUs that it may use; 0 if it selects them itself.
    """

    def __init__(
        self,
        program: Sequence[str],
        count: int,
        gpus: int = 1,
        processes: int = 1,
    ):
        self.program = list(program)
        self.count, self.gpus, self.processes = count, gpus, processes
        self.free = list(range(count))
        """Slots without a process. The caller of `start` removes the slot from this
        list, and adds it again when the process has ended."""

    def grow(self, count: int) -> None:
        """Increase the number of slots; running processes keep their CPU threads."""
        self.free += range(self.count, count)
        self.count = max(count, self.count)

    def start(
        self, arguments: Sequence[str], log: Path, slot: int, variables: dict[str, str]
    ) -> RunProcess:
        """Start the program with these arguments and environment variables."""
        log_start = log.stat().st_size if log.exists() else 0
        slot_variables = slot_environment(slot, self.count, self.gpus, self.processes)
        with explain_write_errors(log):
            descriptor = open_append(log)
        with open(descriptor, "ab") as out:
            process = subprocess.Popen(
                [*self.program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **slot_variables, **variables},
                start_new_session=True,  # Ctrl-C is handled by the parent
                preexec_fn=kill_with_parent(),
            )
        return RunProcess(process, log, slot, log_start)


def slot_environment(
    slot: int, count: int, gpus: int = 1, processes: int = 1
) -> dict[str, str]:
    """Return environment variables that assign CPU threads and GPUs to a slot.

    The CPU cores are divided evenly among all processes of all slots. Each slot gets
    this number of `gpus`; with too few GPUs for two slots, the variable is not set.
    """
    variables: dict[str, str] = {}
    if not any(name in os.environ for name in THREAD_VARIABLES):
        threads = max(1, cpu_cores() // (count * processes))
        variables |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    names = visible_gpus()
    sets = len(names) // gpus if gpus else 0
    if min(count, sets) > 1:
        first = slot % sets * gpus
        variables[GPU_VARIABLE] = ",".join(names[first : first + gpus])
    return variables


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if ON_LINUX else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as in `CUDA_VISIBLE_DEVICES`."""
    visible = os.environ.get(GPU_VARIABLE)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return visible.split(",") if visible and count else [str(i) for i in range(count)]


def kill_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn`: Linux kills the new process when this process ends."""
    if not ON_LINUX:
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def set_death_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has died in the meantime
            os._exit(1)

    return set_death_signal


def describe_exit(output: str, exit_code: int) -> str:
    """Return the error of a failed process, from its output and exit code."""
    if exit_code < 0:
        return f"killed by {signal_name(-exit_code)}"
    errors = re.findall(r"^reverie: (.*?)(?=^  Fix: |\Z)", output, re.M | re.S)
    if exit_code == 2 and errors:
        return " ".join(errors[-1].split())
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last_line = f": {lines[-1]}" if lines else ""
    return f"exit code {exit_code}{last_line}"
