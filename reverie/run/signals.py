"""Stop when asked to, after the turn in hand.

SIGTERM and Ctrl-C set a flag that the loop reads at the end of a turn; it then saves
and the process ends with 128 plus the signal's number: 143 and 130. A second Ctrl-C
ends it at once, without saving.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop, and has saved."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Stopper:
    """While open, signals set `asked` instead of ending the process."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_asked(self) -> bool:
        """Whether to stop."""
        return self.asked is not None

    def check(self) -> None:
        """Raise `Interrupted` if a stop was asked for; the caller has saved."""
        if self.asked is not None:
            raise Interrupted(self.asked)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number
        name = signal.Signals(number).name
        # Not by print: the signal may have come in the middle of another one.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: saving, then stopping.\n".encode())
