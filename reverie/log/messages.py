"""Messages on standard error."""

from __future__ import annotations

import contextlib
import sys


def print_message(text: str) -> None:
    """Print to standard error; ignored if that is closed, full or a broken pipe."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
