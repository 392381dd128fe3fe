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
from reverie.envs.vector.batch import common_spaces, truncated_row, write_row
from reverie.envs.vector.env_slot import EnvFailure, EnvSlot
from reverie.envs.vector.workers.messages import receive, send
from reverie.envs.vector.workers.shared_memory import RESET, STEP, Layout, Shared


def work(connection: int, lifeline: int, memory: int, with_thread: int) -> None:
    """The life of a worker process; the numbers are file descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(lifeline, bool(with_thread))
    sock = socket.socket(fileno=connection)
    slots: list[EnvSlot] = []
    try:
        _serve(sock, memory, slots)
    except UserError as error:
        fatal = (isinstance(error, EnvFailure), str(error))
        send(sock, b"u", pickle.dumps(fatal), 0.0)
    except ConnectionError:
        pass  # the parent is gone
    for slot in slots:
        slot.close()


def _serve(sock: socket.socket, memory: int, slots: list[EnvSlot]) -> None:
    hello = pickle.loads(receive(sock)[1])
    make_env = pickle.loads(hello["make_env"])
    for index, attempt in zip(hello["indices"], hello["attempts"], strict=True):
        slot = EnvSlot(make_env, index, hello["failures"], hello["seed"], attempt)
        slots.append(slot)
        slot.open()
    gc.freeze()  # what is here now stays: no need to look through it again
    spaces = [(slot.obs_space, slot.act_space) for slot in slots]
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
            errors = _advance(slots, shared)
            if errors:
                send(sock, b"e", pickle.dumps(errors), 0.0)
            else:
                send(sock, b"k", b"", 0.0)
        elif kind == b"g":
            states: list[StateDict] = [slot.state_dict() for slot in slots]
            send(sock, b"k", pickle.dumps(states), 0.0)
        elif kind == b"l":
            saved: list[StateDict] = pickle.loads(payload)
            exact = [s.load_state_dict(d) for s, d in zip(slots, saved, strict=True)]
            send(sock, b"k", pickle.dumps(exact), 0.0)


def _advance(slots: Sequence[EnvSlot], shared: Shared) -> list[tuple[int, str]]:
    """Do what the parent wants of each environment and write its row."""
    side = int(shared.side[0])
    rows, before = shared.obs[side], shared.obs[1 - side]
    errors: list[tuple[int, str]] = []
    for slot in slots:
        index = slot.index
        command = shared.command[index]
        if command == STEP:
            action = {key: value[index].copy() for key, value in shared.action.items()}
            row = slot.step(action) or truncated_row(before, index)
            write_row(rows, index, row)
        elif command == RESET:
            write_row(rows, index, slot.reset())
        if failed := slot.take_errors():
            errors += [(index, error) for error in failed]
        if shared.attempt[index] != slot.attempt:
            shared.attempt[index] = slot.attempt
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
