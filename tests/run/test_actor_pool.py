"""Chunks arrive once and in order; actors are restarted with delays and a limit."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
from actor_helpers import FakeTransport

from reverie.api import UserError
from reverie.run.actors import factory
from reverie.run.actors.chunks import (
    ActorInfo,
    ActorSpec,
    Chunk,
    ChunkSequence,
    Failure,
    MissingChunkError,
)
from reverie.run.actors.config import ActorsConfig
from reverie.run.actors.pool import MAX_DELAY, ActorLost, ActorPool, CallResult
from reverie.spaces import Space

SPACES = {"x": Space(np.float32, (2,))}


def make_chunk(
    number: int, row_offset: int, incarnation: int = 0, rows: int = 3
) -> Chunk:
    """Return a chunk of actor 0, which has one environment."""
    zeros, counts = np.zeros(rows, np.int64), np.ones(rows, np.int64)
    values, offsets = {"is_first": zeros > 0}, np.array([row_offset])
    return Chunk(0, incarnation, number, 0, values, zeros, counts, offsets)


def test_chunks_are_put_in_order_and_duplicates_are_ignored():
    sequence = ChunkSequence(incarnation=1, envs=1)
    chunks = [make_chunk(n, 3 * n, incarnation=1) for n in range(3)]
    assert sequence.add(chunks[1]) == []
    assert sequence.add(chunks[0]) == chunks[:2]
    for old in (chunks[1], make_chunk(2, 6, incarnation=0)):
        assert sequence.add(old) == []
    assert sequence.add(chunks[2]) == [chunks[2]]
    assert sequence.duplicates == 2


def test_missing_rows_are_found():
    sequence = ChunkSequence(incarnation=0, envs=1)
    sequence.add(make_chunk(0, 0))
    with pytest.raises(MissingChunkError, match=r"rows \[4\] instead of \[3\]"):
        sequence.add(make_chunk(1, 4))


def test_steps_of_a_chunk_have_the_streams_of_their_rows():
    counts = np.array([2, 1])
    values = {"is_first": np.array([True, True, False])}
    streams, first = np.array([0, 1, 1]), np.zeros(2, np.int64)
    chunk = Chunk(3, 0, 0, 0, values, streams, counts, first, {1: {"score": 2.0}})
    steps = list(chunk.steps(first_stream=6))
    assert [step.streams.tolist() for step in steps] == [[6, 7], [7]]
    assert [step.metrics for step in steps] == [{}, {"score": 2.0}]


class StubWorker:
    """An actor of one environment that numbers its rows; a test may change it."""

    def __init__(self, spec):
        self.spec, self.rows = spec, 0
        self.info = ActorInfo(f"host{spec.actor}", SPACES, {}, 0.0)

    def open(self):
        return self.info

    def reset(self, state):
        self.state = state

    def collect(self, request, weights):
        chunk = make_chunk(
            request.number, self.rows, self.spec.incarnation, request.steps
        )
        self.rows += request.steps
        return chunk

    def state_dict(self):
        return {"rows": self.rows}


class PoolSetup(SimpleNamespace):
    """A pool of one or more stub actors, with a time that the test sets."""

    def __init__(self, make_worker=StubWorker, **settings):
        self.time, self.messages = 0.0, []
        self.transport = FakeTransport(make_worker)
        config = ActorsConfig(**{"count": 1, "envs": 1, **settings})
        self.pool = ActorPool(
            config,
            self.transport,
            lambda actor, incarnation, times_lost: ActorSpec(
                actor, incarnation, times_lost, {}, None, ""
            ),
            self.messages.append,
            now=lambda: self.time,
        )
        self.pool.start_processes()

    def begin(self):
        """Start all actors and return the record of the first."""
        self.pool.reset_envs()
        for _ in range(2):
            self.pool.poll(0)
        return self.pool.records[0]

    def request(self, steps=3):
        self.pool.request(self.pool.records[0], steps, 0, (0, 0), "weights")


def test_the_pool_describes_the_environments_of_all_actors():
    setup = PoolSetup(count=3, envs=2)
    assert len(setup.pool) == 6
    assert setup.pool.obs_space == SPACES
    assert len(setup.pool.running) == 0
    setup.begin()
    assert len(setup.pool.running) == 3


def test_weights_are_sent_once_per_version():
    setup = PoolSetup()
    setup.begin()
    for version, sent in [((0, 0), "a"), ((0, 0), None), ((1, 0), "a")]:
        setup.pool.request(setup.pool.records[0], 1, 0, version, "a")
        (_, _, (_, weights)) = setup.transport.calls[-1]
        assert weights == sent


def test_a_chunk_that_arrives_twice_is_returned_once():
    setup = PoolSetup()
    setup.begin()
    setup.request()
    (chunk,) = setup.pool.poll(0)
    setup.pool.records[0].pending_calls += 1
    setup.transport.extra = [CallResult(0, 0, "collect", chunk)]
    assert setup.pool.poll(0) == []
    assert setup.pool.counts["duplicates"] == 1


def test_an_actor_that_skips_rows_is_restarted():
    setup = PoolSetup()
    record = setup.begin()
    setup.transport.workers[0].rows = 5
    setup.request()
    assert setup.pool.poll(0) == [ActorLost(0)]
    assert "a chunk is missing" in setup.messages[0]
    assert setup.pool.counts["lost_chunks"] == 1
    assert record.phase == "backoff"


def test_restarts_are_delayed_more_and_more_up_to_a_limit():
    setup = PoolSetup(restarts=6)
    record = setup.begin()
    delays = []
    for _ in range(6):
        setup.transport.dead.add(0)
        setup.request()
        assert setup.pool.poll(0) == [ActorLost(0)]
        delays.append(record.retry_time - setup.time)
        setup.time = record.retry_time - 0.01
        setup.pool.poll(0)
        assert record.phase == "backoff"
        setup.time = record.retry_time
        for _ in range(3):
            setup.pool.poll(0)
        assert record.phase == "running"
    assert delays == [1, 2, 4, 8, 16, MAX_DELAY]
    setup.transport.dead.add(0)
    setup.request()
    with pytest.raises(UserError, match=r"(?s)7 times in a row.*killed.*Fix:"):
        setup.pool.poll(0)


def test_data_resets_the_count_of_failures_and_old_answers_are_ignored():
    setup = PoolSetup()
    record = setup.begin()
    setup.transport.dead.add(0)
    setup.request()
    setup.pool.poll(0)
    setup.transport.extra = [CallResult(0, 0, "collect", make_chunk(0, 0))]  # too late
    assert setup.pool.poll(0) == []
    setup.time = record.retry_time
    for _ in range(3):
        setup.pool.poll(0)
    setup.request()
    (chunk,) = setup.pool.poll(0)
    assert (chunk.incarnation, chunk.number) == (1, 0)
    assert (record.failures, record.times_lost) == (0, 1)


def test_an_actor_that_does_not_answer_is_restarted(monkeypatch):
    setup = PoolSetup(timeout=60, count=2)
    setup.begin()
    monkeypatch.setattr(setup.transport, "poll", lambda seconds: [])
    setup.request()
    setup.time = 59
    assert setup.pool.poll(0) == []
    setup.time = 61
    assert setup.pool.poll(0) == [ActorLost(0)]


def test_a_run_without_any_data_stops(monkeypatch):
    setup = PoolSetup(timeout=60)
    monkeypatch.setattr(setup.transport, "poll", lambda seconds: [])
    for setup.time in np.arange(0, 60, 0.1):
        setup.pool.poll(0)
    setup.time = 60.1
    with pytest.raises(UserError, match=r"(?s)No actor has started.*1 free CPU.*Fix:"):
        setup.pool.poll(0)


def test_the_time_in_which_the_learner_trains_does_not_count(monkeypatch):
    setup = PoolSetup(timeout=60, count=2)
    setup.pool.reset_envs()
    setup.transport.calls.pop()  # the second actor waits for a free core
    for _ in range(3):
        setup.pool.poll(0)
    setup.time = 1000
    setup.pool.poll(0)
    assert len(setup.pool.running) == 1


def test_states_of_lost_actors_are_none_and_the_loss_is_reported():
    setup = PoolSetup(count=2)
    setup.begin()
    setup.transport.dead.add(1)
    assert setup.pool.states() == [{"rows": 0}, None]
    assert setup.pool.poll(0) == [ActorLost(1)]


def test_a_restored_state_reaches_its_actor():
    setup = PoolSetup(count=2)
    setup.pool.poll(0)
    setup.pool.reset_envs([{"a": 1}, None])
    setup.pool.poll(0)
    workers = setup.transport.workers
    assert [workers[i].state for i in range(2)] == [{"a": 1}, None]


def test_errors_of_actors_are_raised():
    setup = PoolSetup()
    setup.begin()
    record = setup.pool.records[0]
    for failure, kind in [
        (Failure("No such task.\n  Fix: x", True), UserError),
        (Failure("Traceback ...", False), RuntimeError),
    ]:
        record.pending_calls += 1
        setup.transport.extra = [CallResult(0, 0, "collect", failure)]
        with pytest.raises(kind, match="ctor 0:"):
            setup.pool.poll(0)


def test_other_spaces_on_another_machine_are_refused():
    class Other(StubWorker):
        def open(self):
            spaces = {"x": Space(np.float32, (2 + self.spec.actor,))}
            return ActorInfo(f"host{self.spec.actor}", spaces, {}, 0.0)

    with pytest.raises(UserError, match=r"(?s)actor 1 on host1.*Fix:"):
        PoolSetup(Other, count=2).pool.poll(0)


@pytest.mark.parametrize("values", [{"count": 5000}, {"timeout": 0}, {"envs": 0}])
def test_impossible_settings_are_refused(values):
    with pytest.raises(UserError, match="Fix:"):
        ActorsConfig(**values)


def test_functions_that_make_environments_are_pickled(monkeypatch):
    monkeypatch.setattr(factory, "import_optional", lambda *_: cloudpickle)
    assert factory.pickle_make_env(None) is None
    pickled = factory.pickle_make_env(lambda index: index + 1)
    assert cloudpickle.loads(pickled)(2) == 3
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"(?s)Ray Client .*Fix: run the learner on a"):
        ActorsConfig(address="ray://head:10001")
    with pytest.raises(UserError, match="cannot be sent to actors"):
        factory.pickle_make_env(lambda index: lock)
