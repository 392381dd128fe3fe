"""Messages between the learner and its actors, and a check for missing chunks.

The learner requests a number of steps from an actor. The actor collects them with the
newest weights it has and returns one chunk. The chunks of an actor are numbered from 0.
The rows of each environment are numbered from 0, too. Both numbers start at 0 again
after a restart. A chunk that arrives twice is ignored; a missing one is an error, after
which the actor is restarted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reverie.api import StateDict
from reverie.rows import Rows
from reverie.spaces import Spaces

CHUNK_STEPS = 64
"""Maximum steps of each environment in a chunk."""
CHUNK_BYTES = 1_000_000
"""A chunk ends with the step in which it reaches this size."""
CHUNK_SECONDS = 1.0
"""A chunk ends after this time, so that slow environments do not delay the learner."""


class MissingChunkError(Exception):
    """Chunks or rows of an actor are missing."""


@dataclass(frozen=True)
class ActorSpec:
    """Arguments from which an actor is built."""

    actor: int
    incarnation: int
    """Number of restarts of the actor since this process of the learner started."""
    times_lost: int
    """How many times the actor died or did not answer in the whole run, including the
    time before the run was resumed; its seeds depend on it."""
    settings: dict[str, Any]
    """The config as nested dicts, because a config class that is created at run time
    (for plug-ins) cannot be pickled."""
    make_env: bytes | None
    """Pickled function that builds an environment; None to build those of `task`."""
    folder: str
    """Working directory of the learner, from which user modules can be imported."""
    import_paths: tuple[str, ...] = ()
    """`sys.path` of the learner."""


@dataclass(frozen=True)
class ActorInfo:
    """Machine and environments of an actor."""

    host: str
    obs_space: Spaces
    act_space: Spaces
    render_fps: float


@dataclass(frozen=True)
class ChunkRequest:
    """Request for one chunk."""

    number: int
    """Sequence number of the chunk."""
    steps: int
    """Maximum steps of every environment."""
    first_step: int
    """Number of agent steps of the run before this chunk. It determines whether actions
    are random (`run.prefill`) or exploratory."""


@dataclass(frozen=True)
class Weights:
    """One version of the weights of the policy, sent to all actors."""

    version: int
    """Number of updates of the agent."""
    state: StateDict
    """Result of `CanActRemotely.policy_weights`, as arrays."""
    schedule: StateDict | None = None
    """State of the agent's update schedule (`api.Schedule`), if it has one."""


@dataclass(frozen=True)
class Failure:
    """An error in an actor that ends the run."""

    message: str
    is_user_error: bool


@dataclass(frozen=True)
class Chunk:
    """Consecutive steps of the environments of one actor."""

    actor: int
    incarnation: int
    """As in `ActorSpec`."""
    number: int
    """As in `ChunkRequest`."""
    version: int
    """Version of the weights with which it was collected."""
    values: dict[str, np.ndarray]
    """Rows of all steps `(rows, ...)` by key."""
    streams: np.ndarray
    """Index of the environment of each row, within the actor."""
    envs_per_step: np.ndarray
    """Number of environments that returned a row at each step."""
    row_offsets: np.ndarray
    """Number of rows of each environment before this chunk, since the last restart."""
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Metrics of the episodes that ended, by step in the chunk."""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    """Result of `VecEnv.metrics`."""
    messages: tuple[str, ...] = ()
    """Warnings about environments."""
    idle: float = 0.0
    """Seconds that the actor waited before this chunk."""
    busy: float = 0.0
    """Seconds that the actor took to collect it."""
    failure: Failure | None = None
    """The error that ended the chunk, if any."""

    def __len__(self) -> int:
        return len(self.streams)

    def steps(self, first_stream: int) -> Iterator[Rows]:
        """Iterate over the rows of each step.

        `first_stream`, the stream of the actor's first environment, is added to the
        streams of the rows.
        """
        counts = self.envs_per_step
        stop = np.cumsum(counts)
        for step, (end, count) in enumerate(zip(stop, counts, strict=True)):
            part = slice(int(end - count), int(end))
            values = {key: value[part] for key, value in self.values.items()}
            streams = self.streams[part] + first_stream
            yield Rows(values, streams, self.metrics.get(step, {}))


class ChunkSequence:
    """Sorts the chunks that an actor sent since a restart; raises if one is missing."""

    def __init__(self, incarnation: int, envs: int):
        self.incarnation = incarnation
        self.next_number = 0
        self._row_counts = np.zeros(
            envs, np.int64
        )  # delivered rows of each environment
        # chunks by number that arrived while a chunk with a lower number is missing
        self._early: dict[int, Chunk] = {}
        self.duplicates = 0  # number of chunks that were ignored

    def add(self, chunk: Chunk) -> list[Chunk]:
        """Buffer the chunk; return all chunks that can now be delivered in order.

        Duplicates, and chunks from before the restart, are ignored.
        """
        is_known = chunk.number < self.next_number or chunk.number in self._early
        if chunk.incarnation != self.incarnation or is_known:
            self.duplicates += 1
            return []
        self._early[chunk.number] = chunk
        ready = []
        while self.next_number in self._early:
            chunk = self._early.pop(self.next_number)
            if not np.array_equal(chunk.row_offsets, self._row_counts):
                raise MissingChunkError(
                    f"chunk {chunk.number} starts at rows {chunk.row_offsets.tolist()} "
                    f"instead of {self._row_counts.tolist()}"
                )
            self._row_counts += np.bincount(
                chunk.streams, minlength=len(self._row_counts)
            )
            self.next_number += 1
            ready.append(chunk)
        return ready
