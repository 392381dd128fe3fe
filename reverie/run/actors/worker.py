"""The process of an actor: steps its environments and acts with copies of the weights.

It uses `InProcessCollector`, so that rows are the same as in a run without actors. An
error is returned to the learner as a `Failure`; an actor that ends in any other way is
restarted.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from reverie.agents.remote import CanActRemotely
from reverie.api import StateDict, UserError
from reverie.envs.registry import TaskFactory
from reverie.envs.seeding import derive_seed
from reverie.log.timer import Rates, Timer
from reverie.nets.tree import tree_map
from reverie.rows import Rows
from reverie.run import device as devices
from reverie.run.actors.chunks import (
    CHUNK_BYTES,
    CHUNK_SECONDS,
    ActorInfo,
    ActorSpec,
    Chunk,
    ChunkRequest,
    Failure,
    Weights,
)
from reverie.run.collectors import InProcessCollector
from reverie.run.config import Config
from reverie.run.factory import make_agent, make_envs
from reverie.run.folder import config_from_settings


def returns_failure(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return errors of a method as a `Failure` instead of raising them."""

    @functools.wraps(method)
    def wrapped(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            return describe_failure(error)

    return wrapped


def describe_failure(error: Exception) -> Failure:
    """Return the message of an error, with its traceback unless it is a `UserError`."""
    if isinstance(error, UserError):
        return Failure(str(error), True)
    return Failure("".join(traceback.format_exception(error)), False)


class ActorWorker:
    """Collects chunks of steps on request."""

    def __init__(self, spec: ActorSpec):
        self.spec = spec
        self._messages: list[str] = []

    @returns_failure
    def open(self) -> ActorInfo:
        """Build the environments and the agent."""
        spec = self.spec
        config = config_from_settings(spec.settings)
        count = config.actors.envs
        envs_config = dataclasses.replace(config, seed=env_seed(config.seed, spec))
        make_env = pickle.loads(spec.make_env) if spec.make_env else None
        if isinstance(make_env, TaskFactory):
            make_env = dataclasses.replace(make_env, seed=envs_config.seed)
        self.envs = make_envs(envs_config, count, spec.actor * count, make_env)
        device = torch.device("cpu")
        if config.deterministic:
            devices.make_deterministic()
        actor_config = agent_config(config, spec)
        precision = devices.pick_precision(config.precision, device)
        self.agent: Any = make_agent(actor_config, self.envs, device, precision)
        assert isinstance(self.agent, CanActRemotely)  # checked by the learner
        self.collector = InProcessCollector(
            self.envs,
            self.agent,
            make_agent(actor_config, self.envs, device, precision, "random"),
            config.run.prefill,
            config.explore,
            Timer(enabled=False),
            Rates(),
        )
        self._max_seconds = float("inf") if config.actors.lockstep else CHUNK_SECONDS
        envs = self.envs
        return ActorInfo(
            platform.node(), envs.obs_space, envs.act_space, envs.render_fps
        )

    @returns_failure
    def reset(self, state: StateDict | None) -> None:
        """Start new episodes, or continue from a saved state."""
        self._row_counts = np.zeros(len(self.envs), np.int64)  # since this call
        self._version = 0
        if state is None:
            self.collector.reset()
        else:
            self.collector.load_state_dict(state["collector"])
            self.agent.policy_rng().load_state_dict(state["rng"])
        self._idle_since = time.perf_counter()

    @returns_failure
    def collect(self, request: ChunkRequest, weights: Weights | None) -> Chunk:
        """Collect one chunk; `weights` is None if they have not changed."""
        start = time.perf_counter()
        if weights is not None:
            self._load_weights(weights)
        self.collector.steps = request.first_step
        steps: list[Rows] = []
        size, failure = 0, None
        while len(steps) < request.steps and size < CHUNK_BYTES:
            try:
                rows = self.collector.collect()
            except Exception as error:
                failure = describe_failure(error)
                break
            # observations with this prefix are only logged, and not stored
            stored = {k: v for k, v in rows.values.items() if k[:4] != "log/"}
            steps.append(dataclasses.replace(rows, values=stored))
            size += sum(value.nbytes for value in stored.values())
            if time.perf_counter() - start > self._max_seconds:
                break
        chunk = self._make_chunk(request, steps, failure, start)
        self._idle_since = time.perf_counter()
        return chunk

    @returns_failure
    def state_dict(self) -> StateDict:
        """Return the state from which `reset` continues exactly."""
        return {
            "collector": self.collector.state_dict(),
            "rng": self.agent.policy_rng().state_dict(),
        }

    @returns_failure
    def close(self) -> None:
        """Stop the environments."""
        if hasattr(self, "envs"):
            self.envs.close()

    def _load_weights(self, weights: Weights) -> None:
        """Load the weights of the policy and the state of the agent's schedule."""
        self.agent.load_policy_weights(tree_map(torch.tensor, weights.state))
        if weights.schedule is not None:
            self.agent.schedule.load_state_dict(weights.schedule)
        self._version = weights.version

    def _make_chunk(
        self,
        request: ChunkRequest,
        steps: list[Rows],
        failure: Failure | None,
        start: float,
    ) -> Chunk:
        """Return the rows of all steps as one chunk; `start` is when it was begun."""
        all_envs = np.arange(len(self.envs))
        streams = [
            each.streams if each.streams is not None else all_envs for each in steps
        ]
        keys = steps[0].values if steps else {}
        # the empty array at the end is for chunks without steps
        joined = np.concatenate([*streams, all_envs[:0]])
        # clear the list in place, because `MessageHandler` appends to this list
        messages, self._messages[:] = tuple(self._messages), []
        chunk = Chunk(
            actor=self.spec.actor,
            incarnation=self.spec.incarnation,
            number=request.number,
            version=self._version,
            values={k: np.concatenate([x.values[k] for x in steps]) for k in keys},
            streams=joined,
            envs_per_step=np.array([len(each) for each in streams], np.int64),
            row_offsets=self._row_counts.copy(),
            metrics={
                step: self._without_videos(each.metrics)
                for step, each in enumerate(steps)
                if each.metrics
            },
            env_metrics=self.envs.metrics(),
            messages=messages,
            idle=start - self._idle_since,
            busy=time.perf_counter() - start,
            failure=failure,
        )
        self._row_counts += np.bincount(joined, minlength=len(self.envs))
        return chunk

    def _without_videos(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Remove videos, except those of the first actor: one is enough for the log.

        Videos are the only metrics with three or more axes.
        """
        if self.spec.actor == 0:
            return metrics
        return {key: value for key, value in metrics.items() if np.ndim(value) < 3}


class ActorProcess(ActorWorker):
    """An `ActorWorker` that sets up its own process: imports, threads and logging."""

    @returns_failure
    def open(self) -> ActorInfo:
        add_import_paths(self.spec)
        torch.set_num_threads(1)  # the processes of all actors run in parallel
        # the learner prints warnings about environments
        logger = logging.getLogger("reverie.envs")
        logger.handlers, logger.propagate = [MessageHandler(self._messages)], False
        info: ActorInfo = super().open()
        return info


class MessageHandler(logging.Handler):
    """Appends messages to a list."""

    def __init__(self, messages: list[str]):
        super().__init__(logging.WARNING)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def add_import_paths(spec: ActorSpec) -> None:
    """Make the modules that the learner can import importable in this process.

    On other machines this needs the same folders, or installed packages.
    """
    if os.path.isdir(spec.folder):
        os.chdir(spec.folder)
    known = set(sys.path)
    sys.path += [path for path in spec.import_paths if path and path not in known]


def env_seed(seed: int, spec: ActorSpec) -> int:
    """Return the seed of an actor's environments.

    It changes when the actor is lost, so that its episodes are not repeated. Before
    that, all actors have the same seed, and environments differ by their index.
    """
    return derive_seed(seed, spec.actor, spec.times_lost) if spec.times_lost else seed


def agent_config(config: Config, spec: ActorSpec) -> Config:
    """Return the config of an actor's agent, with its own seed for random numbers."""
    seed = config.seed
    if spec.actor or spec.times_lost:
        # the last argument makes it differ from the seed of the environments
        seed = derive_seed(config.seed, spec.actor, spec.times_lost, 1)
    # CUDA graphs are for the learner; actors run on the CPU
    uses_graph = config.compile == "graph"
    compile_ = "auto" if uses_graph else config.compile
    return dataclasses.replace(config, seed=seed, compile=compile_)
