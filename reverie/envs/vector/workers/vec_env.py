"""The pool whose environments step in worker processes."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import time
import weakref
from collections import Counter

import numpy as np

from reverie.api import Action, Metrics, Obs, StateDict, UserError
from reverie.envs.vector.batch import (
    common_spaces,
    restart_metrics,
    row_of,
    saved_rows,
    saved_waiting,
    truncated_row,
    vec_env_state,
    waits,
    write_row,
)
from reverie.envs.vector.env_slot import (
    EnvFailure,
    MakeEnv,
    failure_message,
    warn_of_error,
)
from reverie.envs.vector.vec_env import VecEnvConfig
from reverie.envs.vector.workers.handle import Lost, Worker
from reverie.envs.vector.workers.shared_memory import (
    CLOSE_EPISODE,
    IDLE,
    RESET,
    STEP,
    Layout,
    shared_file,
)
from reverie.spaces import Spaces

log = logging.getLogger("reverie.envs")


class WorkerVecEnv:
    """Environments in processes of their own, several to a process if need be."""

    def __init__(
        self,
        make_env: MakeEnv,
        count: int,
        config: VecEnvConfig,
        seed: int | None = None,
    ):
        self._config = config
        self._count = count
        self._events: Counter[str] = Counter()
        parcel = _pickled(make_env)
        self._memory = shared_file()
        recipe = {"seed": seed, "failures": config.failures, "count": count}
        shares = np.array_split(np.arange(count), _worker_count(config.workers, count))
        self._workers = [
            Worker([int(i) for i in share], parcel, recipe, self._memory)
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
            except Lost as lost:
                raise EnvFailure(
                    f"A worker for environments {worker.indices} did not start: "
                    f"{lost.why}.\n  Fix: --env.vector.workers 0 shows the error; "
                    "--env.vector.start_timeout gives it more time."
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
        command = np.full(self._count, STEP, np.int8)
        if is_last.any() or not self._running.all():
            command[is_last] = RESET
            command[self.waiting] = IDLE
            command[~(self._running | is_last)] = CLOSE_EPISODE
        self._issue(command)
        self._sent = True

    def recv(self) -> Obs:
        assert self._sent, "call send first"
        self._sent = False
        return self._collect()

    def close(self) -> None:
        self._finalizer()

    def metrics(self) -> Metrics:
        return restart_metrics(self._events)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def state_dict(self) -> StateDict:
        """Where every environment stands; after `EnvFailure` only that it must begin
        anew."""
        assert self._started, "call reset first"
        assert not self._sent, "call recv before saving"
        slots: list[StateDict] = []
        for worker in self._workers:
            try:
                if self._broken or not worker.is_ready:
                    raise Lost("errors", "it is being restarted")
                worker.tell(b"g", deadline=self._soon())
                slots += pickle.loads(worker.hear(self._soon())[1])
            except Lost as lost:
                if worker.is_ready and not self._broken:
                    self._lose(worker, lost)
                slots += [self._nothing(index) for index in worker.indices]
        obs = self._shared.obs[self._side]
        return vec_env_state(slots, obs, self.obs_space, self.waiting)

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
            except Lost as lost:
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
        self._side = self._shared.side[0] = 1 - self._side
        self._deadline = self._soon()
        for worker in self._workers:
            worker.is_busy = False
            if worker.is_ready and worker.has_work(command):
                worker.is_busy = True  # if it is dead, `_collect` finds out
                with contextlib.suppress(Lost):
                    worker.tell(b"s", deadline=self._deadline)

    def _collect(self) -> Obs:
        try:
            # The last one told is mostly the last to finish: whoever waits for it
            # first is woken once, and finds the others ready.
            for worker in reversed(self._workers):
                self._collect_from(worker)
        except UserError:
            self._broken = True
            raise
        before, rows = self._shared.obs[1 - self._side], self._shared.obs[self._side]
        if self._command.min() < STEP:
            for index in self._where(CLOSE_EPISODE):
                write_row(rows, index, truncated_row(before, index))
            for index in self._where(IDLE):
                write_row(rows, index, row_of(before, index))
        return {key: array.copy() for key, array in rows.items()}

    def _collect_from(self, worker: Worker) -> None:
        """Wait for a worker's rows; where it fails, restart it until they are there.

        Its running episodes are closed; only first rows are worth waiting for.
        """
        deadline = self._deadline
        while worker.is_busy or worker.has_work(self._command):
            try:
                if not worker.is_busy:
                    self._await_ready(worker)
                    deadline = self._soon()
                    worker.tell(b"s", deadline=deadline)
                kind, payload = worker.hear(deadline)
                worker.is_busy = False
            except Lost as lost:
                self._lose(worker, lost)
                mine = self._command[worker.share]
                mine[mine == STEP] = CLOSE_EPISODE
                self._shared.command[worker.share] = mine
                continue
            errors = pickle.loads(payload) if kind == b"e" else []
            for index, error in errors:
                self._events["errors"] += 1
                warn_of_error(index, error)
            self._running[worker.share] = True
            ended = self._shared.obs[self._side]["is_last"][worker.share].any()
            worker.forgive(bool(ended) and not errors)
            return

    def _await_ready(self, worker: Worker) -> None:
        if not worker.is_ready:
            limit = worker.started_at + self._config.start_timeout
            worker.await_ready(limit)
            worker.attach()

    def _lose(self, worker: Worker, lost: Lost) -> None:
        """Count and tell a failed worker, and start it again without waiting for it."""
        worker.kill()
        worker.failures += 1
        self._events[lost.cause] += 1
        self._running[worker.share] = False
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
        self._shared.attempt[worker.share] += 1
        worker.start(self._shared.attempt[worker.share].tolist())

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


def _stop(workers: list[Worker], memory: int) -> None:
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
            "  Fix: pass a function that builds it, or set --env.vector.workers 0."
        ) from error
