"""Code that runs in a worker process: build environments and answer messages."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from reverie.api import StateDict, UserError
from reverie.envs.vector.base import common_spaces, truncated_row, write_row
from reverie.envs.vector.env_slot import EnvFailure, EnvSlot
from reverie.envs.vector.workers import messages
from reverie.envs.vector.workers.shared_memory import (
    RESET,
    STEP,
    SharedArrays,
    make_layout,
)


def main(connection: int, parent_pipe: int, memory: int, use_death_signal: int) -> None:
    """Entry point of a worker process.

    The first three arguments are file descriptors: a socket, a pipe whose other end is
    closed when the main process ends, and the shared memory.
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
        # ignored: the main process also gets them, and stops the workers later
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _exit_with_parent(parent_pipe, bool(use_death_signal))
    slots: list[EnvSlot] = []
    exit_if_copy = _CopyCheck()
    try:
        with socket.socket(fileno=connection) as sock:
            try:
                _serve(sock, memory, slots, exit_if_copy)
            except UserError as error:
                exit_if_copy()
                payload = pickle.dumps((isinstance(error, EnvFailure), str(error)))
                messages.Connection(sock).send(messages.USER_ERROR, payload)
    except OSError:
        pass  # the main process has ended, or an environment has closed the connection
    for slot in slots:
        slot.close()


def _serve(
    sock: socket.socket,
    memory: int,
    slots: list[EnvSlot],
    exit_if_copy: Callable[[], None],
) -> None:
    """Build the environments, add them to `slots`, and answer messages until `QUIT`."""
    connection = messages.Connection(sock)

    def answer(kind: bytes, payload: bytes = b"") -> None:
        exit_if_copy()
        connection.send(kind, payload)

    options = pickle.loads(connection.receive()[1])
    connection = messages.Connection(sock, options["polls"])
    make_env = pickle.loads(options["make_env"])
    for index, attempt in zip(options["indices"], options["attempts"], strict=True):
        slot = EnvSlot(make_env, index, options["failures"], options["seed"], attempt)
        slots.append(slot)
        slot.open()
    gc.freeze()  # exclude the objects created so far from garbage collection
    spaces = [(slot.obs_space, slot.act_space) for slot in slots]
    answer(messages.READY, pickle.dumps((spaces, slots[0].render_fps)))
    shared: SharedArrays | None = None
    while True:
        kind, payload = connection.receive()
        if kind == messages.QUIT:
            return
        if kind == messages.ATTACH:
            layout = make_layout(*common_spaces(spaces), options["count"])
            shared = SharedArrays(layout, memory)
        elif kind == messages.RUN:
            assert shared is not None
            errors = _run_commands(slots, shared, exit_if_copy)
            if errors:
                answer(messages.ERRORS, pickle.dumps(errors))
            else:
                answer(messages.DONE)
        elif kind == messages.GET_STATE:
            states: list[StateDict] = [slot.state_dict() for slot in slots]
            answer(messages.DONE, pickle.dumps(states))
        elif kind == messages.LOAD_STATE:
            saved: list[StateDict] = pickle.loads(payload)
            restored = [s.load_state_dict(d) for s, d in zip(slots, saved, strict=True)]
            answer(messages.DONE, pickle.dumps(restored))


class _CopyCheck:
    """Ends the process if it is a copy of the worker, made by `os.fork`.

    An environment that forks continues in both processes. Only the worker may write
    observations to the shared memory and answer messages.
    """

    def __init__(self) -> None:
        self.process_id = os.getpid()

    def __call__(self) -> None:
        if os.getpid() != self.process_id:
            os._exit(1)


def _run_commands(
    slots: Sequence[EnvSlot], shared: SharedArrays, exit_if_copy: Callable[[], None]
) -> list[tuple[int, str]]:
    """Step or reset each environment as commanded, and write its observation.

    Returns the errors of environments that failed, with their indices.
    """
    buffer = int(shared.buffer[0])
    rows, previous = shared.obs[buffer], shared.obs[1 - buffer]
    errors: list[tuple[int, str]] = []
    for slot in slots:
        index = slot.index
        command = shared.command[index]
        if command == STEP:
            action = {key: value[index].copy() for key, value in shared.action.items()}
            row = slot.step(action) or truncated_row(previous, index)
            exit_if_copy()
            write_row(rows, index, row)
        elif command == RESET:
            row = slot.reset()
            exit_if_copy()
            write_row(rows, index, row)
        if new_errors := slot.pop_errors():
            errors += [(index, error) for error in new_errors]
        if shared.attempt[index] != slot.attempt:
            shared.attempt[index] = slot.attempt
    return errors


def _exit_with_parent(parent_pipe: int, use_death_signal: bool) -> None:
    """Kill this process and its children as soon as the main process has ended."""
    if use_death_signal and sys.platform.startswith("linux"):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG: also kills stopped processes
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)

    def wait_for_parent() -> None:
        os.read(parent_pipe, 1)  # returns when the main process closes its end
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_parent, daemon=True).start()
