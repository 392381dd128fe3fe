"""Handles the signals that ask a process to end: save a checkpoint, then stop.

SIGTERM and Ctrl-C are always handled. Batch systems send SIGUSR1 or SIGUSR2 before the
end of a job (submitit requests SIGUSR2, which SLURM may send to all processes of a job)
and SIGXCPU if it exceeds its CPU limit; SIGHUP is sent when the terminal closes. These
four signals are not handled if the program ignores them (`nohup` ignores SIGHUP)
or has its own handler.

The signals set a flag that the training loop reads after every update. It then saves
and the process exits with 128 plus the signal number, such as 143 for SIGTERM. On a
CPU, a running update is aborted and repeated when the run is resumed
(`nets/abort.py`). A second Ctrl-C stops immediately, without saving.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from reverie.nets.abort import request_abort

ALWAYS_HANDLED = ("SIGTERM", "SIGINT")
HANDLED_IF_DEFAULT = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that are handled if the program has not set a handler and does not ignore
them. They are given by name, because Windows does not have these signals."""
TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
"""Names of the interval timers of a process, which send signals."""
RESTORE_SECONDS = 0.1
"""Seconds between two calls of `Stopper.undo_env_changes` that have an effect."""
_builtin_print = print  # an environment may replace it by None


class Interrupted(Exception):
    """Raised after a signal stopped a run and the run was saved.

    `is_saved` is False if the run was stopped before its first step.
    """

    def __init__(self, number: int, is_saved: bool = True):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.is_saved = is_saved


class StoppedWithoutSaving(KeyboardInterrupt):
    """Raised by a signal while a new run is built, when there is nothing to save.

    Not an `Exception`, so that code of environments and agents does not catch it.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Stopper:
    """Context manager that records a signal instead of letting it end the process."""

    def __init__(self) -> None:
        self.signal: int | None = None  # number of the signal that was received
        self.time = 0.0  # when the signal was received
        self.can_save = True
        """False while a new run is built: a signal then ends it immediately."""
        self._handlers: dict[int, Any] = {}
        self._unblocked: set[int] = set()  # signals that were not blocked before
        self._idle_timers: list[int] = []  # timers that were not set before
        self._restore_time = 0.0  # when `undo_env_changes` last had an effect

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for number in _signals_to_handle():
                self._handlers[number] = signal.signal(number, self._handle)
            if hasattr(signal, "setitimer"):  # not on Windows
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
                self._unblocked = {*self._handlers} - {*map(int, blocked)}
                timers = [getattr(signal, name) for name in TIMERS]
                self._idle_timers = [x for x in timers if not signal.getitimer(x)[0]]
        return self

    def __exit__(self, *exception: Any) -> None:
        self.undo_env_changes(always=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        """True if a signal was received."""
        return self.signal is not None

    def raise_if_stopped(self, is_saved: bool = True) -> None:
        """Raise `Interrupted` if a signal was received; called after saving."""
        if self.signal is not None:
            raise Interrupted(self.signal, is_saved)

    def undo_env_changes(self, always: bool = False) -> None:
        """Undo what environments changed in this process: signal handlers, blocked
        signals, timers (whose signals would end the run), and `print` if it is not
        callable.

        Called after steps of environments; it has an effect every `RESTORE_SECONDS`.
        """
        now = time.monotonic()
        if not always and now - self._restore_time < RESTORE_SECONDS:
            return
        self._restore_time = now
        if not callable(builtins.print):
            builtins.print = _builtin_print
        if threading.current_thread() is not threading.main_thread():
            return
        for timer in self._idle_timers:
            if signal.getitimer(timer)[0]:
                signal.setitimer(timer, 0)
        for number in self._handlers:
            if signal.getsignal(number) != self._handle:
                signal.signal(number, self._handle)
        if self._unblocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._unblocked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # SIGXCPU is repeated every second
        self.signal, self.time = number, time.monotonic()
        name = signal.Signals(number).name
        if name == "SIGHUP":
            discard_closed_output((1, 2))
        action = "saving, then stopping" if self.can_save else "stopping"
        # not print, which is not reentrant
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: {action}.\n".encode())
        if not self.can_save:
            raise StoppedWithoutSaving(number)
        request_abort()


def discard_closed_output(descriptors: Sequence[int]) -> None:
    """Redirect descriptors to the null device if their terminal was closed.

    Writing to a closed terminal would raise an error.
    """
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, 0)  # errors and hangups are always reported
        if poll.poll(0):
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), descriptor)


def _signals_to_handle() -> list[signal.Signals]:
    numbers = [getattr(signal, name) for name in ALWAYS_HANDLED]
    for name in HANDLED_IF_DEFAULT:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            numbers.append(number)
    return numbers
