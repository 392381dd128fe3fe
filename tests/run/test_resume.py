"""A run that was killed and resumed is bitwise equal to an uninterrupted one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from state_helpers import assert_same

from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import resolve
from reverie.run.online_run import OnlineRun
from reverie.run.train import train

SMALL_IMAGES = {"env.dummy.size": (16, 16), r"dreamer\.(enc|dec)\.mults": (4, 4)}


def settings(logdir: Path, steps: int, task: str, storage: str, **more):
    flags = {
        "logdir": str(logdir),
        "task": task,
        "run.steps": steps,
        "run.envs": 2,
        "run.train_ratio": 8,
        "run.log_every": 30,
        "run.save_every": 60,
        "run.report_every": 70,
        "replay.capacity": 160,
        "replay.storage": storage,
        "device": "cpu",
        "logger.outputs": "jsonl",
        **more,
    }
    return resolve(["debug", "deterministic"], flags=flags)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_state(path: Path) -> dict:
    newest = Checkpoints(path / "ckpt").newest()
    parts = ("agent", "collector", "loop")
    return {part: checkpoint.read_part(newest, part) for part in parts}


def contents(config) -> dict:
    """Return the contents of the replay, and its next batch."""
    with OnlineRun(config) as run:
        run.start()
        replay = run.replay
        served = {name: replay.sample(name) for name in run.agent.windows}
        counts = {
            key: value for key, value in replay.metrics().items() if key[-3:] != "_gb"
        }
        return {"len": len(replay), "served": served, "counts": counts}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function that trains once per settings and returns the config."""
    configs = {}

    def run(steps: int, task: str, storage: str, evaluate: bool = False, **flags):
        key = (steps, task, storage, evaluate, *flags.items())
        if key not in configs:
            path = tmp_path_factory.mktemp("uninterrupted")
            configs[key] = settings(path, steps, task, storage, **flags)
            train(configs[key], evaluate=evaluate)
        return configs[key]

    return run


@pytest.mark.extended_except("catch-disk")
@pytest.mark.parametrize(
    ("task", "storage"),
    [
        ("catch", "ram"),
        ("catch", "disk"),
        ("dummy_disc", "disk"),
        pytest.param("dummy_disc", "ram", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path, uninterrupted, task, storage
):
    flags = SMALL_IMAGES if task == "dummy_disc" else {}
    whole = uninterrupted(220, task, storage, **flags)
    split = settings(tmp_path / "split", 220, task, storage, **flags)
    train(settings(tmp_path / "split", 130, task, storage, **flags))
    # Killed after that save: what was written later must have no effect.
    with (tmp_path / "split" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9999, "torn')
    (tmp_path / "split" / "ckpt" / ".partial-000000000999-000099").mkdir()
    train(split)

    assert_same(*(strip(read_state(Path(c.logdir))) for c in (whole, split)))
    for name in ("metrics.jsonl", "scores.jsonl"):
        old, new = (lines(Path(c.logdir) / name) for c in (whole, split))
        # the last line of the first part is kept
        new = [line for line in new if name == "scores.jsonl" or line["step"] != 130]
        assert_same(old, new, name)
    assert_same(contents(whole), contents(split))


@pytest.mark.extended_except("120")
@pytest.mark.parametrize("end", [100, 120])  # of the first part; one is due for a log
def test_extending_a_finished_run_loses_no_line(
    tmp_path, monkeypatch, uninterrupted, end
):
    once = {"run.save_every": 100}
    whole_path = Path(uninterrupted(160, "catch", "ram", **once).logdir)
    path = tmp_path / "split"
    train(settings(path, end, "catch", "ram", **once))
    first = lines(path / "metrics.jsonl")
    assert [line["step"] for line in first].count(end) == 1
    assert any(key.startswith("report/") for key in first[-1])
    train(settings(path, end, "catch", "ram", **once))  # nothing is left to do
    assert lines(path / "metrics.jsonl") == first

    logs = {"run.log_every": 10}
    with monkeypatch.context() as patch:
        patch.setattr(OnlineRun, "collect", stops_after(12))  # before the next save
        with pytest.raises(KeyboardInterrupt):
            train(settings(path, 160, "catch", "ram", **once, **logs))
    assert len(lines(path / "metrics.jsonl")) > len(first)
    train(settings(path, 160, "catch", "ram", **once))
    whole, split = (lines(x / "metrics.jsonl") for x in (whole_path, path))
    assert split[: len(first)] == first
    last = {k: v for k, v in first[-1].items() if not k.startswith("report/")}
    assert_same(
        [line for line in whole if line["step"] != end],
        [line for line in split if line["step"] != end],
    )
    for line in whole:
        assert line["step"] != end or last.items() <= line.items()
    assert_same(lines(whole_path / "scores.jsonl"), lines(path / "scores.jsonl"))


def stops_after(calls: int):
    """Return `OnlineRun.collect` that stops the process instead of its last call."""
    original, left = OnlineRun.collect, iter(range(calls - 1))

    def collect(self):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return original(self)

    return collect


def strip(state: dict) -> dict:
    """Remove the byte offsets of log files, which differ between folders."""
    state["loop"]["logger"].pop("sinks", None)
    return state


@pytest.mark.extended
def test_a_kill_after_a_save_resumes_from_the_save(tmp_path, uninterrupted):
    """The folder is copied after the run has continued beyond the checkpoint."""
    whole = uninterrupted(220, "catch", "disk")
    killed = tmp_path / "killed"
    config = settings(killed, 220, "catch", "disk", **{"run.keep_last": 2})
    with OnlineRun(config) as run:
        run.start()
        while run.clock.step < 170:  # saves at 60, 120; then no more
            run.collect()
            for _ in range(run.clock.updates_due(run.feed.ready("train"))):
                run.logger.add(run.update(), prefix="train")
            if run.clock.every("report") and run.feed.ready("report"):
                run.logger.add(run.agent.report(run.feed), prefix="report")
            if run.clock.every("log"):
                run.write_log()
            if run.clock.every("save"):
                run.save()
    copy = tmp_path / "copy"
    shutil.copytree(killed, copy)
    resumed = settings(copy, 220, "catch", "disk")
    train(resumed)
    assert_same(strip(read_state(Path(whole.logdir))), strip(read_state(copy)))
    assert_same(contents(whole), contents(resumed))


def test_other_seeds_give_other_runs(tmp_path):
    a = train(settings(tmp_path / "a", 100, "catch", "ram"))
    b = train(settings(tmp_path / "b", 100, "catch", "ram", seed=1))
    with pytest.raises(AssertionError):
        assert_same(read_state(a)["agent"]["pol"], read_state(b)["agent"]["pol"])


def eval_contents(config) -> dict:
    """Return the rows of the evaluation replay and the states of its environments."""
    with OnlineRun(config, evaluate=True) as run:
        run.start()
        replay = run.evaluator.feed.replay
        ids = np.arange(replay.index.first, replay.index.total)
        rows = {k: space.zeros(len(ids)) for k, space in replay.spaces.items()}
        assert replay.read(ids, rows)
        return {"ids": ids, "rows": rows, "state": run.evaluator.state_dict()}


class Killed(BaseException):
    """Ends a run without a save."""


@pytest.mark.extended_except("130")
@pytest.mark.parametrize("kill_at", [50, 130])
def test_a_killed_run_evaluates_as_an_uninterrupted_one(
    tmp_path, monkeypatch, uninterrupted, kill_at
):
    flags = {"run.eval_every": 50, "run.eval_envs": 2, "run.eval_eps": 3}
    whole = uninterrupted(220, "catch", "ram", evaluate=True, **flags)
    killed = settings(tmp_path / "killed", 220, "catch", "ram", **flags)
    collect = OnlineRun.collect

    def collect_or_die(run):
        if run.clock.step >= kill_at:
            raise Killed
        return collect(run)

    with monkeypatch.context() as patch:
        patch.setattr(OnlineRun, "collect", collect_or_die)
        with pytest.raises(Killed):
            train(killed, evaluate=True)
    train(killed, evaluate=True)

    assert_same(*(strip(read_state(Path(c.logdir))) for c in (whole, killed)))
    for name in ("metrics.jsonl", "scores.jsonl"):
        assert_same(*(lines(Path(c.logdir) / name) for c in (whole, killed)), name)
    keys = {key for line in lines(tmp_path / "killed/metrics.jsonl") for key in line}
    assert {"eval/episode/score", "eval/loss/image"} <= keys
    assert_same(eval_contents(whole), eval_contents(killed))


@pytest.mark.extended
def test_a_run_can_be_resumed_with_and_without_evaluation(tmp_path):
    flags = {"run.eval_every": 50, "run.eval_envs": 2}
    train(settings(tmp_path, 120, "catch", "ram", **flags), evaluate=True)
    assert list((tmp_path / "eval_replay").iterdir())
    train(settings(tmp_path, 160, "catch", "ram", **flags))
    train(settings(tmp_path, 220, "catch", "ram", **flags), evaluate=True)
    flags["run.eval_envs"] = 3
    path = train(settings(tmp_path, 280, "catch", "ram", **flags), evaluate=True)
    assert (
        "evaluator"
        in checkpoint.read_manifest(Checkpoints(path / "ckpt").newest())["parts"]
    )
