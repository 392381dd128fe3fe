"""Print the current activity of a run if it has printed nothing for some seconds."""

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
NEXT_SECONDS = 25.0
"""Time without output after which each further line is printed."""
POLL_SECONDS = 0.5
"""Time between two checks of the thread."""
MIN_SECONDS = 2.0
"""Shorter durations of an activity are not printed."""


class StatusLine:
    """Context manager; a thread prints the activity after a time without output."""

    def __init__(self, activity: str, print_line: Callable[[str], None] | None = None):
        self.print_line = print_line or print_message
        self.details: Callable[[], str] = lambda: ""
        """Returns the progress of the run, called by the thread."""
        self.notice: Callable[[str], str] = lambda activity: ""
        """Returns a message to print now, given the activity; empty for none."""
        self._interval = FIRST_SECONDS
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="status")
        self.begin(activity)

    def begin(self, activity: str) -> None:
        """Set the activity, such as `building the environments`."""
        self._activity = activity, time.monotonic()  # and its start

    def __enter__(self) -> StatusLine:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._done.set()
        self._thread.join()

    def line(self) -> str:
        """Return the activity, its duration so far, and the progress of the run."""
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
            quiet_seconds = seconds_since_output()
            if math.isinf(quiet_seconds):  # nothing was printed by this process
                quiet_seconds = time.monotonic() - start
            if quiet_seconds >= self._interval:
                self._interval = NEXT_SECONDS
                self.print_line(self.line())
