"""Prints what a run is doing if it has not printed anything for a while."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from reverie.log.messages import print_message, seconds_since_output
from reverie.log.terminal import format_seconds

FIRST_SECONDS = 3.0
"""Time without output after which the first line is printed."""
SECONDS = 25.0
"""Time without output after which each further line is printed."""
POLL_SECONDS = 0.5
MIN_SECONDS = 2.0
"""Duration of an activity from which on it is printed."""


class StatusLine:
    """Context in which a thread prints the current activity after some silence."""

    def __init__(self, activity: str, print_line: Callable[[str], None] | None = None):
        self.print_line = print_line or print_message
        self.details: Callable[[], str] = lambda: ""
        """Text about the progress of the run, read by the thread."""
        self.notice: Callable[[str], str] = lambda activity: ""
        """Text to print at once, given the activity; empty for none."""
        self._interval = FIRST_SECONDS
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="status")
        self.begin(activity)

    def begin(self, activity: str) -> None:
        """Set the activity, such as `building the environments`."""
        self._activity = activity, time.monotonic()

    def __enter__(self) -> StatusLine:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._done.set()
        self._thread.join()

    def line(self) -> str:
        """Return the activity, for how long it lasts, and the progress of the run."""
        activity, start = self._activity
        seconds = time.monotonic() - start
        parts = [activity, self.details()]
        if seconds >= MIN_SECONDS:
            parts.append(f"for {format_seconds(seconds)} so far")
        return ", ".join(filter(None, parts))

    def _run(self) -> None:
        start = time.monotonic()
        while not self._done.wait(POLL_SECONDS):
            if notice := self.notice(self._activity[0]):
                self.print_line(notice)
            silence = seconds_since_output()
            if math.isinf(silence):  # nothing was printed, also not before
                silence = time.monotonic() - start
            if silence >= self._interval:
                self._interval = SECONDS
                self.print_line(self.line())
