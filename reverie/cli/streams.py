"""Handling of standard streams that are closed or cannot be written.

Errors in writing to standard error are ignored. Commands that print their result, such
as `reverie config`, exit without an error if the program that reads a pipe has exited
(`| head`), and fail if the output cannot be written for another reason. Training also
writes its metrics to files, and continues if the terminal is closed.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys


class Output(io.TextIOWrapper):
    """Standard output that stores the error of a failed write."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.error = error
            raise


def open_standard_streams() -> None:
    """Open the null device in place of closed streams.

    Otherwise a file that is opened later would get their file descriptor, and messages
    of this process or its children would be written to it. Characters that a stream
    cannot encode are replaced.
    """
    for descriptor in range(3):  # stdin, stdout, stderr
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if type(sys.stdout) is io.TextIOWrapper:  # not replaced, for example by pytest
        old = sys.stdout
        encoding, buffering = old.encoding, old.line_buffering
        sys.stdout = Output(old.detach(), encoding, line_buffering=buffering)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def flush_output() -> OSError | None:
    """Flush standard output; return the error if a part of it was not written.

    In that case, the buffered output is discarded, so that the interpreter does not
    write it again at exit.
    """
    try:
        sys.stdout.flush()
    except (AttributeError, ValueError):  # replaced by None, or closed
        return None
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        return error
    return sys.stdout.error if isinstance(sys.stdout, Output) else None
