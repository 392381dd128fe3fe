"""`ActorPool`: starts, restarts and calls the actors of a run, for the learner.

An actor sends the steps of its environments in numbered chunks (`chunks.py`). It is
lost if its process or machine ends, if it does not answer in time, or if a chunk is
missing. It is then started again, on any machine of the cluster that has free cores,
with a delay that doubles with every failure in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from reverie.api import StateDict, UserError
from reverie.envs.vector.base import common_spaces
from reverie.run.actors.chunks import (
    ActorInfo,
    ActorSpec,
    Chunk,
    ChunkRequest,
    ChunkSequence,
    Failure,
    MissingChunkError,
)
from reverie.run.actors.config import ActorsConfig

FIRST_DELAY, MAX_DELAY = 1.0, 30.0
"""Seconds before an actor is restarted: after the first failure, and the maximum."""
POLL_SECONDS = 0.2
"""Maximum time between two checks for signals and for actors to restart."""

MakeSpec = Callable[[int, int, int], ActorSpec]
"""Returns the spec of an actor from its index, incarnation and `times_lost`."""


class CallResult(NamedTuple):
    """The result of a call of an actor's method."""

    actor: int
    incarnation: int
    method: str
    value: Any
    """Return value of the method, or `CallFailed`."""


class CallFailed(NamedTuple):
    """A call has no result: the process or machine of the actor has ended."""

    reason: str


class Transport(Protocol):
    """Starts the processes of actors and calls their methods."""

    def start(self, spec: ActorSpec) -> None:
        """Start an actor, or replace one of the same index; returns before it runs."""

    def call(self, actor: int, method: str, *arguments: Any) -> None:
        """Call a method; `poll` returns its result. Calls run one after another."""

    def share(self, value: Any) -> Any:
        """Store an argument of several calls once; return a reference to pass."""

    def poll(self, seconds: float) -> list[CallResult]:
        """Return the results that have arrived; wait up to `seconds` for the first."""

    def stop(self, actor: int) -> None:
        """End the process of an actor, if it runs."""

    def close(self) -> None:
        """End all actors."""


@dataclass
class ActorRecord:
    """The state of one actor."""

    index: int
    sequence: ChunkSequence
    phase: Literal["starting", "ready", "resetting", "running", "backoff"] = "starting"
    """`starting`: builds its environments; `ready`: has built them; `resetting`: starts
    episodes; `running`: can collect; `backoff`: waits for its restart."""
    incarnation: int = 0
    """Number of restarts since this process of the learner started."""
    times_lost: int = 0
    """How many times it was lost in the whole run."""
    failures: int = 0
    """How many times in a row it was lost, without a chunk in between."""
    retry_time: float = 0.0
    """When it is restarted, in `backoff`."""
    waiting_since: float = 0.0
    """When the learner began to wait for its next result."""
    pending_calls: int = 0
    """Calls without a result."""
    requested: dict[int, int] = field(default_factory=dict)
    """Steps of the requested chunks that have not arrived, by number."""
    next_request: int = 0
    """Number of the next chunk to request."""
    version: tuple[int, int] | None = None
    """Version of the weights that were last sent to it: the numbers of updates and of
    completed epochs of the agent."""
    state_to_restore: StateDict | None = None
    """Saved state from which `reset_envs` continues."""


class ActorLost(NamedTuple):
    """An actor was lost; no further rows of its episodes will arrive."""

    actor: int


class ActorPool:
    """Starts and restarts actors, requests chunks and returns them in order.

    It has the spaces, `render_fps` and `len` of an `api.VecEnv`.
    """

    def __init__(
        self,
        config: ActorsConfig,
        transport: Transport,
        make_spec: MakeSpec,
        print_message: Callable[[str], None],
        check_stop: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ):
        self.config, self.transport, self._make_spec = config, transport, make_spec
        self._print, self._check_stop, self._now = print_message, check_stop, now
        self.records = [
            ActorRecord(index, ChunkSequence(0, config.envs))
            for index in range(config.count)
        ]
        self.counts = dict.fromkeys(("restarts", "lost_chunks", "duplicates"), 0)
        self._states: dict[int, StateDict | None] = {}  # received by `states`
        self._is_collecting = False  # True after `reset_envs`
        self._info: ActorInfo | None = None
        self._data_time = self._poll_time = now()
        """Times of the last chunk and of the last `_poll`, for `actors.timeout`."""
        self._deferred_results: list[Chunk | ActorLost] = []
        """Arrived while `states` waited; returned by the next `poll`."""

    # Environments

    def __len__(self) -> int:
        return self.config.num_envs

    @property
    def info(self) -> ActorInfo:
        """Machine and spaces of the first actor that is ready; waits for it."""
        while self._info is None:
            self._check_stop()
            self._poll(POLL_SECONDS)
        return self._info

    @property
    def obs_space(self) -> Any:
        return self.info.obs_space

    @property
    def act_space(self) -> Any:
        return self.info.act_space

    @property
    def render_fps(self) -> float:
        return self.info.render_fps

    # Starting

    def start_processes(self) -> None:
        """Start the processes of all actors, which build their environments."""
        for record in self.records:
            self._start_process(record)

    def reset_envs(self, states: list[StateDict | None] | None = None) -> None:
        """Let the actors start episodes, or continue from saved states."""
        self._is_collecting, self._data_time = True, self._now()
        for record, state in zip(
            self.records, states or [None] * len(self.records), strict=True
        ):
            record.state_to_restore = state
            if record.phase == "ready":
                self._reset_envs(record)

    def close(self) -> None:
        self.transport.close()

    # Collecting

    def request(
        self,
        record: ActorRecord,
        steps: int,
        first_step: int,
        version: tuple[int, int],
        weights: Any,
    ) -> None:
        """Let an actor collect one chunk of at most `steps` steps per environment.

        `first_step` is the number of agent steps of the run before the chunk. `weights`
        is a reference that `Transport.share` returned. It is sent only if the
        actor has another version of the weights.
        """
        request = ChunkRequest(record.next_request, steps, first_step)
        record.requested[record.next_request] = steps
        record.next_request += 1
        is_new = record.version != version
        record.version = version
        self._call(record, "collect", request, weights if is_new else None)

    def poll(self, seconds: float) -> list[Chunk | ActorLost]:
        """Return new chunks, in order for each actor, and actors that were lost.

        Restarts actors that are due. Errors of environments are part of their chunk;
        other errors are raised.
        """
        deferred, self._deferred_results = self._deferred_results, []
        return deferred + self._poll(0 if deferred else seconds)

    def _poll(self, seconds: float) -> list[Chunk | ActorLost]:
        """Handle the results that arrive within `seconds`; as in `poll`."""
        # time in which the learner did not poll does not count towards the timeout
        begin = self._now()
        self._data_time += max(0.0, begin - self._poll_time - POLL_SECONDS)
        results: list[Chunk | ActorLost] = []
        for result in self.transport.poll(seconds):
            record = self.records[result.actor]
            if result.incarnation != record.incarnation or record.phase == "backoff":
                continue  # the result of an earlier process of the actor
            record.pending_calls -= 1
            record.waiting_since = self._now()
            if isinstance(result.value, CallFailed):
                results.append(self._schedule_restart(record, result.value.reason))
            else:
                results += self._handle(record, result.method, result.value)
        results += self._restart_and_check()
        self._poll_time = self._now()
        return results

    def states(self) -> list[StateDict | None]:
        """Return the state of every actor that runs, and None for the others.

        All requested chunks must have arrived.
        """
        assert not any(record.requested for record in self.records)
        running = [record for record in self.records if record.phase == "running"]
        self._states = {}
        for record in running:
            self._call(record, "state_dict")
        while any(
            r.phase == "running" and r.index not in self._states for r in running
        ):
            self._deferred_results += self._poll(POLL_SECONDS)
        return [self._states.get(record.index) for record in self.records]

    @property
    def running(self) -> list[ActorRecord]:
        """Actors that can collect."""
        return [record for record in self.records if record.phase == "running"]

    def _start_process(self, record: ActorRecord) -> None:
        """Start or restart the process of an actor, and let it build environments."""
        record.phase, record.version, record.next_request = "starting", None, 0
        record.pending_calls, record.requested = 0, {}
        record.sequence = ChunkSequence(record.incarnation, self.config.envs)
        spec = self._make_spec(record.index, record.incarnation, record.times_lost)
        self.transport.start(spec)
        self._call(record, "open")

    def _reset_envs(self, record: ActorRecord) -> None:
        """Let an actor start episodes, or continue from its saved state."""
        record.phase = "resetting"
        state, record.state_to_restore = record.state_to_restore, None
        self._call(record, "reset", state)

    def _call(self, record: ActorRecord, method: str, *arguments: Any) -> None:
        """Call a method of an actor; `_handle` gets the result."""
        if not record.pending_calls:
            record.waiting_since = self._now()
        record.pending_calls += 1
        self.transport.call(record.index, method, *arguments)

    def _handle(
        self, record: ActorRecord, method: str, result: Any
    ) -> list[Chunk | ActorLost]:
        """Handle the result of a call; return its chunks."""
        if isinstance(result, Failure):
            raise_failure(result, record.index)
        if method == "open":
            self._check_spaces(record, result)
            record.phase = "ready"
            if self._is_collecting:
                self._reset_envs(record)
        elif method == "reset":
            record.phase = "running"
        elif method == "state_dict":
            self._states[record.index] = result
        elif method == "collect":
            return self._receive(record, result)
        return []

    def _receive(self, record: ActorRecord, chunk: Chunk) -> list[Chunk | ActorLost]:
        """Return the chunks that are next in order.

        If a chunk is missing, the actor is restarted.
        """
        duplicates = record.sequence.duplicates
        try:
            chunks = record.sequence.add(chunk)
        except MissingChunkError as error:
            return [self._schedule_restart(record, f"a chunk is missing: {error}")]
        self.counts["duplicates"] += record.sequence.duplicates - duplicates
        record.requested.pop(chunk.number, None)
        record.failures = 0
        self._data_time = self._now()
        if not record.requested and record.sequence.next_number != record.next_request:
            return [*chunks, self._schedule_restart(record, "a chunk is missing")]
        return list(chunks)

    def _check_spaces(self, record: ActorRecord, info: ActorInfo) -> None:
        """Raise if an actor has other spaces than the first one that was ready."""
        if self._info is None:
            self._info = info
            return
        infos = (self._info, info)
        try:
            common_spaces([(each.obs_space, each.act_space) for each in infos])
        except UserError:
            raise UserError(
                f"The environments of actor {record.index} on {info.host} have "
                f"different spaces from those on {self._info.host}.\n  Fix: install "
                "the same versions of the environment on all machines."
            ) from None

    # Lost actors

    def _schedule_restart(self, record: ActorRecord, reason: str) -> ActorLost:
        """Stop a lost actor, and restart it after a delay."""
        self.transport.stop(record.index)
        self.counts["lost_chunks"] += len(record.requested)
        record.requested = {}
        record.times_lost += 1
        if record.failures >= self.config.restarts:
            raise UserError(
                f"Actor {record.index} ended {record.failures + 1} times in a row "
                f"without sending data. Last reason: {reason}\n"
                "  Fix: `ray status` and the logs in /tmp/ray/session_latest/logs show "
                "why; --actors.restarts allows more restarts."
            )
        delay = min(MAX_DELAY, FIRST_DELAY * 2**record.failures)
        record.failures += 1
        record.phase, record.retry_time = "backoff", self._now() + delay
        record.state_to_restore = None
        self._print(
            f"Actor {record.index} was lost and is restarted in {delay:.0f} s: {reason}"
        )
        return ActorLost(record.index)

    def _restart_and_check(self) -> list[Chunk | ActorLost]:
        """Restart actors whose delay has passed; stop those that do not answer."""
        now, timeout = self._now(), self.config.timeout
        lost: list[Chunk | ActorLost] = []
        for record in self.records:
            waited = now - record.waiting_since if record.pending_calls else 0.0
            if record.phase == "backoff" and now >= record.retry_time:
                record.incarnation += 1
                self.counts["restarts"] += 1
                self._start_process(record)
            elif waited > timeout and record.phase in ("resetting", "running"):
                reason = f"it did not answer for {timeout:.0f} s."
                lost.append(self._schedule_restart(record, reason))
        is_waiting = self._info is None or any(r.pending_calls for r in self.records)
        if not is_waiting:
            self._data_time = now
        elif now - self._data_time > timeout:
            raise UserError(self._timeout_message())
        return lost

    def _timeout_message(self) -> str:
        """Return the message for a run in which no actor sends data."""
        seconds, cpus = f"{self.config.timeout:.0f} s", self.config.cpus
        starting = sum(record.phase == "starting" for record in self.records)
        if starting < len(self.records):
            return (
                f"No actor has sent data for {seconds}.\n  Fix: `ray status` shows the "
                "machines of the cluster; --actors.timeout allows more time."
            )
        return (
            f"No actor has started within {seconds}. Each needs {cpus:g} free CPU "
            "cores and the environment's packages.\n  Fix: `ray status` shows the free "
            "cores; start Ray on more machines, or lower --actors.cpus."
        )


def raise_failure(failure: Failure, actor: int) -> None:
    """Raise the error that an actor returned."""
    if failure.is_user_error:
        message = f"Actor {actor}: {failure.message}"  # includes the fix
        raise UserError(message)
    raise RuntimeError(f"Error in actor {actor}:\n{failure.message}")
