"""Messages on standard error, and the time since the last output."""

from __future__ import annotations

import contextlib
import math
import sys
import time

_last_output = -math.inf  # time of the last output; no output yet


def print_message(text: str, end: str = "\n") -> None:
    """Print to standard error, unless it is closed, full, replaced or a broken pipe."""
    with contextlib.suppress(Exception, SystemExit):
        if sys.stderr is not None:
            print(text, end=end, file=sys.stderr, flush=True)
    record_output()


def record_output() -> None:
    """Store the time of an output; see `seconds_since_output`."""
    global _last_output
    _last_output = time.monotonic()


def seconds_since_output() -> float:
    """Seconds since this process printed metrics, progress or a message."""
    return time.monotonic() - _last_output
