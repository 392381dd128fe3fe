"""Handles SIGTERM and Ctrl-C: save a checkpoint, then stop.

The signals set a flag that the training loop reads after every update. It then saves
and the process exits with 128 plus the signal number: 143 or 130. On a CPU, an update
that is running is given up and repeated when the run is resumed (`nets/abort.py`). A
second Ctrl-C stops immediately, without saving.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from reverie.nets.abort import request_abort


class Interrupted(Exception):
    """Raised after a run was stopped by a signal and has saved."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Stopper:
    """Context manager in which signals set `signal` instead of ending the process."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.time = 0.0  # when the signal was received
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        """True if a signal was received."""
        return self.signal is not None

    def check(self) -> None:
        """Raise `Interrupted` if a signal was received; called after saving."""
        if self.signal is not None:
            raise Interrupted(self.signal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal, self.time = number, time.monotonic()
        name = signal.Signals(number).name
        # not print, which is not reentrant
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: saving, then stopping.\n".encode())
        request_abort()
