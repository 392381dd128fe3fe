"""`--profile N`: a trace of updates for Perfetto and TensorBoard."""

from __future__ import annotations

import json

import pytest
from state_helpers import assert_same

from reverie.cli.main import main
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.profile import WARMUP_UPDATES

SMALL = ["--configs", "debug", "deterministic", "--task", "catch", "--run.envs", "2"]
SMALL += ["--dreamer.batch_size", "2", "--dreamer.batch_length", "4"]
SMALL += ["--run.log_every", "-1"]


def agent_state(path):
    newest = Checkpoints(path / "ckpt", 1).newest()
    return checkpoint.read_part(newest, "agent")


def test_the_trace_has_the_regions_of_the_loop_and_results_are_equal(tmp_path, capsys):
    for name, profile in {"plain": [], "profiled": ["--profile", "2"]}.items():
        words = ["train", *SMALL, "--run.steps", "24", *profile]
        assert main([*words, "--logdir", str(tmp_path / name)]) == 0
    (trace,) = (tmp_path / "profiled" / "profile").iterdir()
    assert (
        trace.name == f"updates-{WARMUP_UPDATES + 1}-{WARMUP_UPDATES + 2}.pt.trace.json"
    )
    assert str(trace) in capsys.readouterr().err
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X"]
    assert names.count("update") == names.count("sample") == 2
    assert {"policy", "env", "replay_add", "log", "aten::mul"} <= set(names)
    assert_same(agent_state(tmp_path / "plain"), agent_state(tmp_path / "profiled"))
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.parametrize("count", ["0", "-3"])
def test_a_trace_of_no_updates_is_refused(tmp_path, capsys, count):
    words = ["train", *SMALL, "--logdir", str(tmp_path / "run"), "--profile", count]
    assert main(words) == 2
    assert "Fix: --profile 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_trace_of_an_agent_that_does_not_train_is_refused(tmp_path, capsys):
    words = ["--task", "catch", "--agent", "random", "--logdir", str(tmp_path / "run")]
    assert main(["train", "--configs", "debug", *words, "--profile", "3"]) == 2
    assert "--profile has no effect" in capsys.readouterr().err


@pytest.mark.extended
def test_a_run_on_sequences_that_ends_early_writes_a_shorter_trace(tmp_path, capsys):
    words = ["train", "--configs", "vta_balls_small", "--vta.batch_size", "4"]
    words += ["--sequences.chunk", "8", "--sequences.refresh", "4"]
    words += ["--vta.world.belief", "8", "--logdir", str(tmp_path / "run")]
    assert main([*words, "--run.steps", "6", "--profile", "9"]) == 0
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert "updates-6-6" in trace.name
    assert "Trace of 1 updates" in capsys.readouterr().err
    words = ["train", "--logdir", str(tmp_path / "run"), "--profile", "9"]
    assert main([*words, "--run.steps", "8"]) == 0
    assert "No trace was written" in capsys.readouterr().err
