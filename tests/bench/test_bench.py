"""`reverie bench`: numbers for any config, and where one is out of line."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from reverie.api import UserError
from reverie.bench import update as benches
from reverie.bench.update import Bench, BenchConfig, started
from reverie.cli.main import main
from reverie.run.config import resolve

QUICK = BenchConfig(repeats=2, seconds=0.0, steps=600)
SMALL = {"dreamer.batch_size": 2, "dreamer.batch_length": 4, "run.envs": 2}
FLAGS = {"task": "catch", **SMALL}
WORDS = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]


def test_the_command_prints_a_table_and_writes_the_numbers(tmp_path, capsys):
    output = tmp_path / "here" / "numbers.json"
    words = ["bench", "--configs", "debug", "--bench.seconds", "0", "--bench.repeats"]
    words += ["2", "--bench.steps", "600", "--bench.output", str(output)]
    assert main([*words, *WORDS]) == 0
    printed = capsys.readouterr().out
    for line in ("update, ms", "scan, ms", "policy, 16 envs", "replay sample, MB/s"):
        assert line in printed
    found = json.loads(output.read_text())
    assert found["about"]["versions"]["torch"]
    assert found["config"]["agent"] == "dreamer"
    results = found["results"]
    assert len(results["update_ms"]) == len(results["policy_ms"]["1"]) == 2
    assert results["first_update_s"] > 0
    assert {"feed", "encoder", "scan", "decoder", "imagination", "optimizer"} <= set(
        results["parts_ms"]
    )


def test_an_agent_without_parts_is_measured_as_a_whole(tmp_path, capsys):
    config = resolve(["debug"], flags={**FLAGS, "agent": "random"})
    options = BenchConfig(1, 0.0, 600, output=str(tmp_path / "x.json"))
    found = benches.bench(config, options)
    assert found["results"]["parts_ms"] == {}
    assert "sum of the parts" not in capsys.readouterr().out


def test_an_agent_that_watches_is_measured_with_its_sequences(tmp_path, capsys):
    output = tmp_path / "x.json"
    small = [
        "--vta.batch_size",
        "4",
        "--source.chunk",
        "8",
        "--source.refresh",
        "4",
    ]
    small += ["--vta.world.belief", "8", "--bench.seconds", "0"]
    words = ["bench", "--configs", "vta_balls_small", *small, "--bench.repeats", "2"]
    assert main([*words, "--bench.output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "batch, ms" in printed
    assert "sequences per second" in printed
    assert "environment" not in printed
    results = json.loads(output.read_text())["results"]
    assert len(results["update_ms"]) == len(results["batch_ms"]) == 2
    served = [4000 / ms for ms in results["batch_ms"]]
    assert results["sequences_per_s"] == pytest.approx(served)
    assert main([*words, "--compare", "--bench.output", str(output)]) == 0
    assert json.loads(output.read_text())["ratios"].keys() == {"update"}


def test_a_misspelt_option_is_told_with_its_whole_name(capsys):
    assert main(["bench", "--bench.sconds", "1"]) == 2
    assert "Did you mean 'bench.seconds'?" in capsys.readouterr().err


def test_of_what_is_watched_only_the_batch_can_grow(capsys):
    words = ["bench", "--configs", "vta_balls_small", "--bench.vary", "image"]
    assert main(words) == 2
    assert "--bench.vary batch" in capsys.readouterr().err


def test_waiting_for_others_is_no_part_of_the_first_update(tmp_path, monkeypatch):
    monkeypatch.setattr(benches, "the_machine", lambda alone: nullcontext(1e6))
    config = resolve(["debug"], flags={**FLAGS, "agent": "random"})
    options = BenchConfig(1, 0.0, 100, output=str(tmp_path / "x.json"))
    assert benches.bench(config, options)["results"]["first_update_s"] < 0


def test_a_lock_that_cannot_be_taken_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(benches.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"reverie-bench-{os.getuid()}.lock").mkdir()
    with pytest.raises(UserError, match="Fix: remove it"), benches.the_machine(True):
        pass


def test_plain_and_fast_take_turns_in_one_run(tmp_path, capsys):
    output = tmp_path / "x.json"
    words = ["bench", "--configs", "debug", "--compare", "--bench.seconds", "0"]
    words += ["--bench.repeats", "2", "--bench.steps", "600"]
    assert main([*words, *WORDS, "--bench.output", str(output)]) == 0
    found = json.loads(output.read_text())
    plain, fast = found["plain_ms"]["update"], found["fast_ms"]["update"]
    expected = [a / b for a, b in zip(plain, fast, strict=True)]
    assert found["ratios"]["update"] == pytest.approx(expected)
    assert {"  decoder", "policy, 1 env"} <= found["ratios"].keys()
    assert "--compile none / --compile auto" in capsys.readouterr().out


def test_calls_that_are_timed_together_alternate():
    config = resolve(["debug"], flags={**FLAGS, "agent": "random"})
    seen = []
    with Bench(config, QUICK) as subject:
        one, two = subject.time(lambda: seen.append(1), lambda: seen.append(2))
    assert len(one.ms) == len(two.ms) == 2
    switches = sum(a != b for a, b in itertools.pairwise(seen))
    assert switches == 5  # 1 and 2 to warm up, then 1 2 1 2


def test_the_replay_is_full_and_everything_is_let_go(tmp_path):
    config = resolve(["debug"], flags=FLAGS)
    with Bench(config, QUICK) as subject:
        subject.update()
        assert len(subject.replay) == subject.replay.capacity == 600
        assert subject.parameters() == subject.agent.opt.size
    assert not hasattr(subject, "agent")


def test_batches_can_be_cut_from_what_was_stored_to_time_it(monkeypatch):
    def many(subject, call):
        for _ in range(300):
            call()
        return [benches.Timing([1.0])]

    monkeypatch.setattr(Bench, "time", many)
    config = resolve(["iris_tiny"], flags={"task": "catch", "run.envs": 1})
    with Bench(config, replace(QUICK, steps=100)) as subject:
        subject.fill(100)
        rows = benches.sample(subject.replay.spaces, np.random.default_rng(0), 1)
        rows["is_first"][:] = True
        monkeypatch.setattr(benches, "sample", lambda *_: rows)
        assert subject.replay_rates()["sample"][0] > 0


def test_a_process_knows_when_it_began(monkeypatch):
    import time

    assert 0 < time.time() - started() < 24 * 3600
    monkeypatch.setattr(benches.Path, "read_text", lambda path: "nothing")
    monkeypatch.setattr(benches, "_LOADED", 7.0)
    assert started() == 7.0


def test_a_measurement_needs_repetitions():
    with pytest.raises(UserError, match=r"bench\.repeats 3"):
        BenchConfig(repeats=0)
