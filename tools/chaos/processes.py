"""Run `reverie` commands in forked processes.

A new interpreter needs seconds to import torch; a fork of this process needs
milliseconds. The parent must not start threads or run torch operations.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 120.0
"""Seconds after which a command counts as hanging."""
EXTRA_MEMORY = 6 << 30
"""Address space that a command may use in addition to that of this process."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    arguments: tuple[str, ...]
    code: int
    """Exit code; the negative number of the signal if it was killed."""
    output: str
    hung: bool = False

    def problems(self, codes: Collection[int] = (0, 2)) -> list[str]:
        """Return the problems: another exit code than these, a timeout or a traceback.

        With exit code 2, a message with a fix must be printed.
        """
        found = []
        if self.hung:
            found.append("did not end")
        elif self.code not in codes:
            found.append(f"ended with {describe_code(self.code)}")
        if "Traceback (most recent call last)" in self.output:
            found.append("printed a traceback")
        has_fix = "reverie: " in self.output and "Fix:" in self.output
        # `reverie data inspect` lists what is invalid
        if self.code == 2 and not has_fix and "  invalid: " not in self.output:
            found.append("ended with exit code 2 without a message that has a fix")
        command = f"reverie {' '.join(self.arguments)}"
        return [f"`{command}` {text}\n{self.tail()}" for text in found]

    def tail(self) -> str:
        """Return the last lines of the output, indented."""
        lines = [line[:300] for line in self.output.splitlines()[-12:]]
        return "\n".join(f"    | {line}" for line in lines)


class Running:
    """A command in a forked process, with its output in a file."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        before: Callable[[], None] | None = None,
        variables: Mapping[str, str] | None = None,
        after: Callable[[], None] | None = None,
    ):
        """Start the command with `folder` as the current folder.

        `before` and `after` are called in the process, around the command.
        """
        self.arguments = tuple(arguments)
        self.log = folder.with_name(folder.name + ".out")
        folder.mkdir(exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run_child(folder, before, variables or {}, after)

    def is_running(self) -> bool:
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return state is None

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def output(self) -> str:
        try:
            return self.log.read_bytes()[-200_000:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def wait(self, limit: float = TIMEOUT) -> Outcome:
        """Wait until the command ends, at most `limit`; then kill its processes."""
        deadline = time.monotonic() + limit
        while (hung := self.is_running()) and time.monotonic() < deadline:
            time.sleep(0.003)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return Outcome(self.arguments, code, self.output(), hung)

    def _run_child(
        self,
        folder: Path,
        before: Callable[[], None] | None,
        variables: Mapping[str, str],
        after: Callable[[], None] | None,
    ) -> None:
        """Run the command in the forked process, and exit."""
        code = 1
        try:
            os.setpgid(0, 0)
            null, log = os.open(os.devnull, os.O_RDONLY), self._open_log()
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            sys.stdout = os.fdopen(1, "w", 1, errors="replace", closefd=False)
            sys.stderr = os.fdopen(2, "w", 1, errors="replace", closefd=False)
            os.environ.update(variables)
            os.chdir(folder)
            sys.argv = ["reverie", *self.arguments]
            limit_memory()
            from reverie.cli.main import main

            if before:
                before()
            code = main()
            if after:
                after()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _open_log(self) -> int:
        return os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def run(
    arguments: Sequence[str], folder: Path, limit: float = TIMEOUT, **options
) -> Outcome:
    """Run a command to its end; the options are those of `Running`."""
    return Running(arguments, folder, **options).wait(limit)


def limit_memory(extra: int = EXTRA_MEMORY) -> None:
    """Limit the address space, so that a fault cannot take all memory."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + extra
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def describe_code(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
