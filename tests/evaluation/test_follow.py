"""`reverie eval --follow`: evaluate the checkpoints of a run while it is trained."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from reverie.api import UserError
from reverie.cli.main import main
from reverie.evaluation import follow as module
from reverie.evaluation.episodes import evaluate
from reverie.evaluation.follow import follow, wait_for_checkpoint
from reverie.log.jsonl import read_lines
from reverie.run.checkpoint import Checkpoints, read_part
from reverie.run.config import resolve
from reverie.run.load import UntrainedPolicy
from reverie.run.train import train

FLAGS = {
    "task": "catch",
    "device": "cpu",
    "env.repeat": 2,
    "run.envs": 2,
    "run.clock": "steps",
    "run.log_every": 100,
    "run.report_every": 0,
    "run.save_every": 100,
    "run.keep_last": 100,
    "logger.outputs": "jsonl",
}


def settings(path: Path, **more):
    return resolve(["debug"], flags={**FLAGS, "logdir": str(path), **more})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("follow") / "run"
    return train(settings(path, **{"run.steps": 300}))


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def play(path: Path):
    return evaluate(path, 2, [("run.eval_envs", 1)])


def test_every_checkpoint_of_a_finished_run_is_evaluated_once(run):
    results = list(follow(run, play))
    saved = [path.name for path in Checkpoints(run / "ckpt").paths()]
    assert [result.checkpoint for result in results] == saved[:3]
    metrics = read_lines(run / "eval/metrics.jsonl")
    assert [line["step"] for line in metrics] == [200, 400, 600]  # frames
    assert [x["eval/episode/score"] for x in metrics] == [
        result.summary["score"] for result in results
    ]
    paths = Checkpoints(run / "ckpt").paths()[:3]
    loops = [read_part(path, "loop") for path in paths]
    assert [x["eval/updates"] for x in metrics] == [
        loop["clock"]["updates"] for loop in loops
    ]
    for line, loop in zip(metrics, loops, strict=True):  # time of the checkpoint
        assert line["seconds"] >= round(loop["logger"]["seconds"], 3)
    scores = read_lines(run / "eval/scores.jsonl")
    assert [x["eval/episode/length"] for x in scores] == [
        result.summary["length"] for result in results
    ]
    assert list(follow(run, play)) == []
    assert read_lines(run / "eval/metrics.jsonl") == metrics


def test_a_run_without_metrics_files_is_evaluated_once(run):
    config = (run / "config.yaml").read_text()
    assert "- jsonl" in config
    (run / "config.yaml").write_text(config.replace("- jsonl", "- media"))
    (newest,) = Checkpoints(run / "ckpt").paths()[-1:]
    for path in Checkpoints(run / "ckpt").paths()[:-1]:
        shutil.rmtree(path)
    assert [x.checkpoint for x in follow(run, play)] == [newest.name]
    assert list(follow(run, play)) == []


def test_new_checkpoints_are_waited_for(run, monkeypatch):
    """The last checkpoint is added when the follower waits for it."""
    *_, second, final = Checkpoints(run / "ckpt").paths()
    moved = run / "moved"
    final.rename(moved)
    shutil.rmtree(second)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            moved.rename(final)

    monkeypatch.setattr(module.time, "sleep", sleep)
    names = [result.checkpoint for result in follow(run, play, poll=0.5)]
    assert len(names) == 3
    assert names[-1] == final.name
    assert waits == [0.5, 0.5]


def test_checkpoints_that_are_deleted_meanwhile_are_skipped(run):
    first, *others = Checkpoints(run / "ckpt").paths()

    def delete_first(path):
        if path == first:
            shutil.rmtree(path)
        return play(path)

    names = [result.checkpoint for result in follow(run, delete_first)]
    assert names == [path.name for path in others[:2]]


def test_other_errors_are_raised(run):
    def fail(path):
        raise UserError("The environment is missing.")

    with pytest.raises(UserError, match="environment is missing"):
        list(follow(run, fail))


def test_an_untrained_policy_is_refused_and_skipped(tmp_path, capsys):
    path = train(settings(tmp_path / "run", **{"run.steps": 8}))
    assert (
        read_part(Checkpoints(path / "ckpt").newest(), "loop")["clock"]["updates"] == 0
    )
    with pytest.raises(UntrainedPolicy, match="has not been trained yet"):
        evaluate(path, 1)
    assert main(["eval", str(path)]) == 2
    message = capsys.readouterr().err
    assert f"reverie train --logdir {path}" in message
    assert list(follow(path, play)) == []
    assert main(["eval", str(path), "--follow"]) == 0
    assert "no new checkpoint with a trained policy" in capsys.readouterr().err
    random = settings(tmp_path / "random", agent="random", **{"run.steps": 8})
    assert evaluate(train(random), 1).summary["count"] == 1
    weights = {"run.from_checkpoint": str(path), "run.steps": 8}
    imported = train(settings(tmp_path / "imported", **weights))
    assert evaluate(imported, 1).summary["count"] == 1


def test_a_follower_that_starts_first_waits_for_the_run(finished, tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        wait_for_checkpoint(tmp_path)
    shutil.copy(finished / "config.yaml", tmp_path)
    timer = threading.Timer(
        0.1, shutil.copytree, (finished / "ckpt", tmp_path / "ckpt")
    )
    timer.start()
    wait_for_checkpoint(tmp_path, poll=0.01)
    timer.join()
    assert Checkpoints(tmp_path / "ckpt").paths()


@pytest.mark.extended
def test_the_command_follows_a_training_in_another_process(tmp_path, capsys):
    path = tmp_path / "run"
    words = ["train", "--configs", "debug", "--run.steps", "300"]
    for key, value in {**FLAGS, "logdir": path}.items():
        words += [f"--{key}", str(value)]
    command = [sys.executable, "-m", "reverie", *words]
    training = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not (path / "config.yaml").exists():
            assert training.poll() is None
        assert main(["eval", str(path), "--follow", "--episodes", "1"]) == 0
    finally:
        assert training.wait(120) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split("-")[0] for line in out] == [
        f"{step:012d}" for step in (100, 200, 300)
    ]
    assert all("catch: score" in line for line in out)
    assert len(read_lines(path / "eval/metrics.jsonl")) == 3


def test_two_runs_cannot_be_followed(finished, capsys):
    assert main(["eval", str(finished), str(finished), "--follow"]) == 2
    assert f"reverie eval {finished} --follow" in capsys.readouterr().err


def test_a_training_that_no_longer_evaluates_prints_so(tmp_path, capsys):
    more = {"run.eval_every": 30, "run.eval_envs": 1}
    train(settings(tmp_path / "run", **more, **{"run.steps": 8}), evaluate=True)
    train(settings(tmp_path / "run", **more, **{"run.steps": 16}), evaluate=True)
    assert "evaluated regularly" not in capsys.readouterr().err
    train(settings(tmp_path / "run", **more, **{"run.steps": 24}))
    message = capsys.readouterr().err
    assert f"reverie train_eval --logdir {tmp_path / 'run'}" in message
    state = json.loads(
        (Checkpoints(tmp_path / "run/ckpt").newest() / "loop.json").read_text()
    )
    assert state["evaluates"] is False
