"""`RemoteCollector`: the collector of a run with remote actors.

Chunks of the actors are queued and returned step by step, so that the training loop
stores and trains as with environments in its own process: the train ratio counts stored
steps only, not steps that are still queued. Actors may be at most `MAX_AHEAD` chunks
ahead; then they wait. If the queue is empty, the learner waits.

In lockstep (`actors.lockstep`), data is collected in rounds: all actors collect a chunk
with the same weights, and their steps are queued in a fixed order.

Episodes that cannot continue, because their actor was lost or its environments could
not be restored, end with a row in which `is_last` is set and `is_terminal` is not.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from reverie.agents.remote import CanActRemotely, LimitsEnvSteps
from reverie.api import Agent, Metrics, StateDict, UserError
from reverie.log.episode_stats import MAX_EPISODES, summarize_ended
from reverie.log.timer import Rates, Timer
from reverie.nets.tree import tree_map
from reverie.rows import Rows
from reverie.run.actors.chunks import CHUNK_STEPS, Chunk, Failure, Weights
from reverie.run.actors.pool import POLL_SECONDS, ActorLost, ActorPool, raise_failure
from reverie.run.clock import Clock

MAX_AHEAD = 2
"""Maximum chunks of an actor that were requested and not yet returned as rows."""
MAX_COPY_FRACTION = 0.05
"""Maximum fraction of the time that is spent copying weights for the actors."""
CHECK_SECONDS = 0.02
"""Time between two checks for new chunks while the queue is not empty."""

# with the keys that the training loop reads from all rows
NO_ROWS = Rows({name: np.zeros(0, bool) for name in ("is_first", "is_last")})

log = logging.getLogger("reverie.envs")


class QueuedStep(NamedTuple):
    """The rows of one step of an actor's environments."""

    order: tuple[int, int]
    """Position in lockstep: step within the chunk, then actor."""
    rows: Rows
    actor: int
    version: int
    """Number of updates of the weights with which the step was collected."""
    ends_chunk: bool
    """True for the last step of a chunk."""


class QueuedFailure(NamedTuple):
    """An error that is raised after all rows before it were returned."""

    order: tuple[int, int]
    failure: Failure
    actor: int


class RemoteCollector:
    """The `api.Collector` of a run with remote actors."""

    def __init__(
        self,
        pool: ActorPool,
        agent: Agent,
        clock: Clock,
        timer: Timer,
        rates: Rates,
        should_stop: Callable[[], bool],
    ):
        self.pool, self.agent, self.clock = pool, agent, clock
        self.timer, self.rates, self.should_stop = timer, rates, should_stop
        self.envs_per_actor, self.lockstep = pool.config.envs, pool.config.lockstep
        self.steps = 0
        """Number of rows returned so far, which are agent steps of the run."""
        self._queue: deque[QueuedStep | QueuedFailure | ActorLost] = deque()
        self._round: list[QueuedStep | QueuedFailure] = []
        """Steps of the current round of chunks, in lockstep."""
        self._queued_rows = 0
        self._ahead = [0] * pool.config.count
        """Chunks of each actor that were requested and not yet returned as rows."""
        self._newest_rows: dict[int, tuple[Rows, int]] = {}
        """Newest row of each stream (environment) whose episode has not ended: the rows
        that contain it, and its index in them."""
        self._weights: tuple[Any, Any] = ((-1, -1), None)
        """Version (updates, completed epochs) and reference of published weights."""
        self._publish_time = -math.inf  # when weights were last published
        self._publish_seconds = 0.0  # how long that took
        self._truncated = 0  # number of episodes that `_truncate` has ended
        self._ended_episodes: list[tuple[float, float]] = []  # score, length
        self._env_metrics: dict[tuple[int, int], Metrics] = {}
        """Newest metrics of the environments, by actor and incarnation."""
        self._check_time = 0.0  # when `collect` last checked for new chunks
        self._reset_statistics()

    def reset(self) -> None:
        """Start episodes in all environments."""
        self.pool.reset_envs()

    def collect(self) -> Rows:
        """Return the rows of the next step of one actor; none if the run is stopped."""
        self.wait()
        now = time.monotonic()
        if self._queue and not self.lockstep and now - self._check_time > CHECK_SECONDS:
            self._receive_and_request(0)
            self._check_time = now
        return self._next_rows()

    def wait(self) -> None:
        """Wait for rows; returns without them if the run is asked to stop."""
        if not self._queue:
            begin = time.monotonic()
            with self.timer("env"):
                self._receive_and_request(0)
                while not self._queue and not self.should_stop():
                    self._receive_and_request(POLL_SECONDS)
            self._wait_seconds += time.monotonic() - begin
        first = self._queue[0] if self._queue else None
        if isinstance(first, QueuedFailure):
            self._queue.popleft()
            raise_failure(first.failure, first.actor)

    def summary(self) -> Metrics:
        """Return statistics of the episodes that ended since the last call."""
        ended, self._ended_episodes = self._ended_episodes, []
        return summarize_ended(ended)

    def metrics(self) -> Metrics:
        """Return totals of the run, and rates and averages since the last call."""
        seconds = max(1e-9, time.monotonic() - self._start_time)
        actor_seconds = max(1e-9, self._idle + self._busy)
        metrics: Metrics = {
            "actors/running": len(self.pool.running),
            **{f"actors/{name}": n for name, n in self.pool.counts.items()},
            "actors/truncated_episodes": self._truncated,
            "actors/queued_chunks": sum(self._ahead),
            "actors/steps_per_second": self._rows / seconds,
            "actors/learner_wait_fraction": self._wait_seconds / seconds,
            "actors/actor_wait_fraction": self._idle / actor_seconds,
            "actors/weights_published": self._published,
        }
        if self._rows:
            metrics["actors/policy_lag"] = self._lag_sum / self._rows
            metrics["actors/policy_lag_max"] = self._lag_max
        for each in self._env_metrics.values():
            for name, value in each.items():
                metrics[name] = metrics.get(name, 0) + value
        self._reset_statistics()
        return metrics

    def state_dict(self) -> StateDict:
        """Wait for the requested chunks; return the queue and all actors' states."""
        while any(record.requested for record in self.pool.records):
            self._receive(POLL_SECONDS)
        open_streams = sorted(self._newest_rows)
        keys = self._keys()
        last = [[self._newest_row(s)[key] for s in open_streams] for key in keys]
        return {
            "actors": self.pool.states(),
            "times_lost": [record.times_lost for record in self.pool.records],
            "counts": dict(self.pool.counts),
            "truncated": self._truncated,
            "steps": self.steps,
            "ended": np.array(self._ended_episodes, np.float64).reshape(-1, 2),
            "open_streams": np.array(open_streams, np.int64),
            # lists, because keys of observations may contain any character
            "last_rows": [np.stack(rows) for rows in last if rows],
            "queue": [
                {
                    "values": [item.rows.values[key] for key in keys],
                    "streams": item.rows.streams,
                    "actor": item.actor,
                    "version": item.version,
                    "is_end": item.ends_chunk,
                    "metrics": saved_metrics(item.rows.metrics),
                }
                for item in self._queue
                if isinstance(item, QueuedStep)
            ],
        }

    def load_state_dict(self, state: StateDict) -> None:
        actors = state["actors"]
        if len(actors) != len(self.pool.records):
            raise UserError(
                f"The checkpoint has {len(actors)} actors, this run has "
                f"{len(self.pool.records)}.\n  Fix: --actors.count {len(actors)}"
            )
        self.steps, self._truncated = int(state["steps"]), int(state["truncated"])
        self.pool.counts |= {k: int(n) for k, n in state["counts"].items()}
        for record, count in zip(self.pool.records, state["times_lost"], strict=True):
            record.times_lost = int(count)
        self._ended_episodes = [(float(s), float(n)) for s, n in state["ended"]]
        keys = self._keys()
        if len(state["open_streams"]):
            arrays = map(np.asarray, state["last_rows"])
            rows = Rows(dict(zip(keys, arrays, strict=True)))
            for index, stream in enumerate(np.asarray(state["open_streams"])):
                self._newest_rows[int(stream)] = (rows, index)
        for item in state["queue"]:
            arrays = map(np.asarray, item["values"])
            values = dict(zip(keys, arrays, strict=True))
            metrics = {k: np.asarray(v) for k, v in item["metrics"]}
            rows = Rows(values, np.asarray(item["streams"]), metrics)
            actor, ends_chunk = int(item["actor"]), bool(item["is_end"])
            # saved steps are in order; `order` is not used for sorting again
            order, version = (len(self._queue), actor), int(item["version"])
            self._queue.append(QueuedStep(order, rows, actor, version, ends_chunk))
            self._queued_rows += len(rows)
            self._ahead[actor] += ends_chunk
        self.pool.reset_envs(actors)

    # Requests and chunks

    def _receive_and_request(self, seconds: float) -> None:
        """Receive chunks, then request more."""
        self._receive(seconds)
        self._request()

    def _receive(self, seconds: float) -> None:
        """Queue the chunks that arrive within `seconds`.

        In lockstep, they are queued when all chunks of the round have arrived.
        """
        for result in self.pool.poll(seconds):
            if isinstance(result, ActorLost):
                self._queue.append(result)
                self._ahead[result.actor] = sum(
                    item.ends_chunk
                    for item in (*self._queue, *self._round)
                    if isinstance(item, QueuedStep) and item.actor == result.actor
                )
            else:
                self._add_statistics(result)
                queued = self._split(result)
                (self._round if self.lockstep else self._queue).extend(queued)
        if self._round and not any(record.requested for record in self.pool.records):
            # the same order in every run: by step, then by actor
            self._round.sort(key=lambda item: item.order)
            self._queue.extend(self._round)
            self._round = []

    def _split(self, chunk: Chunk) -> list[QueuedStep | QueuedFailure]:
        """Return the steps of a chunk, and its error, if it has one."""
        steps = list(chunk.steps(chunk.actor * self.envs_per_actor))
        last = len(steps) - 1
        items: list[QueuedStep | QueuedFailure] = [
            QueuedStep((i, chunk.actor), rows, chunk.actor, chunk.version, i == last)
            for i, rows in enumerate(steps)
        ]
        self._queued_rows += len(chunk)
        if chunk.failure:
            order = (len(steps), chunk.actor)
            items.append(QueuedFailure(order, chunk.failure, chunk.actor))
        return items

    def _request(self) -> None:
        """Request at most `_steps_left` steps from the actors that may collect."""
        if self.should_stop():
            return
        actors = self.pool.running
        is_requested = any(record.requested for record in actors)
        if self.lockstep and (self._queue or is_requested):
            return  # the round has not ended
        if self.lockstep and len(actors) < len(self.pool.records):
            return
        if not self.lockstep:
            actors = [r for r in actors if self._ahead[r.index] < MAX_AHEAD]
            actors.sort(key=lambda record: self._ahead[record.index])
        # share the remaining steps evenly among the actors
        requested = sum(sum(r.requested.values()) for r in self.pool.records)
        pending_rows = self._queued_rows + requested * self.envs_per_actor
        left = self._steps_left() - pending_rows
        if not pending_rows:
            left = max(left, 1)  # the training loop needs at least one step
        for index, record in enumerate(actors):
            share = left / (self.envs_per_actor * (len(actors) - index))
            steps = math.ceil(min(share, CHUNK_STEPS))
            if steps <= 0:
                break
            weights = self._publish_weights()
            first_step = self.steps + pending_rows  # agent steps before the chunk
            self.pool.request(record, steps, first_step, *weights)
            self._ahead[record.index] += 1
            left -= steps * self.envs_per_actor
            pending_rows += steps * self.envs_per_actor

    def _steps_left(self) -> float:
        """Return the agent steps until the end of the run or the next update.

        In lockstep, the end of the run is ignored, so that a run that is extended later
        equals one that was longer from the start.
        """
        left = math.inf if self.lockstep else self.clock.max_steps - self.steps
        schedule = self.clock.schedule
        if isinstance(schedule, LimitsEnvSteps):
            left = min(left, schedule.env_steps_left)
        return left

    def _publish_weights(self) -> tuple[Any, Any]:
        """Publish the weights if due; return the last published version and weights.

        Copying takes at most `MAX_COPY_FRACTION` of the time, except in lockstep and
        in a new epoch of the agent's schedule.
        """
        version = (self.clock.updates, self.clock.completed_epochs or 0)
        (_, published_epochs), shared = self._weights
        begin = time.monotonic()
        interval = self._publish_seconds / MAX_COPY_FRACTION
        if version == self._weights[0] or (
            shared is not None
            and begin - self._publish_time < interval
            and not self.lockstep
            and version[1] == published_epochs
        ):
            return self._weights
        schedule = self.agent.schedule
        assert isinstance(self.agent, CanActRemotely)
        weights = Weights(
            self.clock.updates,
            tree_map(to_array, self.agent.policy_weights()),
            schedule.state_dict() if schedule else None,
        )
        self._weights = (version, self.pool.transport.share(weights))
        self._publish_time = time.monotonic()
        self._publish_seconds = self._publish_time - begin
        self._published += 1
        return self._weights

    # Rows

    def _next_rows(self) -> Rows:
        """Return the next rows of the queue, or `NO_ROWS` if it is empty."""
        while self._queue:
            item = self._queue[0]
            if isinstance(item, QueuedFailure):
                break  # raised by the next `wait`
            if isinstance(item, ActorLost):
                self._queue.popleft()
                streams = range(
                    item.actor * self.envs_per_actor,
                    (item.actor + 1) * self.envs_per_actor,
                )
                if any(stream in self._newest_rows for stream in streams):
                    return self._truncate(
                        [s for s in streams if s in self._newest_rows]
                    )
                continue
            rows = item.rows
            assert rows.streams is not None
            # An episode starts although the previous one of its stream has not ended:
            # the environment was not restored. Truncate the previous one first.
            new = rows.streams[rows.values["is_first"]].tolist()
            if any(stream in self._newest_rows for stream in new):
                return self._truncate([s for s in new if s in self._newest_rows])
            self._queue.popleft()
            self._count_rows(item)
            return rows
        return NO_ROWS

    def _count_rows(self, item: QueuedStep) -> None:
        """Count the rows of a step that is returned to the training loop."""
        rows, count = item.rows, len(item.rows)
        self.steps += count
        self._queued_rows -= count
        self._ahead[item.actor] -= item.ends_chunk
        lag = self.clock.updates - item.version
        self._rows += count
        self._lag_sum += lag * count
        self._lag_max: int = max(self._lag_max, lag)
        self.rates.add("policy", count)
        assert rows.streams is not None
        is_last = rows.values["is_last"]
        for index, stream in enumerate(rows.streams.tolist()):
            if is_last[index]:
                self._newest_rows.pop(stream, None)
            else:
                self._newest_rows[stream] = (rows, index)
        if "episode/score" in rows.metrics:
            scores, lengths = (
                np.asarray(rows.metrics[f"episode/{name}"], float).tolist()
                for name in ("score", "length")
            )
            self._ended_episodes += zip(scores, lengths, strict=True)
            del self._ended_episodes[:-MAX_EPISODES]

    def _truncate(self, streams: list[int]) -> Rows:
        """Return synthetic rows that truncate the episodes of these streams.

        They repeat the last observation, with zeros as reward and action.
        """
        rows = [self._newest_row(stream) for stream in streams]
        values = {key: np.stack([row[key] for row in rows]) for key in self._keys()}
        for key in ("reward", "is_first", "is_terminal", *self.pool.act_space):
            values[key] = np.zeros_like(values[key])
        values["is_last"] = np.ones_like(values["is_last"])
        for stream in streams:
            del self._newest_rows[stream]
        self._truncated += len(streams)
        self.steps += len(streams)
        return Rows(values, np.array(streams))

    def _newest_row(self, stream: int) -> dict[str, Any]:
        """Return the newest row of a stream in `_newest_rows`."""
        rows, index = self._newest_rows[stream]
        return {key: value[index] for key, value in rows.values.items()}

    def _keys(self) -> list[str]:
        """Return the keys of the rows, in the order in which they are saved."""
        # observations with the prefix `log/` are only logged, and not stored
        obs = [key for key in self.pool.obs_space if key[:4] != "log/"]
        return sorted({*obs, *self.pool.act_space, *self.agent.extras})

    # Statistics

    def _add_statistics(self, chunk: Chunk) -> None:
        """Add times and metrics of a chunk to `metrics`, and log its warnings."""
        self._idle += chunk.idle
        self._busy += chunk.busy
        self._env_metrics[chunk.actor, chunk.incarnation] = chunk.env_metrics
        for message in chunk.messages:
            log.warning("Actor %d: %s", chunk.actor, message)

    def _reset_statistics(self) -> None:
        self._start_time = time.monotonic()
        self._wait_seconds = self._idle = self._busy = 0.0
        self._rows = self._lag_sum = self._lag_max = self._published = 0


def check_can_use_actors(agent: Agent, name: str) -> None:
    """Raise if an agent cannot act in other processes."""
    missing = ""
    if not isinstance(agent, CanActRemotely):
        missing = "all methods of `reverie.agents.remote.CanActRemotely`"
    elif agent.schedule and not isinstance(agent.schedule, LimitsEnvSteps):
        missing = (
            "a schedule with `env_steps_left` (`reverie.agents.remote.LimitsEnvSteps`)"
        )
    if missing:
        raise UserError(
            f"The agent {name!r} cannot be used with --actors.count: it does not have "
            f"{missing}.\n  Fix: remove --actors.count (see reverie/agents/remote.py)"
        )


def to_array(value: Any) -> Any:
    """Return a copy of a tensor as an array; other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return np.array(value.float() if value.dtype == torch.bfloat16 else value)


def saved_metrics(metrics: Metrics) -> list[list[Any]]:
    """Return metrics without videos, as lists that a checkpoint can store."""
    arrays = {key: np.asarray(value) for key, value in metrics.items()}
    return [[key, value] for key, value in arrays.items() if value.ndim < 3]
