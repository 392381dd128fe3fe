"""Stepping environments while the agent trains does not change the results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from state_helpers import assert_same
from test_loops import lines, settings
from test_resume import read_state, strip

from reverie.api import UserError
from reverie.envs.suites.catch import Catch
from reverie.evaluation import episodes as evaluate_module
from reverie.evaluation.episodes import evaluate
from reverie.run.device import pick_overlap
from reverie.run.online_run import OnlineRun
from reverie.run.train import train


@pytest.mark.extended_except("2")
@pytest.mark.parametrize("workers", [0, 2])
def test_overlap_does_not_change_the_results(tmp_path, workers):
    flags = {
        "run.steps": 160,
        "run.report_every": 0,
        "env.vector.workers": workers,
        "logger.timing_metrics": False,
    }
    paths = [
        train(settings(tmp_path / mode, "catch", **flags, **{"run.overlap": mode}))
        for mode in ("off", "on")
    ]
    assert_same(*(strip(read_state(path))["agent"] for path in paths))
    assert_same(*(lines(path / "scores.jsonl") for path in paths))


def test_training_continues_between_send_and_recv(tmp_path):
    config = settings(tmp_path, "catch", **{"run.overlap": "on"})
    with OnlineRun(config) as run:
        run.start()
        before = run.collect()
        with pytest.raises(AssertionError, match="recv before"):
            run.envs.send({"action": before.values["action"]})
        run.collector.wait()
        run.collector.wait()  # nothing was sent in between
        after = run.collect()
        assert not np.array_equal(after.values["image"], before.values["image"])


def test_an_error_during_an_environment_step_saves_the_run(tmp_path, capsys):
    config = settings(tmp_path, "catch", **{"run.overlap": "on"})

    def fail_in_third_step():
        with OnlineRun(config) as run:
            run.start()
            for _ in range(3):
                run.collect()
                if run.clock.step == 6:
                    raise ValueError("an error after the step")

    with pytest.raises(ValueError, match="an error after the step"):
        fail_in_third_step()
    assert "Saved at agent step 6" in capsys.readouterr().err
    with OnlineRun(config) as run:
        run.start()
        assert run.clock.step == len(run.replay) == 6


def test_overlap_is_used_on_gpus_but_not_in_deterministic_runs(tmp_path):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert pick_overlap("auto", cuda, deterministic=False)
    assert not pick_overlap("auto", cuda, deterministic=True)
    assert not pick_overlap("auto", cpu, deterministic=False)
    assert pick_overlap("on", cpu, deterministic=False)
    flags = {"deterministic": True, "run.overlap": "on"}
    with pytest.raises(UserError, match=r"--run\.overlap auto"):
        settings(tmp_path, **flags)


@pytest.mark.extended
def test_evaluations_work_with_overlap(tmp_path):
    flags = {"run.steps": 120, "run.eval_every": 50, "run.overlap": "on"}
    path = train(settings(tmp_path, "catch", **flags), evaluate=True)
    assert any("eval/episode/score" in line for line in lines(path / "metrics.jsonl"))


@pytest.mark.extended
def test_evaluations_use_workers_where_training_does(tmp_path, monkeypatch):
    flags = {"run.steps": 40, "run.eval_envs": 3, "agent": "random"}
    path = train(settings(tmp_path, "catch", **flags))
    asked = []
    make = evaluate_module.make_envs

    def spy(config, count, *rest):
        asked.append(config.env.vector.workers)
        return make(config, count, *rest)

    monkeypatch.setattr(evaluate_module, "make_envs", spy)
    here = evaluate(path, episodes=6)
    there = evaluate(path, episodes=6, flags=[("run.overlap", "on")])
    evaluate(path, episodes=1, flags=[("run.overlap", "on")])  # a single environment
    chosen = [("run.overlap", "on"), ("env.vector.workers", 1)]
    evaluate(path, episodes=2, flags=chosen)
    evaluate(path, 2, [("run.overlap", "on")], make_env=lambda index: Catch(seed=index))
    assert asked == [0, -1, 0, 1, 0]
    for result in (here, there):
        assert len(result.episodes) == 6


def test_all_updates_get_the_same_feed(tmp_path, monkeypatch):
    """Agents reuse the memory of the batches of a feed, as inputs of a CUDA graph."""
    feeds = []
    monkeypatch.setattr(
        "reverie.run.base_run.train_or_abort",
        lambda agent, feed, device: feeds.append(feed) or {},
    )
    with OnlineRun(settings(tmp_path, "catch")) as run:
        run.start()
        run.update()
        run.update()
        assert feeds[0] is feeds[1]
        assert feeds[0].served == run.feed.served
