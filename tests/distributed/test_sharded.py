"""Runs in which every rank has its own environments and replay buffer."""

from __future__ import annotations

import dataclasses
import re
import shutil
import warnings
from pathlib import Path

import pytest
from runs import run
from test_updates import largest_error

from reverie.api import UserError
from reverie.datasets.readers.replay import ReplayReader
from reverie.rows import Window
from reverie.run import checkpoint, parts
from reverie.run.config import resolve
from reverie.run.folder import read_config
from reverie.run.parts import Shard
from reverie.run.train import train

SHARDED = {"replay.ranks": "sharded", "run.envs": 3, "task": "catch"}


def resume_alone(logdir: str) -> str:
    """Return the error of one process that resumes a run of several ranks."""
    config = read_config(Path(logdir))
    longer = dataclasses.replace(config.run, steps=100)
    with pytest.raises(UserError) as error:
        train(dataclasses.replace(config, run=longer))
    assert read_config(Path(logdir)) == config  # the saved settings did not change
    return str(error.value)


def run_with_warnings(logdir: str, steps: int, task: str) -> tuple[list[str], int]:
    """Return the warnings of this rank and the last number of environment errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(logdir, steps, {**SHARDED, "task": task})
    errors = [record.get("env/errors", 0) for record in result["log"]] if result else []
    return [str(x.message) for x in caught], int(max(errors, default=0))


@pytest.mark.extended
def test_rank_0_reports_what_happens_on_other_ranks(ranks, tmp_path):
    task, logdir = "env_failing_on_rank:FailingEnv", tmp_path / "run"
    (_, errors), _ = ranks.launch(2, run_with_warnings, str(logdir), 40, task)
    assert errors == 1
    shutil.rmtree(logdir / "replay" / "rank1")
    (messages, _), _ = ranks.launch(2, run_with_warnings, str(logdir), 50, task)
    assert messages
    for message in messages:
        assert re.search(r"^Rank 1: .*/rank1/.*The replay continues without", message)


@pytest.mark.extended
def test_a_sharded_run_is_resumed_exactly_by_the_same_number_of_ranks(ranks, tmp_path):
    whole, part = str(tmp_path / "whole"), str(tmp_path / "part")
    expected, _ = ranks.launch(2, run, whole, 60, SHARDED)
    ranks.launch(2, run, part, 42, SHARDED)
    assert "of this run is 2, but this command has 1" in resume_alone(part)
    actual, _ = ranks.launch(2, run, part, 60, SHARDED)
    assert largest_error(actual["agent"], expected["agent"]) == 0
    assert actual["log"][-1] == expected["log"][-1]

    saved = actual["checkpoint"]
    assert checkpoint.read_part(saved, "loop")["clock"]["updates"] >= 5
    replays = [checkpoint.read_part(saved, name) for name in ("replay", "replay_1")]
    assert [int(each["index"]["total"]) for each in replays] == [40, 20]
    names = ReplayReader(part).names()
    assert {name.split("_")[0] for name in names} == {"env0", "env1", "env2"}


def test_shards_divide_environments_and_batches():
    windows = {"train": Window(5, 4), "report": Window(5, 8)}
    shards = [Shard(rank, 3) for rank in range(3)]
    assert [shard.envs(4) for shard in shards] == [(2, 0), (1, 2), (1, 3)]
    assert [shard.windows(windows)["train"].batch for shard in shards] == [2, 2, 1]
    assert [set(shard.windows(windows)) for shard in shards] == [
        {"train", "report"},
        {"train"},
        {"train"},
    ]


def test_actors_and_a_sharded_replay_exclude_each_other(monkeypatch):
    monkeypatch.setattr(parts, "world_size", lambda: 2)
    with pytest.raises(UserError, match="Actors send their steps to rank 0"):
        parts.find_shard(resolve(flags={**SHARDED, "actors.count": 2}))
    with pytest.raises(UserError, match="every rank needs an environment"):
        parts.find_shard(resolve(flags={**SHARDED, "run.envs": 1}))
