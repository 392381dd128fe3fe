"""`--devices N`: start the processes of a data-parallel run on this machine.

The processes run the same command, with the variables of `torchrun`. The exit code is
that of the first process that fails, else that of rank 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from reverie.distributed.group import has_reported_failure, lost_rank_message
from reverie.distributed.launch import Launch
from reverie.distributed.store import host_store, store_variables
from reverie.log.messages import print_message
from reverie.run.signals import ALWAYS_HANDLED, HANDLED_IF_DEFAULT
from reverie.storage.system import signal_name

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""Time that the other processes have to exit after one has failed, or after rank 0 has
ended; then they are killed."""
INTERRUPT_SECONDS = 2.0
"""Time after which rank 0 is stopped if only this process received SIGINT."""


def run_processes(count: int, arguments: Sequence[str]) -> int:
    """Run `reverie` with these arguments in `count` processes; return the exit code."""
    store = host_store()  # in this process, so that it still responds if rank 0 hangs
    # hide C++ stack traces of lost connections; the ranks print a message
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    shared = {**quiet, **os.environ, **store_variables(store.port)}
    command = [sys.executable, "-m", "reverie", *arguments]
    processes = [
        subprocess.Popen(
            command, env={**shared, **Launch(i, count, i, count).environment()}
        )
        for i in range(count)
    ]

    received: list[int] = []  # signals that this process received

    def forward(number: int, frame: Any) -> None:
        received.append(number)
        if number != signal.SIGINT:
            if processes[0].poll() is None:
                processes[0].send_signal(number)
        elif os.name == "posix":
            # The terminal sends Ctrl-C to all processes, `kill -INT` only to this one.
            # A run that is stopping ignores SIGTERM, but a second SIGINT would end it
            # without saving.
            timer = threading.Timer(
                INTERRUPT_SECONDS, processes[0].send_signal, (signal.SIGTERM,)
            )
            timer.daemon = True
            timer.start()

    names = (*ALWAYS_HANDLED, *HANDLED_IF_DEFAULT)
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        code, killed = _wait(processes)
        if killed and not received:
            is_reported = has_reported_failure(store)
            message = killed if is_reported else lost_rank_message(killed)
            print_message(f"reverie: {message}")
        if signal.SIGINT in received and code == 128 + signal.SIGTERM:
            return 128 + signal.SIGINT
        return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]]) -> tuple[int, str]:
    """Wait until all processes have ended; kill those that do not end in time.

    Returns the exit code, and which rank was killed if this was the first failure. The
    other ranks report only that they lost a connection, if they had one.
    """
    first_failure: int | None = None
    killed = ""
    ended_at: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed and first_failure is None:
            # A negative code means killed by a signal, which is the cause: the others
            # fail because they lose the connection to this rank.
            first_failure = min(failed)
            if first_failure < 0 and ended_at is None:
                rank, name = codes.index(first_failure), signal_name(-first_failure)
                killed = f"Rank {rank} was killed by {name}."
                if -first_failure == signal.SIGKILL:
                    killed = f"{killed[:-1]}, for example because memory ran out."
            if codes[0] is not None:
                for process in processes[1:]:
                    process.terminate()  # ranks that have started ignore it
        if None not in codes:
            code = first_failure or codes[0] or 0
            # negative if a signal ended the process; convert it as a shell does
            return 128 - code if code < 0 else code, killed
        if ended_at is None and (failed or codes[0] is not None):
            ended_at = time.monotonic()
        if ended_at is not None and time.monotonic() - ended_at > GRACE_SECONDS:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        time.sleep(POLL_SECONDS)
