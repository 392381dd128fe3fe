"""Remote actors: every step is stored once, the train ratio holds, runs resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from actor_helpers import check_steps, settings, streams_of, use_fake
from protocol_checks import check_members
from state_helpers import assert_same
from test_resume import contents, lines, read_state, stops_after, strip

import reverie
from reverie.agents.options import BuildOptions
from reverie.agents.random import RandomAgent, RandomConfig
from reverie.api import Collector, UserError
from reverie.run.actors.chunks import CHUNK_STEPS
from reverie.run.actors.collector import MAX_AHEAD, check_can_use_actors
from reverie.run.clock import TrainRatio
from reverie.run.online_run import OnlineRun
from reverie.run.train import train


@pytest.fixture
def fake(monkeypatch):
    return use_fake(monkeypatch)


@pytest.mark.parametrize("agent", ["random", "dreamer"])
def test_an_actor_collects_the_rows_of_a_run_without_actors(tmp_path, fake, agent):
    flags = {"task": "catch", "agent": agent, "run.steps": 160, "run.prefill": 40}
    if agent == "dreamer":
        flags["run.train_ratio"] = 0
    else:
        flags.pop("run.prefill")
    config = settings(tmp_path / "plain", **flags, **{"actors.count": 0, "run.envs": 4})
    remote = settings(tmp_path / "r", **flags, **{"actors.count": 1, "actors.envs": 4})
    plain, actors = ([], [])
    for rows, each in ((plain, config), (actors, remote)):
        with OnlineRun(each) as run:
            check_members(run.collector, Collector)
            run.start()
            while run.clock.running:
                run.collect()
            rows += streams_of(run.replay)
    assert_same(plain, actors)


def test_a_lost_actor_truncates_its_episodes_and_restarts(tmp_path, fake, capsys):
    config = settings(tmp_path, **{"run.steps": 2000})
    with OnlineRun(config) as run:
        run.start()
        while run.clock.running:
            run.collect()
            if run.clock.step == 500:
                fake.dead.add(1)
        metrics = run.collector.metrics()
        run.collector.state_dict()  # all chunks have arrived
        assert metrics["actors/restarts"] == 1
        assert metrics["actors/lost_chunks"] >= 1
        assert metrics["actors/truncated_episodes"] == 2  # one per environment
        assert metrics["actors/running"] == 2
        check_steps(run.replay, truncated=2)
        assert len(run.replay) == run.clock.step
    assert fake.is_closed
    assert "Actor 1 was lost" in capsys.readouterr().err
    again = [spec for spec in fake.specs if spec.actor == 1]
    assert [(spec.incarnation, spec.times_lost) for spec in again] == [(0, 0), (1, 1)]


def test_actors_wait_for_the_learner(tmp_path, fake):
    config = settings(tmp_path, **{"run.steps": 10_000})
    with OnlineRun(config) as run:
        run.start()
        for _ in range(300):
            run.collect()
            taken = sum(w.collector.steps for w in fake.workers.values())
            ahead = run.collector._queued_rows
            assert ahead <= MAX_AHEAD * CHUNK_STEPS * len(run.envs), taken
        assert run.collector.metrics()["actors/queued_chunks"] <= MAX_AHEAD * 2


@pytest.mark.extended
def test_the_train_ratio_holds_and_old_weights_are_replaced(tmp_path, fake):
    flags = {"agent": "dreamer", "run.steps": 1600, "run.train_ratio": 4}
    config = settings(tmp_path, task="catch", **flags)
    path = train(config)
    metrics = lines(path / "metrics.jsonl")
    ratio = [x["replay/replay_ratio"] * x["replay/inserts"] for x in metrics[1:]]
    inserts = [x["replay/inserts"] for x in metrics[1:]]
    assert sum(ratio) / sum(inserts) == pytest.approx(4, rel=0.02)
    assert fake.shared > 1
    lags = [x["actors/policy_lag_max"] for x in metrics if "actors/policy_lag" in x]
    assert 0 < max(lags) <= MAX_AHEAD * CHUNK_STEPS * 4 * 4 / 80


@pytest.mark.extended
def test_a_lockstep_run_resumes_exactly(tmp_path, fake, monkeypatch):
    flags = {"agent": "dreamer", "task": "catch", "actors.lockstep": True}
    flags |= {"run.save_every": 60, "run.log_every": 30, "run.train_ratio": 4}
    presets = ["debug", "deterministic"]

    def config(name, steps):
        return settings(tmp_path / name, presets, **flags, **{"run.steps": steps})

    train(config("whole", 300))
    with monkeypatch.context() as patch:  # killed between two saves, within a round
        patch.setattr(OnlineRun, "collect", stops_after(80))
        with pytest.raises(KeyboardInterrupt):
            train(config("split", 200))
    train(config("split", 300))
    whole, split = (strip(read_state(tmp_path / x)) for x in ("whole", "split"))
    assert_same(whole, split)
    scores = [lines(tmp_path / x / "scores.jsonl") for x in ("whole", "split")]
    assert_same(*scores)
    assert_same(*(contents(config(x, 300)) for x in ("whole", "split")))


def test_environments_that_cannot_be_resumed_start_new_episodes(tmp_path, fake):
    train(settings(tmp_path, **{"run.steps": 250}))
    config = settings(tmp_path, **{"run.steps": 600})
    with OnlineRun(config) as run:
        run.start()
        while run.clock.running:
            run.collect()
        truncated = run.collector.metrics()["actors/truncated_episodes"]
        assert 0 < truncated <= 4
        check_steps(run.replay, truncated)


def test_an_error_of_an_environment_is_reported_after_its_rows(tmp_path, fake):
    config = settings(tmp_path, task="actor_helpers:make_failing")
    with pytest.raises(UserError, match=r"(?s)Actor \d: Environment.*motor.*Fix:"):
        train(config)
    with OnlineRun(config) as run:  # the rows before the error were saved
        assert run.checkpoints.paths()


def test_an_agent_with_its_own_schedule_collects_what_it_asks_for(tmp_path, fake):
    flags = {
        "task": "catch",
        "run.clock": "epochs",
        "iris.schedule.epochs": 2,
        "iris.schedule.collect_epochs": 2,
        "iris.schedule.first_steps": 40,
        "iris.schedule.steps": 20,
        "iris.training.tokenizer.batch": 2,
        "iris.training.tokenizer.steps": 1,
        "iris.training.tokenizer.first_steps": 1,
        "iris.training.world_model.batch": 2,
        "iris.training.world_model.steps": 1,
        "iris.training.world_model.start_after": 1,
        "iris.training.actor_critic.batch": 2,
        "iris.training.actor_critic.steps": 0,
        "iris.training.actor_critic.first_steps": 0,
        "run.log_every": 1,
    }
    flags |= {"agent": "iris", "iris.world_model.transformer.layers": 1}
    with OnlineRun(settings(tmp_path, ["debug", "iris_tiny"], **flags)) as run:
        run.start()
        epochs = []
        while run.clock.should_collect:
            run.collect()
        assert run.collector._queued_rows <= len(run.envs)
        assert all(w.agent.schedule.epoch == 1 for w in fake.workers.values())
        while not run.clock.should_collect:
            for _ in range(run.clock.updates_due(run.is_ready)):
                run.update()
        while run.clock.should_collect:
            run.collect()
            epochs += [w.agent.schedule.epoch for w in fake.workers.values()]
        assert epochs[-1] == 2


def test_what_actors_cannot_do_is_refused(tmp_path, fake):
    with pytest.raises(UserError, match=r"actors\.lockstep True"):
        train(settings(tmp_path / "a", ["debug", "deterministic"]))
    agent = RandomAgent({}, {}, RandomConfig(), BuildOptions(torch.device("cpu")))
    check_can_use_actors(agent, "random")
    agent.schedule = TrainRatio(1)
    with pytest.raises(UserError, match="env_steps_left"):
        check_can_use_actors(agent, "mine:Agent")

    class LocalAgent(RandomAgent):
        policy_rng = None

    agent = LocalAgent({}, {}, RandomConfig(), BuildOptions(torch.device("cpu")))
    with pytest.raises(UserError, match="CanActRemotely"):
        check_can_use_actors(agent, "mine:Agent")
    with pytest.raises(UserError, match="single environment object"):
        reverie.train(env=object(), actors__count=2, logdir=str(tmp_path / "c"))


def test_without_ray_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"(?s)ray package.*\[ray\]"):
        train(settings(tmp_path))
    assert not np.any(list(tmp_path.glob("ckpt/*")))
