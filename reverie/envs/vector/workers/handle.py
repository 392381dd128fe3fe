"""A worker process as the pool sees it: started, told, heard, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.envs.vector.env_slot import HEALTHY_STEPS, EnvFailure
from reverie.envs.vector.workers.messages import receive, send
from reverie.envs.vector.workers.shared_memory import STEP
from reverie.spaces import Spaces

# Runs in the new process. The path comes along, so that a package that is importable
# here is importable there.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from reverie.envs.vector.workers.child import work; work(*map(int, sys.argv[2:]))"
)


class Lost(Exception):
    """A worker died, hangs, or cannot build its environments."""

    def __init__(self, cause: str, why: str):
        super().__init__(why)
        self.cause, self.why = cause, why


class Worker:
    """The parent's side of one worker process."""

    def __init__(
        self, indices: list[int], make_env: bytes, recipe: dict[str, Any], memory: int
    ):
        self.indices = indices
        self.share = slice(indices[0], indices[-1] + 1)
        """Its part of the rows."""
        self.failures = 0
        self.is_ready = self.is_busy = False
        self.started_at = 0.0
        self.process: Any = None
        self._starts = 0
        self._good_steps = 0
        self._make_env = make_env
        self._recipe = recipe
        self._memory = memory
        self._folder = os.getcwd()
        self._socket: socket.socket | None = None
        self._lifeline = -1

    def start(self, attempts: list[int]) -> None:
        """Start the process and tell it what to build; does not wait for it."""
        ours, theirs = socket.socketpair()
        read_end, self._lifeline = os.pipe()
        threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        path = [os.path.abspath(entry or self._folder) for entry in sys.path]
        fds = (theirs.fileno(), read_end, self._memory)
        # The kernel ends a child when the *thread* that started it ends, so that help
        # is only asked for where that thread lives as long as the process.
        with_thread = int(threading.current_thread() is threading.main_thread())
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                BOOT,
                json.dumps(path),
                *map(str, fds),
                str(with_thread),
            ],
            pass_fds=fds,
            env={**dict.fromkeys(threads, "1"), **os.environ},
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is the parent's; and one kill gets them all
        )
        theirs.close()
        os.close(read_end)
        self._socket = ours
        self._starts += 1
        self.started_at = time.monotonic()
        self.is_ready = self.is_busy = False
        hello = {**self._recipe, "indices": self.indices, "attempts": attempts}
        hello["make_env"] = self._make_env
        with contextlib.suppress(Lost):  # `await_ready` finds out
            self.tell(b"h", pickle.dumps(hello), self.started_at + 60)

    def await_ready(self, deadline: float) -> list[tuple[Spaces, Spaces]]:
        """Wait until its environments are built; returns their spaces."""
        try:
            _, payload = self.hear(deadline)
        except EnvFailure as failure:
            if self._starts == 1:
                raise
            raise Lost("errors", str(failure)) from failure
        spaces: list[tuple[Spaces, Spaces]] = pickle.loads(payload)
        return spaces

    def attach(self) -> None:
        """Let it map the shared memory."""
        self.tell(b"a", b"", time.monotonic() + 60)
        self.is_ready = True

    def has_work(self, command: np.ndarray) -> bool:
        return bool(command[self.share].max() >= STEP)

    def tell(self, kind: bytes, payload: bytes = b"", deadline: float = 0.0) -> None:
        assert self._socket is not None
        try:
            send(self._socket, kind, payload, deadline)
        except TimeoutError as error:
            raise Lost("timeouts", "it does not read its messages") from error
        except OSError as error:
            raise Lost("crashes", self._how_it_ended()) from error

    def hear(self, deadline: float) -> tuple[bytes, bytes]:
        """Its next message; errors the user can mend are raised here."""
        assert self._socket is not None
        try:
            kind, payload = receive(self._socket, deadline)
        except TimeoutError as error:
            raise Lost("timeouts", "it did not answer in time") from error
        except OSError as error:
            raise Lost("crashes", self._how_it_ended()) from error
        if kind == b"u":
            is_failure, text = pickle.loads(payload)
            raise (EnvFailure if is_failure else UserError)(text)
        return kind, payload

    def forgive(self, ended: bool) -> None:
        """Note a good step; enough of them, or a whole episode, and all is well."""
        self._good_steps += 1
        if ended or self._good_steps >= HEALTHY_STEPS:
            self.failures = self._good_steps = 0

    def kill(self) -> None:
        """End it and everything it started, at once."""
        self.is_ready = self.is_busy = False
        self._good_steps = 0
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()
            self.process.wait()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            os.close(self._lifeline)

    def ask_to_quit(self, deadline: float) -> None:
        if self._socket is not None:
            with contextlib.suppress(Lost):
                self.tell(b"q", b"", deadline)

    def finish(self, deadline: float) -> None:
        """Let it close its environments until the deadline, then end it."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, deadline - time.monotonic()))
            self.kill()

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        return f"it exited with code {code}"
