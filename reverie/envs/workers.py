"""A pool whose environments live in worker processes.

Rows and actions travel through one anonymous piece of shared memory that every worker
maps; a socket per worker carries one short message each way per step. Observations are
double-buffered: while a worker writes the next row, the previous one stays whole, so a
worker that dies halfway can still have its episode closed with it.

The parent tells each environment what to do (`step`, `reset`, nothing) and is the only
one who remembers. A worker that dies, or does not answer in time, is killed with
everything it started, and begun anew while the others go on. Workers are started as
plain Python processes, not forked: nothing of the learner (threads, CUDA, torch) gets
into them, and a script needs no `if __name__ == "__main__"` for them. They die with the
parent, whatever kills it, and the memory has no name that could be left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from reverie.api import Action, Metrics, Obs, Spaces, StateDict, UserError
from reverie.envs.pool import (
    HEALTHY_STEPS,
    EnvFailure,
    MakeEnv,
    PoolConfig,
    Seat,
    common_spaces,
    failure_message,
    pool_metrics,
    pool_state,
    row_of,
    saved_rows,
    saved_waiting,
    truncated_row,
    waits,
    warn_of_error,
    write_row,
)

log = logging.getLogger("reverie.envs")

IDLE, STEP, RESET, CLOSE_EPISODE = range(4)
GRACE = 0.1
"""Seconds a worker that is late already gets when its answer is looked for."""

# Runs in the new process. The path comes along, so that a package that is importable
# here is importable there.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from reverie.envs.workers import work; work(*map(int, sys.argv[2:]))"
)


class WorkerPool:
    """Environments in processes of their own, several to a process if need be."""

    def __init__(
        self,
        make_env: MakeEnv,
        count: int,
        config: PoolConfig,
        seed: int | None = None,
    ):
        self._config = config
        self._count = count
        self._events: Counter[str] = Counter()
        parcel = _pickled(make_env)
        self._memory = _shared_file()
        recipe = {"seed": seed, "failures": config.failures, "count": count}
        shares = np.array_split(np.arange(count), _worker_count(config.workers, count))
        self._workers = [
            _Worker([int(i) for i in share], parcel, recipe, self._memory)
            for share in shares
        ]
        self._finalizer = weakref.finalize(self, _stop, self._workers, self._memory)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        for worker in self._workers:
            worker.start([0] * len(worker.indices))
        limit = time.monotonic() + self._config.start_timeout
        spaces: list[tuple[Spaces, Spaces]] = []
        for worker in self._workers:
            try:
                spaces += worker.await_ready(limit)
            except _Lost as lost:
                raise EnvFailure(
                    f"A worker for environments {worker.indices} did not start: "
                    f"{lost.why}.\n  Fix: --env.pool.workers 0 shows what goes wrong; "
                    "--env.pool.start_timeout gives it more time."
                ) from lost
        self.obs_space, self.act_space = common_spaces(spaces)
        layout = Layout(self.obs_space, self.act_space, self._count)
        os.ftruncate(self._memory, layout.nbytes)
        self._shared = layout.views(mmap.mmap(self._memory, layout.nbytes))
        for worker in self._workers:
            worker.attach()
        self._side = 0
        self._deadline = 0.0
        self._started = self._sent = self._broken = False
        self.waiting = np.zeros(self._count, bool)
        self._running = np.zeros(self._count, bool)
        """Which environments have an episode that a worker can continue."""

    def __len__(self) -> int:
        return self._count

    def reset(self) -> Obs:
        assert not self._sent, "call recv first"
        self._issue(np.full(self._count, RESET, np.int8))
        self.waiting = np.zeros(self._count, bool)
        self._started = True
        return self._collect()

    def step(self, action: Action) -> Obs:
        self.send(action)
        return self.recv()

    def send(self, action: Action) -> None:
        """Begin a step; the workers take it while the caller does something else."""
        assert self._started, "call reset first"
        assert not self._sent, "call recv before the next send"
        for key, shared in self._shared.action.items():
            shared[:] = action[key]
        is_last = self._shared.obs[self._side]["is_last"]
        self.waiting = waits(is_last, self._config.lockstep)
        going = np.where(self._running, STEP, CLOSE_EPISODE)
        ended = np.where(self.waiting, IDLE, RESET)
        self._issue(np.where(is_last, ended, going).astype(np.int8))
        self._sent = True

    def recv(self) -> Obs:
        assert self._sent, "call send first"
        self._sent = False
        return self._collect()

    def close(self) -> None:
        self._finalizer()

    def metrics(self) -> Metrics:
        return pool_metrics(self._events)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def state_dict(self) -> StateDict:
        """Where every environment stands; after `EnvFailure` only that it must begin
        anew."""
        assert self._started, "call reset first"
        assert not self._sent, "call recv before saving"
        seats: list[StateDict] = []
        for worker in self._workers:
            try:
                if self._broken or not worker.is_ready:
                    raise _Lost("errors", "it is being restarted")
                worker.tell(b"g", deadline=self._soon())
                seats += pickle.loads(worker.hear(self._soon())[1])
            except _Lost as lost:
                if worker.is_ready and not self._broken:
                    self._lose(worker, lost)
                seats += [self._nothing(index) for index in worker.indices]
        obs = self._shared.obs[self._side]
        return pool_state(seats, obs, self.obs_space, self.waiting)

    def load_state_dict(self, state: StateDict) -> Obs:
        """Continue where the state was saved; returns the rows to go on from.

        Environments without state of their own begin a new episode.
        """
        assert not self._sent, "call recv before loading"
        saved = saved_rows(state, self.obs_space, self._count)
        command = np.full(self._count, RESET, np.int8)
        for worker in self._workers:
            states = [state["envs"][index] for index in worker.indices]
            try:
                self._await_ready(worker)
                worker.tell(b"l", pickle.dumps(states), self._soon())
                exact = pickle.loads(worker.hear(self._soon())[1])
            except _Lost as lost:
                self._lose(worker, lost)
                exact = [False] * len(states)
            command[[i for i, e in zip(worker.indices, exact, strict=True) if e]] = IDLE
        self._issue(command)
        obs = self._collect()
        for index in self._where(IDLE):
            write_row(self._shared.obs[self._side], index, row_of(saved, index))
            write_row(obs, index, row_of(saved, index))
        self._running[:] = True
        self._started = True
        self.waiting = saved_waiting(state, obs)
        return obs

    def _issue(self, command: np.ndarray) -> None:
        self._command = command
        self._shared.command[:] = command
        self._side = 1 - self._side
        self._deadline = self._soon()
        for worker in self._workers:
            worker.is_busy = False
            if worker.is_ready and worker.has_work(command):
                worker.is_busy = True  # if it is dead, `_collect` finds out
                with contextlib.suppress(_Lost):
                    worker.tell(b"s", bytes([self._side]), self._deadline)

    def _collect(self) -> Obs:
        try:
            for worker in self._workers:
                self._collect_from(worker)
        except UserError:
            self._broken = True
            raise
        before, rows = self._shared.obs[1 - self._side], self._shared.obs[self._side]
        for index in self._where(CLOSE_EPISODE):
            write_row(rows, index, truncated_row(before, index))
        for index in self._where(IDLE):
            write_row(rows, index, row_of(before, index))
        return {key: array.copy() for key, array in rows.items()}

    def _collect_from(self, worker: _Worker) -> None:
        """Wait for a worker's rows; where it fails, restart it until they are there.

        Its running episodes are closed; only first rows are worth waiting for.
        """
        deadline = self._deadline
        while worker.has_work(self._command):
            try:
                if not worker.is_busy:
                    self._await_ready(worker)
                    deadline = self._soon()
                    worker.tell(b"s", bytes([self._side]), deadline)
                kind, payload = worker.hear(deadline)
                worker.is_busy = False
            except _Lost as lost:
                self._lose(worker, lost)
                mine = self._command[worker.indices]
                mine[mine == STEP] = CLOSE_EPISODE
                self._command[worker.indices] = mine
                self._shared.command[worker.indices] = mine
                continue
            errors = pickle.loads(payload) if kind == b"e" else []
            for index, error in errors:
                self._events["errors"] += 1
                warn_of_error(index, error)
            self._running[worker.indices] = True
            ended = self._shared.obs[self._side]["is_last"][worker.indices].any()
            worker.forgive(bool(ended) and not errors)
            return

    def _await_ready(self, worker: _Worker) -> None:
        if not worker.is_ready:
            limit = worker.started_at + self._config.start_timeout
            worker.await_ready(limit)
            worker.attach()

    def _lose(self, worker: _Worker, lost: _Lost) -> None:
        """Count and tell a failed worker, and start it again without waiting for it."""
        worker.kill()
        worker.failures += 1
        self._events[lost.cause] += 1
        self._running[worker.indices] = False
        if worker.failures >= self._config.failures:
            self._broken = True
            raise EnvFailure(
                failure_message(worker.indices[0], worker.failures, lost.why)
            )
        log.warning(
            "The worker of environments %s was restarted, their episodes count as "
            "truncated: %s",
            worker.indices,
            lost.why,
        )
        self._shared.attempt[worker.indices] += 1
        worker.start(self._shared.attempt[worker.indices].tolist())

    def _where(self, command: int) -> list[int]:
        return [int(index) for index in np.flatnonzero(self._command == command)]

    def _nothing(self, index: int) -> StateDict:
        return {
            "attempt": int(self._shared.attempt[index]),
            "failures": 0,
            "env": None,
        }

    def _soon(self) -> float:
        return time.monotonic() + self._config.timeout


class _Lost(Exception):
    """A worker died, hangs, or cannot build its environments."""

    def __init__(self, cause: str, why: str):
        super().__init__(why)
        self.cause, self.why = cause, why


class _Worker:
    """The parent's side of one worker process."""

    def __init__(
        self, indices: list[int], make_env: bytes, recipe: dict[str, Any], memory: int
    ):
        self.indices = indices
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
        with contextlib.suppress(_Lost):  # `await_ready` finds out
            self.tell(b"h", pickle.dumps(hello), self.started_at + 60)

    def await_ready(self, deadline: float) -> list[tuple[Spaces, Spaces]]:
        """Wait until its environments are built; returns their spaces."""
        try:
            _, payload = self.hear(deadline)
        except EnvFailure as failure:
            if self._starts == 1:
                raise
            raise _Lost("errors", str(failure)) from failure
        spaces: list[tuple[Spaces, Spaces]] = pickle.loads(payload)
        return spaces

    def attach(self) -> None:
        """Let it map the shared memory."""
        self.tell(b"a", b"", time.monotonic() + 60)
        self.is_ready = True

    def has_work(self, command: np.ndarray) -> bool:
        mine = command[self.indices]
        return bool(((mine == STEP) | (mine == RESET)).any())

    def tell(self, kind: bytes, payload: bytes = b"", deadline: float = 0.0) -> None:
        assert self._socket is not None
        try:
            _send(self._socket, kind, payload, deadline)
        except TimeoutError as error:
            raise _Lost("timeouts", "it does not read its messages") from error
        except OSError as error:
            raise _Lost("crashes", self._how_it_ended()) from error

    def hear(self, deadline: float) -> tuple[bytes, bytes]:
        """Its next message; errors the user can mend are raised here."""
        assert self._socket is not None
        try:
            kind, payload = _receive(self._socket, deadline)
        except TimeoutError as error:
            raise _Lost("timeouts", "it did not answer in time") from error
        except OSError as error:
            raise _Lost("crashes", self._how_it_ended()) from error
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
            with contextlib.suppress(_Lost):
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


def _stop(workers: list[_Worker], memory: int) -> None:
    deadline = time.monotonic() + 2.0
    for worker in workers:
        worker.ask_to_quit(deadline)
    for worker in workers:
        worker.finish(deadline)
    os.close(memory)


def _worker_count(workers: int, count: int) -> int:
    if workers < 0:
        workers = os.cpu_count() or 1
    return min(workers, count)


def _pickled(make_env: MakeEnv) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(make_env))
    except Exception as error:
        raise UserError(
            f"The environment cannot be sent to a worker process: {error}\n"
            "  Fix: pass a function that builds it, or set --env.pool.workers 0."
        ) from error


def _shared_file() -> int:
    """A file without a name, so that nothing is left behind however we end."""
    if sys.platform == "win32":
        raise UserError(
            "Worker processes need Linux or macOS.\n  Fix: set --env.pool.workers 0."
        )
    if hasattr(os, "memfd_create"):
        return os.memfd_create("reverie", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


Entry = tuple[str, np.dtype, tuple[int, ...]]


def _entries(spaces: Spaces, count: int) -> list[Entry]:
    return [(k, s.dtype, (count, *s.shape)) for k, s in sorted(spaces.items())]


class Layout:
    """Where everything lies in the shared memory; the same on both sides."""

    def __init__(self, obs_space: Spaces, act_space: Spaces, count: int):
        obs = _entries(obs_space, count)
        act = _entries(act_space, count)
        int8, int64 = np.dtype(np.int8), np.dtype(np.int64)
        own: list[Entry] = [("command", int8, (count,)), ("attempt", int64, (count,))]
        self._parts = {"obs0": obs, "obs1": obs, "action": act, "own": own}
        self._offsets: dict[tuple[str, str], int] = {}
        self.nbytes = 0
        for part, entries in self._parts.items():
            for key, dtype, shape in entries:
                self._offsets[part, key] = self.nbytes
                size = int(np.prod(shape)) * dtype.itemsize
                self.nbytes += -(-size // 64) * 64  # a cache line each, at least

    def views(self, memory: mmap.mmap) -> Shared:
        arrays = {
            part: {
                key: np.ndarray(shape, dtype, memory, self._offsets[part, key])
                for key, dtype, shape in entries
            }
            for part, entries in self._parts.items()
        }
        return Shared(arrays)


class Shared:
    """The shared memory as arrays."""

    def __init__(self, arrays: dict[str, dict[str, np.ndarray]]):
        self.obs = (arrays["obs0"], arrays["obs1"])
        self.action = arrays["action"]
        self.command = arrays["own"]["command"]
        self.attempt = arrays["own"]["attempt"]


def _send(sock: socket.socket, kind: bytes, payload: bytes, deadline: float) -> None:
    sock.settimeout(max(deadline - time.monotonic(), GRACE) if deadline else None)
    sock.sendall(struct.pack("!cI", kind, len(payload)) + payload)


def _receive(sock: socket.socket, deadline: float = 0.0) -> tuple[bytes, bytes]:
    sock.settimeout(max(deadline - time.monotonic(), GRACE) if deadline else None)
    kind, size = struct.unpack("!cI", _receive_exactly(sock, 5))
    return kind, _receive_exactly(sock, size) if size else b""


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size)
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


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
        _send(sock, b"u", pickle.dumps(fatal), 0.0)
    except ConnectionError:
        pass  # the parent is gone
    for seat in seats:
        seat.close()


def _serve(sock: socket.socket, memory: int, seats: list[Seat]) -> None:
    hello = pickle.loads(_receive(sock)[1])
    make_env = pickle.loads(hello["make_env"])
    for index, attempt in zip(hello["indices"], hello["attempts"], strict=True):
        seat = Seat(make_env, index, hello["failures"], hello["seed"], attempt)
        seats.append(seat)
        seat.open()
    spaces = [(seat.obs_space, seat.act_space) for seat in seats]
    _send(sock, b"r", pickle.dumps(spaces), 0.0)
    shared: Shared | None = None
    while True:
        kind, payload = _receive(sock)
        if kind == b"q":
            return
        if kind == b"a":
            layout = Layout(*common_spaces(spaces), hello["count"])
            shared = layout.views(mmap.mmap(memory, layout.nbytes))
        elif kind == b"s":
            assert shared is not None
            errors = _advance(seats, shared, payload[0])
            if errors:
                _send(sock, b"e", pickle.dumps(errors), 0.0)
            else:
                _send(sock, b"k", b"", 0.0)
        elif kind == b"g":
            states: list[StateDict] = [seat.state_dict() for seat in seats]
            _send(sock, b"k", pickle.dumps(states), 0.0)
        elif kind == b"l":
            saved: list[StateDict] = pickle.loads(payload)
            exact = [s.load_state_dict(d) for s, d in zip(seats, saved, strict=True)]
            _send(sock, b"k", pickle.dumps(exact), 0.0)


def _advance(seats: Sequence[Seat], shared: Shared, side: int) -> list[tuple[int, str]]:
    """Do what the parent wants of each environment and write its row."""
    rows, before = shared.obs[side], shared.obs[1 - side]
    errors: list[tuple[int, str]] = []
    for seat in seats:
        index = seat.index
        if shared.command[index] == RESET:
            write_row(rows, index, seat.reset())
        elif shared.command[index] == STEP:
            action = {key: value[index].copy() for key, value in shared.action.items()}
            row = seat.step(action) or truncated_row(before, index)
            write_row(rows, index, row)
        errors += [(index, error) for error in seat.take_errors()]
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
