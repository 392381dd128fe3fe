"""Actors without Ray: a transport that runs them in the process of the test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np

from reverie.run.actors import factory
from reverie.run.actors.chunks import ActorSpec
from reverie.run.actors.pool import CallFailed, CallResult
from reverie.run.actors.worker import ActorWorker
from reverie.run.config import resolve

LENGTH = 30
"""Steps of an episode of `CountingEnv`."""
SMALL = {
    "task": "actor_helpers:make_counting",
    "agent": "random",
    "actors.count": 2,
    "actors.envs": 2,
    "run.clock": "steps",
    "run.log_every": 100,
    "run.save_every": 0,
    "run.report_every": 0,
    "replay.capacity": 4000,
    "device": "cpu",
    "logger.outputs": "jsonl",
}


class CountingEnv(gymnasium.Env):
    """The observation is the number of steps in the episode.

    It has no state dict, so its episodes cannot be resumed.
    """

    observation_space = gymnasium.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        is_over = self.steps == LENGTH
        return np.array([self.steps], np.float32), 1.0, is_over, False, {}


def make_counting():
    return CountingEnv()


class FailingEnv(CountingEnv):
    """Fails in every step after the tenth."""

    def step(self, action):
        if self.steps == 10:
            raise ValueError("the motor is blocked")
        return super().step(action)


def make_failing():
    return FailingEnv()


class FakeTransport:
    """Implements `pool.Transport` without processes: `poll` runs the calls.

    Calls of actors in `dead`, to which a test may add any, fail.
    """

    def __init__(self, make_worker=ActorWorker):
        self.make_worker = make_worker
        self.workers: dict[int, Any] = {}
        self.specs: list[ActorSpec] = []
        self.calls: list[tuple[int, str, tuple[Any, ...]]] = []
        self.dead: set[int] = set()
        self.extra: list[CallResult] = []  # returned by the next `poll`, too
        self.shared = 0  # number of calls of `share`
        self.is_closed = False

    def start(self, spec: ActorSpec) -> None:
        self.dead.discard(spec.actor)
        self.workers[spec.actor] = self.make_worker(spec)
        self.specs.append(spec)

    def call(self, actor: int, method: str, *arguments: Any) -> None:
        self.calls.append((actor, method, arguments))

    def share(self, value: Any) -> Any:
        self.shared += 1
        return value

    def poll(self, seconds: float) -> list[CallResult]:
        calls, self.calls = self.calls, []
        events, self.extra = self.extra, []
        for actor, method, arguments in calls:
            worker = self.workers[actor]
            if actor in self.dead:
                result: Any = CallFailed("the process was killed.")
            else:
                result = getattr(worker, method)(*arguments)
            events.append(CallResult(actor, worker.spec.incarnation, method, result))
        return events

    def stop(self, actor: int) -> None:
        self.calls = [call for call in self.calls if call[0] != actor]

    def close(self) -> None:
        self.is_closed = True
        self.calls = []


def use_fake(monkeypatch) -> FakeTransport:
    """Let runs use a transport without Ray, and return it."""
    transport = FakeTransport()
    monkeypatch.setattr(factory, "RayTransport", lambda config: transport)
    monkeypatch.setattr("reverie.run.actors.pool.FIRST_DELAY", 0.0)
    return transport


def settings(logdir, presets: Iterable[str] = ("debug",), **flags):
    return resolve(list(presets), flags={**SMALL, "logdir": str(logdir), **flags})


def streams_of(replay) -> list[dict[str, np.ndarray]]:
    """Return all stored rows of each stream, in order."""
    index = replay.index
    ids = np.arange(index.first, index.total)
    rows = replay.spaces
    streams = []
    for stream in np.unique(index.stream[ids % index.capacity]):
        own = ids[index.stream[ids % index.capacity] == stream]
        out = {
            key: np.empty((len(own), *space.shape), space.dtype)
            for key, space in rows.items()
        }
        assert replay.read(own, out)
        streams.append(out)
    return streams


def check_steps(replay, truncated: int) -> None:
    """Assert that no step of a counting environment is missing or duplicated.

    Episodes end after `LENGTH` steps, except for this number of `truncated` ones, whose
    last row repeats the observation before it.
    """
    found = 0
    for rows in streams_of(replay):
        steps = rows["vector"][:, 0].astype(int)
        first, last, terminal = (
            rows[name] for name in ("is_first", "is_last", "is_terminal")
        )
        assert first[0]
        assert np.array_equal(first[1:], last[:-1]), "episodes end before the next"
        assert not steps[first].any()
        is_truncated = last & ~terminal
        found += int(is_truncated.sum())
        assert (steps[last & terminal] == LENGTH).all()
        assert (np.diff(steps)[~first[1:] & ~is_truncated[1:]] == 1).all()
        assert (np.diff(steps)[is_truncated[1:]] == 0).all()
        assert not rows["action"][last].any()
    assert found == truncated
