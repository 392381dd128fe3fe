"""`WorkerVecEnv`: the vectorized environment in worker processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import weakref

import numpy as np

from reverie.api import Action, Obs, StateDict, UserError
from reverie.envs.vector import base
from reverie.envs.vector.env_slot import (
    EnvFailure,
    MakeEnv,
    failure_message,
    warn,
    warn_of_restart,
)
from reverie.envs.vector.vec_env import VecEnvConfig
from reverie.envs.vector.workers import messages
from reverie.envs.vector.workers.handle import WorkerError, WorkerHandle
from reverie.envs.vector.workers.shared_memory import (
    IDLE,
    RESET,
    STEP,
    TRUNCATE,
    SharedArrays,
    create_shared_file,
    make_layout,
)
from reverie.spaces import Spaces


class WorkerVecEnv(base.BaseVecEnv):
    """Steps environments in worker processes, one or several per process."""

    def __init__(
        self,
        make_env: MakeEnv,
        count: int,
        config: VecEnvConfig,
        seed: int | None = None,
    ):
        super().__init__(count)
        self._config = config
        pickled_make_env = _pickle(make_env)
        self._memory = create_shared_file()
        workers = (os.cpu_count() or 1) if config.workers < 0 else config.workers
        workers = min(workers, count)
        options = {
            "seed": seed,
            "failures": config.failures,
            "count": count,
            "polls": messages.should_poll(workers),
        }
        indices_of_workers = np.array_split(np.arange(count), workers)
        self._workers = [
            WorkerHandle(
                [int(i) for i in indices], pickled_make_env, options, self._memory
            )
            for indices in indices_of_workers
        ]
        self._finalizer = weakref.finalize(self, _stop, self._workers, self._memory)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Start all workers, wait until they are ready, and map the shared memory."""
        for worker in self._workers:
            worker.start([0] * len(worker.indices))
        deadline = time.monotonic() + self._config.start_timeout
        spaces: list[tuple[Spaces, Spaces]] = []
        for worker in self._workers:
            try:
                spaces += worker.await_ready(deadline)
            except WorkerError as error:
                raise EnvFailure(
                    f"The worker of environments {worker.indices} did not start: "
                    f"{error.message}.\n  Fix: --env.vector.workers 0 shows the error; "
                    "--env.vector.start_timeout allows more time."
                ) from error
        self.obs_space, self.act_space = base.common_spaces(spaces)
        self.render_fps = self._workers[0].render_fps
        layout = make_layout(self.obs_space, self.act_space, len(self))
        os.ftruncate(self._memory, layout.itemsize)
        self._shared = SharedArrays(layout, self._memory)
        for worker in self._workers:
            worker.attach()
        # index of the buffer with the current rows; the other has the previous rows
        self._buffer = 0
        self._deadline = 0.0
        self._is_started = self._is_sent = self._has_failed = False
        self._has_episode = np.zeros(len(self), bool)
        """False for environments that their worker has not reset since it started."""

    def reset(self) -> Obs:
        assert not self._is_sent, "call recv first"
        self._send_commands(np.full(len(self), RESET, np.int8))
        self.waiting = np.zeros(len(self), bool)
        self._is_started = True
        return self._collect()

    def send(self, action: Action) -> None:
        assert self._is_started, "call reset first"
        assert not self._is_sent, "call recv before the next send"
        for key, shared in self._shared.action.items():
            shared[:] = action[key]
        is_last = self._shared.obs[self._buffer]["is_last"]
        self.waiting = base.find_waiting(is_last, self._config.lockstep)
        command = np.full(len(self), STEP, np.int8)
        if is_last.any() or not self._has_episode.all():
            command[is_last] = RESET
            command[self.waiting] = IDLE
            # the worker of these environments was restarted after the last step
            command[~(self._has_episode | is_last)] = TRUNCATE
        self._send_commands(command)
        self._is_sent = True

    def recv(self) -> Obs:
        assert self._is_sent, "call send first"
        self._is_sent = False
        return self._collect()

    def close(self) -> None:
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def state_dict(self) -> StateDict:
        """Return the states of all environments.

        The state is empty for environments of a failed worker, and for all of them
        after `EnvFailure`, so that they start new episodes.
        """
        assert self._is_started, "call reset first"
        assert not self._is_sent, "call recv before saving"
        slots: list[StateDict] = []
        for worker in self._workers:
            try:
                if self._has_failed or not worker.is_ready:
                    # handled below, where its states are replaced by empty ones
                    raise WorkerError("errors", "it is being restarted")
                worker.send(messages.GET_STATE, deadline=self._new_deadline())
                slots += pickle.loads(worker.receive(self._new_deadline())[1])
            except WorkerError as error:
                if worker.is_ready and not self._has_failed:
                    self._restart(worker, error)
                slots += [
                    {"attempt": int(attempt), "failures": 0, "env": None}
                    for attempt in self._shared.attempt[worker.rows]
                ]
        return self._make_state(slots, self._shared.obs[self._buffer])

    def load_state_dict(self, state: StateDict) -> Obs:
        """Restore a state and return its observations.

        Environments that cannot save their state start a new episode.
        """
        assert not self._is_sent, "call recv before loading"
        saved = self._saved_obs(state)
        command = np.full(len(self), RESET, np.int8)
        for worker in self._workers:
            states = [state["envs"][index] for index in worker.indices]
            try:
                self._await_ready(worker)
                payload = pickle.dumps(states)
                worker.send(messages.LOAD_STATE, payload, self._new_deadline())
                restored = pickle.loads(worker.receive(self._new_deadline())[1])
            except WorkerError as error:
                self._restart(worker, error)
                restored = [False] * len(states)
            command[worker.rows][np.array(restored)] = IDLE
        self._send_commands(command)
        obs = self._collect()
        for index in self._indices_of(IDLE):
            row = base.get_row(saved, index)
            base.write_row(self._shared.obs[self._buffer], index, row)
            base.write_row(obs, index, row)
        self._has_episode[:] = True
        self._is_started = True
        self._load_waiting(state, obs)
        return obs

    def _send_commands(self, command: np.ndarray) -> None:
        """Switch the buffers, and let the workers run the commands, one per env."""
        self._command = command
        self._shared.command[:] = command
        self._buffer = self._shared.buffer[0] = 1 - self._buffer
        self._deadline = self._new_deadline()
        for worker in self._workers:
            worker.is_busy = False
            if worker.is_ready and worker.has_work(command):
                worker.is_busy = True
                with contextlib.suppress(WorkerError):  # `_collect` handles it
                    worker.send(messages.RUN, deadline=self._deadline)

    def _collect(self) -> Obs:
        """Wait for all workers and return a copy of the observations."""
        try:
            # The worker that was messaged last usually finishes last. After waiting
            # for it, the others have finished already, so the process blocks once.
            for worker in reversed(self._workers):
                self._collect_from(worker)
        except UserError:
            self._has_failed = True
            raise
        previous = self._shared.obs[1 - self._buffer]
        rows = self._shared.obs[self._buffer]
        if self._command.min() < STEP:  # TRUNCATE or IDLE
            for index in self._indices_of(TRUNCATE):
                base.write_row(rows, index, base.truncated_row(previous, index))
            for index in self._indices_of(IDLE):
                base.write_row(rows, index, base.get_row(previous, index))
        return {key: array.copy() for key, array in rows.items()}

    def _collect_from(self, worker: WorkerHandle) -> None:
        """Wait until a worker has written its rows.

        If it fails, its running episodes are truncated and it is restarted. The main
        process waits for the restart only if one of its environments must be reset.
        """
        deadline = self._deadline
        while worker.is_busy or worker.has_work(self._command):
            try:
                if not worker.is_busy:
                    self._await_ready(worker)
                    deadline = self._new_deadline()
                    worker.send(messages.RUN, deadline=deadline)
                kind, payload = worker.receive(deadline)
                worker.is_busy = False
            except WorkerError as error:
                self._restart(worker, error)
                command = self._command[worker.rows]  # a view
                command[command == STEP] = TRUNCATE
                self._shared.command[worker.rows] = command
                continue
            errors = pickle.loads(payload) if kind == messages.ERRORS else []
            for index, message in errors:
                self._restarts["errors"] += 1
                warn_of_restart(index, message)
            self._has_episode[worker.rows] = True
            ended = self._shared.obs[self._buffer]["is_last"][worker.rows].any()
            worker.count_good_step(bool(ended) and not errors)
            return

    def _await_ready(self, worker: WorkerHandle) -> None:
        """Wait for the end of a restart, if the worker is being restarted."""
        if not worker.is_ready:
            worker.await_ready(worker.started_at + self._config.start_timeout)
            worker.attach()

    def _restart(self, worker: WorkerHandle, error: WorkerError) -> None:
        """Kill a failed worker and start it again, without waiting for it.

        Raises `EnvFailure` if it failed too often.
        """
        worker.kill()
        worker.failures += 1
        self._restarts[error.cause] += 1
        self._has_episode[worker.rows] = False
        if worker.failures >= self._config.failures:
            self._has_failed = True
            raise EnvFailure(
                failure_message(worker.indices[0], worker.failures, error.message)
            )
        warn(
            f"The worker of environments {worker.indices} was restarted; their "
            f"episodes count as truncated. Error: {error.message}"
        )
        self._shared.attempt[worker.rows] += 1
        worker.start(self._shared.attempt[worker.rows].tolist())

    def _indices_of(self, command: int) -> list[int]:
        return [int(index) for index in np.flatnonzero(self._command == command)]

    def _new_deadline(self) -> float:
        return time.monotonic() + self._config.timeout


def _stop(workers: list[WorkerHandle], memory: int) -> None:
    """Give all workers two seconds to exit, kill the others, and free the memory."""
    deadline = time.monotonic() + 2.0
    for worker in workers:
        worker.request_exit(deadline)
    for worker in workers:
        worker.finish(deadline)
    os.close(memory)


def _pickle(make_env: MakeEnv) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(make_env))
    except Exception as error:
        raise UserError(
            f"The environment cannot be sent to a worker process: {error}\n"
            "  Fix: pass a function that builds it, or set --env.vector.workers 0."
        ) from error
