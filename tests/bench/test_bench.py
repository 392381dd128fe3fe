"""`reverie bench`: measurements of configs of all agents."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from reverie.api import UserError
from reverie.bench import update
from reverie.bench.update import BenchConfig, UpdateBenchmark, process_age
from reverie.cli.main import main
from reverie.run.config import resolve

QUICK = BenchConfig(repeats=2, seconds=0.0, steps=600)
SMALL = {"dreamer.batch_size": 2, "dreamer.batch_length": 4, "run.envs": 2}
FLAGS = {"task": "catch", **SMALL}
WORDS = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]


def test_command_prints_a_table_and_writes_json(tmp_path, capsys):
    output = tmp_path / "here" / "numbers.json"
    words = ["bench", "--configs", "debug", "--bench.seconds", "0", "--bench.repeats"]
    words += ["2", "--bench.steps", "600", "--bench.output", str(output)]
    assert main([*words, *WORDS]) == 0
    printed = capsys.readouterr().out
    for line in ("update, ms", "scan, ms", "policy, 16 envs", "replay sample, MB/s"):
        assert line in printed
    results = json.loads(output.read_text())
    assert results["about"]["versions"]["torch"]
    assert results["config"]["agent"] == "dreamer"
    results = results["results"]
    assert len(results["update_ms"]) == len(results["policy_ms"]["1"]) == 2
    assert results["first_update_s"] > 0
    assert {"feed", "encoder", "scan", "decoder", "imagination", "optimizer"} <= set(
        results["sections_ms"]
    )


def test_agent_without_sections_is_measured(tmp_path, capsys):
    config = resolve(["debug"], flags={**FLAGS, "agent": "random"})
    options = BenchConfig(1, 0.0, 600, output=str(tmp_path / "x.json"))
    results = update.bench_config(config, options)
    assert results["results"]["sections_ms"] == {}
    assert "sum of the sections" not in capsys.readouterr().out


def test_agent_on_sequences_is_measured(tmp_path, capsys):
    output = tmp_path / "x.json"
    small = [
        "--vta.batch_size",
        "4",
        "--sequences.chunk",
        "8",
        "--sequences.refresh",
        "4",
    ]
    small += ["--vta.world.belief", "8", "--bench.seconds", "0"]
    words = ["bench", "--configs", "vta_balls_small", *small, "--bench.repeats", "2"]
    assert main([*words, "--bench.output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "loading a batch, ms" in printed
    assert "loaded sequences per second" in printed
    assert "environment" not in printed
    results = json.loads(output.read_text())["results"]
    assert len(results["update_ms"]) == len(results["batch_ms"]) == 2
    served = [4000 / ms for ms in results["batch_ms"]]
    assert results["sequences_per_s"] == pytest.approx(served)
    assert main([*words, "--compare", "--bench.output", str(output)]) == 0
    assert json.loads(output.read_text())["ratios"].keys() == {"update"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--run.steps 100", "--run.steps has no effect"),
        ("--run.save-every 10", "--run.save-every has no effect"),
        ("--bench.updates 50", "--bench.updates has no effect without --end-to-end"),
        ("--bench.jobs 3", "--bench.jobs has no effect without --bench.vary"),
        ("--end-to-end --bench.repeats 5", "no effect with --end-to-end"),
        ("--devices 99", "cannot be divided among 99 processes"),
    ],
)
def test_options_without_effect_are_refused(words, message, capsys):
    command = ["bench", "--configs", "debug", "--task", "catch", *words.split()]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Fix: " in error


def test_misspelled_option_gets_a_suggestion(capsys):
    assert main(["bench", "--bench.sconds", "1"]) == 2
    assert "Did you mean 'bench.seconds'?" in capsys.readouterr().err


def test_only_the_batch_size_can_be_varied_for_sequences(capsys):
    words = ["bench", "--configs", "vta_balls_small", "--bench.vary", "image"]
    assert main(words) == 2
    assert "--bench.vary batch" in capsys.readouterr().err


def test_waiting_for_the_lock_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(update, "machine_lock", lambda exclusive: nullcontext(1e6))
    config = resolve(["debug"], flags={**FLAGS, "agent": "random"})
    options = BenchConfig(1, 0.0, 100, output=str(tmp_path / "x.json"))
    assert update.bench_config(config, options)["results"]["first_update_s"] < 0


def test_error_names_a_lock_file_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(update.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"reverie-bench-{os.getuid()}.lock").mkdir()
    with pytest.raises(UserError, match="Fix: rm "), update.machine_lock(True):
        pass


def test_compare_measures_plain_and_fast_alternately(tmp_path, capsys):
    output = tmp_path / "x.json"
    words = ["bench", "--configs", "debug", "--compare", "--bench.seconds", "0"]
    words += ["--bench.repeats", "2", "--bench.steps", "600"]
    assert main([*words, *WORDS, "--bench.output", str(output)]) == 0
    results = json.loads(output.read_text())
    plain, fast = results["plain_ms"]["update"], results["fast_ms"]["update"]
    expected = [a / b for a, b in zip(plain, fast, strict=True)]
    assert results["ratios"]["update"] == pytest.approx(expected)
    assert {"  decoder", "policy, 1 env"} <= results["ratios"].keys()
    assert "Speedup of --compile auto over --compile none" in capsys.readouterr().out


def test_functions_timed_together_alternate():
    config = resolve(["debug"], flags={**FLAGS, "agent": "random"})
    seen = []
    with UpdateBenchmark(config, QUICK) as benchmark:
        one, two = benchmark.time(lambda: seen.append(1), lambda: seen.append(2))
    assert len(one) == len(two) == 2
    switches = sum(a != b for a, b in itertools.pairwise(seen))
    assert switches == 5  # 1 and 2 to warm up, then 1 2 1 2


def test_replay_is_full_and_memory_is_released(tmp_path):
    config = resolve(["debug"], flags=FLAGS)
    with UpdateBenchmark(config, QUICK) as benchmark:
        benchmark.update()
        assert len(benchmark.replay) == benchmark.replay.capacity == 600
        assert benchmark.parameters() == benchmark.agent.opt.size
    assert not hasattr(benchmark, "agent")


def test_replay_rates_never_run_out_of_batches(monkeypatch):
    def many(benchmark, call):
        for _ in range(300):
            call()
        return [[1.0]]

    monkeypatch.setattr(UpdateBenchmark, "time", many)
    config = resolve(["iris_tiny"], flags={"task": "catch", "run.envs": 1})
    with UpdateBenchmark(config, replace(QUICK, steps=100)) as benchmark:
        benchmark.fill(100)
        rows = update.sample(benchmark.replay.spaces, np.random.default_rng(0), 1)
        rows["is_first"][:] = True
        monkeypatch.setattr(update, "sample", lambda *_: rows)
        assert benchmark.replay_rates()["sample"][0] > 0


def test_process_age(monkeypatch):
    import time

    assert 0 < process_age() < 24 * 3600
    monkeypatch.setattr(update.Path, "read_text", lambda path: "nothing")
    monkeypatch.setattr(update, "_IMPORT_TIME", time.time() - 7e5)
    assert process_age() == pytest.approx(7e5, abs=1000)


def test_benchmark_needs_repetitions():
    with pytest.raises(UserError, match=r"--bench\.repeats 1"):
        BenchConfig(repeats=0)
