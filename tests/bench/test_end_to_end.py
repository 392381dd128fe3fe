"""`reverie bench --end-to-end`: where the wall time of a run goes."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

from reverie import envs
from reverie.bench.end_to_end import ALL_PARTS, MeasuredRun, bench_end_to_end
from reverie.bench.gpu_time import GpuTime, union_length
from reverie.bench.update import BenchConfig, process_age
from reverie.cli.main import main
from reverie.log.timer import Timer
from reverie.run.config import resolve
from reverie.run.train import train_online

SMALL = {"dreamer.batch_size": 2, "dreamer.batch_length": 4, "run.envs": 2}


def test_parts_of_every_phase_add_up_to_its_time(tmp_path, capsys):
    words = ["bench", "--end-to-end", "--configs", "debug", "--bench.updates", "3"]
    words += [w for key, value in SMALL.items() for w in (f"--{key}", str(value))]
    words += ["--run.log_every", "-1", "--logdir", str(tmp_path / "run")]
    assert main(words) == 0
    results = json.loads((tmp_path / "run" / "bench.json").read_text())["results"]
    total = 0.0
    for phase in results["phases"].values():
        parts = phase["parts_s"]
        assert set(ALL_PARTS) <= parts.keys()
        assert min(parts.values()) > -1e-6
        assert sum(parts.values()) == pytest.approx(phase["seconds"])
        total += phase["seconds"]
    assert total == pytest.approx(results["seconds"])
    start, training, end = results["phases"].values()
    assert start["parts_s"]["building and starting"] > 0
    for part in ("update", "acting", "environment", "replay", "log"):
        assert training["parts_s"][part] > 0, part
    assert training["parts_s"]["save"] == 0 < end["parts_s"]["save"]
    assert 0 < results["first_update_s"] < start["seconds"]
    updates = results["updates"]
    assert 3 <= updates <= 3 + 2  # an iteration of the loop has two updates
    assert results["updates_per_s"] == pytest.approx(updates / training["seconds"])
    assert "gpu_busy" not in results
    printed = capsys.readouterr().out
    assert all(f"  {part}" in printed for part in ALL_PARTS)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["bench.json"]


def test_phases_are_not_longer_than_the_process(tmp_path):
    """The collector is made after the timer has started, and counts once."""

    class Run(MeasuredRun):
        def _make_collector(self, random_agent):
            time.sleep(0.3)
            return super()._make_collector(random_agent)

        def _end_phase(self, name):
            super()._end_phase(name)
            # the age has a resolution of 0.01 s
            assert self.phases[name].seconds < process_age() + 0.1

    flags = {**SMALL, "task": "catch", "logdir": str(tmp_path / "run")}
    run = Run(resolve(["debug"], flags=flags), updates=1)
    train_online(run)
    assert len(run.phases) == 3


def test_time_of_a_slow_environment_is_its_own(tmp_path):
    class Slow:
        def __init__(self, env):
            self.env = env

        def __getattr__(self, name):
            return getattr(self.env, name)

        def step(self, action):
            time.sleep(0.05)
            return self.env.step(action)

    config = resolve(["debug"], flags={**SMALL, "task": "catch", "agent": "dreamer"})
    options = BenchConfig(updates=2, output=str(tmp_path / "x.json"))
    results = bench_end_to_end(config, options, lambda index: Slow(envs.make("catch")))
    results = results["results"]
    training = results["phases"]["training"]
    steps = round(results["agent_steps_per_s"] * training["seconds"])
    assert steps >= 2
    assert training["parts_s"]["environment"] >= 0.05 * steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--configs", "vta_balls_small"], "recorded data"),
        (["--configs", "debug", "--compare"], "cannot be combined"),
        (["--configs", "debug", "--run.steps", "8"], "--run.steps"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, capsys, words, message):
    logdir = ["--logdir", str(tmp_path / "run")]
    assert main(["bench", "--end-to-end", *words, *logdir]) == 2
    assert message in capsys.readouterr().err


def test_overlapping_work_counts_once():
    assert union_length([(5, 6), (0, 2), (1, 3), (1.5, 2)]) == 4


def test_gpu_time_of_graphs_and_of_work_without_a_graph(monkeypatch):
    """A fake device: its clock advances by the work that is queued."""
    now = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = now[0]

        def elapsed_time(self, other):
            return other.time - self.time

        def synchronize(self):
            pass

    class Graph:
        def replay(self):
            now[0] += 8

    fake = SimpleNamespace(
        Event=Event,
        Stream=type("Stream", (), {"synchronize": lambda self: None}),
        CUDAGraph=Graph,
        synchronize=lambda device: None,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    replay, timer = Graph.replay, Timer()
    with GpuTime(torch.device("cuda"), timer) as gpu:
        now[0] += 100
        gpu.restart()
        now[0] += 1
        with gpu.measure():  # only the graph counts, not the idle time before it
            now[0] += 2
            Graph().replay()
        with gpu.measure():
            now[0] += 4
        assert gpu.busy_seconds() == 0.012
        fake.Stream().synchronize()
    assert Graph.replay is replay
    assert timer.metrics()["timer/gpu_wait/avg_ms"] >= 0
