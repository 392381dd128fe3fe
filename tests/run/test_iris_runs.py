"""Runs of Δ-IRIS: epochs, resuming within an epoch, and evaluation."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from state_helpers import assert_same

from reverie.api import UserError
from reverie.bench.update import BenchConfig, bench_config
from reverie.evaluation.episodes import evaluate
from reverie.evaluation.follow import follow
from reverie.log.jsonl import read_lines
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import resolve
from reverie.run.folder import lock_folder
from reverie.run.online_run import OnlineRun
from reverie.run.train import train

SMALL = {
    "task": "catch",
    "device": "cpu",
    "run.envs": 2,
    "run.clock": "epochs",
    "run.log_every": 1,
    "run.save_every": 1,
    "run.report_every": 2,
    "replay.capacity": 300,
    "logger.outputs": ["jsonl"],
    "iris.schedule.epochs": 4,
    "iris.schedule.collect_epochs": 3,
    "iris.schedule.first_steps": 40,
    "iris.schedule.steps": 20,
    "iris.training.tokenizer.batch": 2,
    "iris.training.tokenizer.steps": 2,
    "iris.training.tokenizer.first_steps": 3,
    "iris.training.world_model.batch": 2,
    "iris.training.world_model.steps": 3,
    "iris.training.world_model.first_steps": 0,
    "iris.training.world_model.start_after": 1,
    "iris.training.actor_critic.batch": 3,
    "iris.training.actor_critic.steps": 2,
    "iris.training.actor_critic.first_steps": 2,
    "iris.actor_critic.horizon": 2,
    "iris.world_model.transformer.layers": 1,
}


def settings(logdir: Path, **more):
    flags = {"logdir": str(logdir), **SMALL, "deterministic": True, **more}
    return resolve(["iris_tiny"], flags={**flags, "logger.timing_metrics": False})


def read_state(path: Path) -> dict:
    newest = Checkpoints(path / "ckpt").newest()
    state = {p: checkpoint.read_part(newest, p) for p in ("agent", "collector", "loop")}
    state["loop"]["logger"].pop("sinks", None)  # byte offsets of this folder's files
    replay = checkpoint.read_part(newest, "replay")
    state["replay"] = {key: replay[key] for key in ("samplers", "episodes", "index")}
    return state


def lines(path: Path) -> list[dict]:
    return [json.loads(x) for x in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    return train(settings(tmp_path_factory.mktemp("iris") / "uninterrupted"))


@pytest.mark.extended
def test_the_run_ends_after_all_epochs_and_logs_each(uninterrupted):
    schedule = read_state(uninterrupted)["loop"]["clock"]["schedule"]
    assert schedule["epoch"] == 5  # four are done
    assert schedule["env_steps"] >= 40 + 2 * 20
    logged = lines(uninterrupted)
    updates = {"tokenizer": 3 + 3 * 2, "world_model": 3 * 3, "actor_critic": 4 * 2}
    opt = read_state(uninterrupted)["agent"]["opt"]
    for name, count in updates.items():
        assert float(opt[name]["step"]) == count
    means = [
        line["collect/return_mean"] for line in logged if "collect/episodes" in line
    ]
    assert len(means) == 3
    for line in logged:
        if "collect/return_mean" in line:
            spread = [
                line[f"collect/return_{k}"] for k in ("min", "mean", "max", "std")
            ]
            assert spread[0] <= spread[1] <= spread[2]
            assert spread[3] >= 0
    assert [line["train/epoch"] for line in logged] == [1, 2, 3, 4]
    assert any("train/loss/actor_critic/values" in line for line in logged)
    assert any("report/codebook/perplexity" in line for line in logged)


def until(run: OnlineRun, part: str, done: int):
    """Run the training loop up to the middle of a component's second epoch."""
    run.start()
    schedule = run.agent.schedule
    while True:
        if run.clock.should_collect:
            run.collect()
            run.logger.progress(run.clock.frames)
        for _ in range(run.clock.updates_due(run.is_ready)):
            if (schedule.epoch, schedule.component, schedule.updates) == (
                2,
                part,
                done,
            ):
                return
            run.logger.add(run.update(), prefix="train")
        if run.clock.every("report"):
            run.report(run.feed)
        if run.clock.every("log"):
            run.write_log()
        if run.clock.every("save"):
            run.save()


@pytest.mark.extended_except("world_model-2")
@pytest.mark.parametrize(
    ("part", "done"), [("tokenizer", 1), ("world_model", 2), ("actor_critic", 1)]
)
def test_a_kill_within_an_epoch_resumes_in_the_same_part(
    tmp_path, uninterrupted, part, done
):
    path = tmp_path / "run"
    config = settings(path)
    with OnlineRun(config) as run:
        until(run, part, done)
        run.save()
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    with OnlineRun(settings(copy)) as run:
        run.start()
        assert (run.agent.schedule.epoch, run.agent.schedule.component) == (2, part)
        assert run.agent.schedule.updates == done
        assert not run.clock.should_collect
    train(settings(copy))
    resumed, straight = read_state(copy), read_state(uninterrupted)
    for key in ("agent", "collector", "replay"):
        assert_same(resumed[key], straight[key], key)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, uninterrupted):
    path = tmp_path / "run"
    train(settings(path, **{"run.steps": 60}))  # during collection in the second epoch
    train(settings(path))
    assert_same(read_state(path), read_state(uninterrupted))
    steps = [line["step"] for line in lines(path)]
    assert steps.count(60) == 1  # the last line of the first part is kept
    others = [line for line in lines(path) if line["step"] != 60]
    assert_same(others, lines(uninterrupted))


@pytest.mark.extended
def test_a_real_kill_resumes(tmp_path):
    """Kill a run with SIGKILL during training, and resume it."""
    path = tmp_path / "run"
    flags = {**SMALL, "run.clock": "seconds", "run.save_every": -1}
    flags |= {"iris.training.tokenizer.first_steps": 100_000, "logdir": str(path)}
    words = [
        sys.executable,
        "-m",
        "reverie",
        "train",
        "--configs",
        "iris_tiny",
    ]
    for key, value in flags.items():
        words += [f"--{key}", str(value[0] if isinstance(value, list) else value)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not trained(path):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    with OnlineRun(resolve(["iris_tiny"], flags=flags)) as run:
        run.start()
        schedule, step = run.agent.schedule, run.clock.step
        assert schedule.component == "tokenizer"
        assert schedule.updates > 0
        assert not run.clock.should_collect
        assert float(run.agent.opt["tokenizer"].step) == schedule.updates
        run.update()
        assert float(run.agent.opt["tokenizer"].step) == schedule.updates
        assert run.clock.step == step


def trained(path: Path) -> bool:
    paths = Checkpoints(path / "ckpt").paths()
    try:
        loop = checkpoint.read_part(paths[-1], "loop")
    except (IndexError, UserError):  # none yet, or replaced by a newer one meanwhile
        return False
    return loop["clock"]["schedule"]["updates"] > 0


def test_checkpoints_of_epochs_are_kept_evaluated_and_resumed(tmp_path, capsys):
    outputs = ["terminal", "jsonl"]
    flags = {"run.keep_epochs": 2, "run.keep_last": 1, "logger.outputs": outputs}
    path = train(settings(tmp_path / "run", **flags))
    printed = capsys.readouterr()
    assert "4 epochs, at most 20,000 agent steps" in printed.err
    assert "epoch 1 of 4 (25%) · step " in printed.out
    assert "epoch 4 of 4 (100%) · step " in printed.out
    paths = Checkpoints(path / "ckpt").paths()
    assert [p.name.rpartition("-")[2] for p in paths] == [
        "epoch0002", "epoch0004", "epoch0004",
    ]  # fmt: skip
    loop = checkpoint.read_part(paths[0], "loop")
    assert loop["clock"]["completed_epochs"] == 2
    assert evaluate(paths[0], 1).checkpoint == paths[0].name

    def play(checkpoint):
        return evaluate(checkpoint, 1)

    names = [result.checkpoint for result in follow(path, play)]
    assert names == [paths[0].name, paths[1].name]  # the third one is the same
    assert [x["eval/epoch"] for x in read_lines(path / "eval/metrics.jsonl")] == [2, 4]
    for newer in paths[1:]:
        shutil.rmtree(newer)
    with OnlineRun(settings(path, **flags)) as run:
        run.start()
        assert run.clock.completed_epochs == 2
        assert run.status.line().startswith("loading the checkpoint")
        assert "epoch 2 of 4, step " in run.status.line()
    name = paths[0].name
    assert f"Resumed {name} at epoch 2 of 4, agent step" in capsys.readouterr().err


def test_progress_is_counted_in_steps_if_these_end_the_run(tmp_path, capsys):
    flags = {"run.steps": 50, "run.log_every": -1, "logger.outputs": ["terminal"]}
    train(settings(tmp_path / "run", **flags))
    assert re.search(r"epoch 1 · step \d+ of 50 \(", capsys.readouterr().out)


def test_components_of_another_run_can_be_loaded(tmp_path, uninterrupted):
    flags = {
        "run.from_checkpoint": str(uninterrupted),
        "run.from_components": "tokenizer",
    }
    old = read_state(uninterrupted)["agent"]
    with OnlineRun(settings(tmp_path / "run", seed=3, **flags)) as run:
        run.start()
        mine = run.agent.state_dict()
    assert_same(dict(mine["tokenizer"]), old["tokenizer"])
    with pytest.raises(AssertionError):
        assert_same(dict(mine["world_model"]), old["world_model"])


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path, uninterrupted):
    flags = {"run.from_checkpoint": str(uninterrupted), "iris.actor_critic.width": 32}
    with (
        pytest.raises(UserError, match=r"(?s)actor_critic.*Fix:"),
        OnlineRun(settings(tmp_path / "run", **flags)) as run,
    ):
        run.start()


def test_a_finished_run_can_be_resumed_with_more_epochs(uninterrupted, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(uninterrupted, copy)
    steps = read_state(copy)["loop"]["clock"]["step"]
    more = {"iris.schedule.epochs": 5, "iris.schedule.collect_epochs": 5}
    train(settings(copy, **more))
    clock = read_state(copy)["loop"]["clock"]
    assert clock["schedule"]["epoch"] == 6
    # the steps of the new epoch; the last epoch did not collect
    assert steps < clock["step"] <= steps + 2 * SMALL["iris.schedule.steps"]


def test_refused_settings_release_the_folder(uninterrupted, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(uninterrupted, copy)
    with pytest.raises(UserError, match="width") as refusal:
        train(settings(copy, **{"iris.actor_critic.width": 32}))
    assert refusal.value.__traceback__  # keeps references to the run
    lock_folder(copy).close()


def test_a_run_too_short_for_an_update_prints_a_message(tmp_path, capsys):
    train(settings(tmp_path / "run", **{"run.steps": 10}))
    assert "No update was run" in capsys.readouterr().err


def test_iris_is_evaluated_like_every_agent(uninterrupted, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(uninterrupted, copy)
    result = evaluate(copy, 4)
    assert len(result.episodes) == 4
    assert {episode["length"] for episode in result.episodes} == {3}


def test_evaluation_scores_have_mean_std_and_range(tmp_path):
    flags = {"run.eval_every": 2, "run.eval_envs": 2, "run.eval_eps": 4}
    path = train(settings(tmp_path / "run", **flags), evaluate=True)
    found = [line for line in lines(path) if "eval/episode/score" in line]
    assert found
    for key in ("score_std", "score_min", "score_max", "length"):
        assert f"eval/episode/{key}" in found[-1]


@pytest.mark.parametrize("agent", ["dreamer", "random"])
def test_the_clock_in_epochs_needs_an_agent_with_epochs(tmp_path, agent):
    config = resolve(
        ["debug"],
        flags={
            "task": "catch",
            "agent": agent,
            "run.clock": "epochs",
            "logdir": str(tmp_path / "run"),
        },
    )
    with pytest.raises(UserError, match="has no epochs"):
        train(config)


def test_bench_times_each_component_and_acting(tmp_path, capsys):
    output = tmp_path / "numbers.json"
    options = BenchConfig(1, 0.0, 200, output=str(output))
    bench_config(settings(tmp_path, deterministic=False), options)
    printed = capsys.readouterr().out
    found = json.loads(output.read_text())["results"]
    assert list(found["sections_ms"]) == ["tokenizer", "world_model", "actor_critic"]
    assert found["sections_gb"] == {}  # of a GPU
    assert found["policy_ms"].keys() == {"1", "16"}
    assert "  actor_critic, ms" in printed
