"""`WorkerHandle`: start, message and stop one worker process."""

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
from reverie.envs.vector.workers import messages
from reverie.envs.vector.workers.shared_memory import STEP
from reverie.spaces import Spaces
from reverie.storage.system import signal_name

# Code that a worker executes. It first sets the import path of the main process; `-P`
# keeps the current folder out of the import path until then.
START_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from reverie.envs.vector.workers.child import main; main(*map(int, sys.argv[2:]))"
)


class WorkerError(Exception):
    """A worker crashed, timed out or failed to build its environments."""

    def __init__(self, cause: str, message: str):
        """`cause` selects the metric: `errors`, `crashes` or `timeouts`."""
        super().__init__(message)
        self.cause, self.message = cause, message


class WorkerHandle:
    """One worker process, as seen by the main process."""

    def __init__(
        self,
        indices: list[int],
        make_env: bytes,
        options: dict[str, Any],
        memory_fd: int,
    ):
        self.indices = indices
        self.rows = slice(indices[0], indices[-1] + 1)
        """Rows of the batch that this worker writes."""
        self.failures = 0
        self.is_ready = self.is_busy = False
        self.started_at = 0.0
        self.process: Any = None
        self._starts = 0
        self._good_steps = 0
        self._make_env = make_env
        self._options = options
        self._memory_fd = memory_fd
        self._cwd = os.getcwd()
        self._connection: messages.Connection | None = None
        self._parent_pipe = -1  # the worker exits when the main process closes it

    def start(self, attempts: list[int]) -> None:
        """Start the process and let it build its environments, without waiting.

        `attempts` are the numbers of restarts of its environments so far (`EnvSlot`).
        """
        own_end, child_end = socket.socketpair()
        read_end, self._parent_pipe = os.pipe()
        # one thread per worker: the workers already run in parallel
        thread_counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        path = [os.path.abspath(entry or self._cwd) for entry in sys.path]
        fds = (child_end.fileno(), read_end, self._memory_fd)
        # Linux sends the parent-death signal when the *thread* that started a process
        # ends, so it is used only from the main thread.
        use_death_signal = threading.current_thread() is threading.main_thread()
        arguments = [json.dumps(path), *map(str, fds), str(int(use_death_signal))]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START_CODE, *arguments],
            pass_fds=fds,
            env={**dict.fromkeys(thread_counts, "1"), **os.environ},
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            process_group=0,  # not interrupted by Ctrl-C, and killed with its children
        )
        child_end.close()
        os.close(read_end)
        self._connection = messages.Connection(own_end, self._options["polls"])
        self._starts += 1
        self.started_at = time.monotonic()
        self.is_ready = self.is_busy = False
        options = {**self._options, "indices": self.indices, "attempts": attempts}
        options["make_env"] = self._make_env
        with contextlib.suppress(WorkerError):  # `await_ready` reports it
            self.send(messages.BUILD, pickle.dumps(options), self.started_at + 60)

    def await_ready(self, deadline: float) -> list[tuple[Spaces, Spaces]]:
        """Wait until the environments are built, and return their spaces."""
        try:
            _, payload = self.receive(deadline)
        except EnvFailure as failure:
            if self._starts == 1:  # the environment has never worked: stop the run
                raise
            raise WorkerError("errors", str(failure)) from failure
        spaces: list[tuple[Spaces, Spaces]]
        spaces, self.render_fps = pickle.loads(payload)
        return spaces

    def attach(self) -> None:
        """Make the worker map the shared memory."""
        self.send(messages.ATTACH, b"", time.monotonic() + 60)
        self.is_ready = True

    def has_work(self, command: np.ndarray) -> bool:
        """True if one of this worker's environments is commanded to step or reset."""
        return bool(command[self.rows].max() >= STEP)

    def send(self, kind: bytes, payload: bytes = b"", deadline: float = 0.0) -> None:
        """Send a message; raise `WorkerError` if the worker cannot receive it."""
        assert self._connection is not None
        try:
            self._connection.send(kind, payload, deadline)
        except TimeoutError as error:
            raise WorkerError("timeouts", "it does not read its messages") from error
        except OSError as error:
            raise WorkerError("crashes", self._exit_reason()) from error

    def receive(self, deadline: float) -> tuple[bytes, bytes]:
        """Return the next message; raises user errors that occurred in the worker."""
        assert self._connection is not None
        try:
            kind, payload = self._connection.receive(deadline)
        except TimeoutError as error:
            raise WorkerError("timeouts", "it did not answer in time") from error
        except OSError as error:
            raise WorkerError("crashes", self._exit_reason()) from error
        if kind == messages.USER_ERROR:
            is_failure, text = pickle.loads(payload)
            raise (EnvFailure if is_failure else UserError)(text)
        return kind, payload

    def count_good_step(self, episode_ended: bool) -> None:
        """Reset the count of failures after an episode or enough good steps."""
        self._good_steps += 1
        if episode_ended or self._good_steps >= HEALTHY_STEPS:
            self.failures = self._good_steps = 0

    def kill(self) -> None:
        """Kill the process and its children immediately."""
        self.is_ready = self.is_busy = False
        self._good_steps = 0
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()
            self.process.wait()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            os.close(self._parent_pipe)

    def request_exit(self, deadline: float) -> None:
        """Ask the worker to close its environments and exit, without waiting."""
        if self._connection is not None:
            with contextlib.suppress(WorkerError):
                self.send(messages.QUIT, b"", deadline)

    def finish(self, deadline: float) -> None:
        """Let the worker close its environments until the deadline, then kill it."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, deadline - time.monotonic()))
            self.kill()

    def _exit_reason(self) -> str:
        """Return why the connection to the worker was lost."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code < 0:
            return f"it was killed by {signal_name(-code)}"
        return f"it exited with code {code}"
