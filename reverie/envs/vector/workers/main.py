"""What a worker process does from its first line to its last."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from reverie.api import StateDict, UserError
from reverie.envs.vector.batches import common_spaces, truncated_row, write_row
from reverie.envs.vector.slot import EnvFailure, Seat
from reverie.envs.vector.workers.messages import receive, send
from reverie.envs.vector.workers.shared_memory import RESET, STEP, Layout, Shared


def work(connection: int, lifeline: int, memory: int, with_thread: int) -> None:
    """The life of a worker process; the numbers are file descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(lifeline, bool(with_thread))
    sock = socket.socket(fileno=connection)
    seats: list[Seat] = []
    try:
        _serve(sock, memory, seats)
    except UserError as error:
        fatal = (isinstance(error, EnvFailure), str(error))
        send(sock, b"u", pickle.dumps(fatal), 0.0)
    except ConnectionError:
        pass  # the parent is gone
    for seat in seats:
        seat.close()


def _serve(sock: socket.socket, memory: int, seats: list[Seat]) -> None:
    hello = pickle.loads(receive(sock)[1])
    make_env = pickle.loads(hello["make_env"])
    for index, attempt in zip(hello["indices"], hello["attempts"], strict=True):
        seat = Seat(make_env, index, hello["failures"], hello["seed"], attempt)
        seats.append(seat)
        seat.open()
    gc.freeze()  # what is here now stays: no need to look through it again
    spaces = [(seat.obs_space, seat.act_space) for seat in seats]
    send(sock, b"r", pickle.dumps(spaces), 0.0)
    shared: Shared | None = None
    while True:
        kind, payload = receive(sock)
        if kind == b"q":
            return
        if kind == b"a":
            layout = Layout(*common_spaces(spaces), hello["count"])
            shared = layout.views(mmap.mmap(memory, layout.nbytes))
        elif kind == b"s":
            assert shared is not None
            errors = _advance(seats, shared)
            if errors:
                send(sock, b"e", pickle.dumps(errors), 0.0)
            else:
                send(sock, b"k", b"", 0.0)
        elif kind == b"g":
            states: list[StateDict] = [seat.state_dict() for seat in seats]
            send(sock, b"k", pickle.dumps(states), 0.0)
        elif kind == b"l":
            saved: list[StateDict] = pickle.loads(payload)
            exact = [s.load_state_dict(d) for s, d in zip(seats, saved, strict=True)]
            send(sock, b"k", pickle.dumps(exact), 0.0)


def _advance(seats: Sequence[Seat], shared: Shared) -> list[tuple[int, str]]:
    """Do what the parent wants of each environment and write its row."""
    side = int(shared.side[0])
    rows, before = shared.obs[side], shared.obs[1 - side]
    errors: list[tuple[int, str]] = []
    for seat in seats:
        index = seat.index
        command = shared.command[index]
        if command == STEP:
            action = {key: value[index].copy() for key, value in shared.action.items()}
            row = seat.step(action) or truncated_row(before, index)
            write_row(rows, index, row)
        elif command == RESET:
            write_row(rows, index, seat.reset())
        if failed := seat.take_errors():
            errors += [(index, error) for error in failed]
        if shared.attempt[index] != seat.attempt:
            shared.attempt[index] = seat.attempt
    return errors


def _die_with_parent(lifeline: int, with_thread: bool) -> None:
    """End this process, and what it started, as soon as the parent is gone."""
    if with_thread and sys.platform.startswith("linux"):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG: works on stopped processes too
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)

    def watch() -> None:
        os.read(lifeline, 1)  # returns when the parent's end is closed
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
