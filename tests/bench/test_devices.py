"""`reverie bench --devices N`: updates on one and on several devices."""

from __future__ import annotations

import pytest

from reverie.api import UserError
from reverie.bench import devices
from reverie.bench.devices import describe_speedup
from reverie.bench.update import BenchConfig
from reverie.cli.bench import bench
from reverie.distributed import collective
from reverie.run.config import resolve


def test_a_small_speedup_means_that_more_devices_will_not_help():
    assert describe_speedup(1.9, 2) == "2 devices are 1.90 times as fast as one."
    assert "More devices will not help" in describe_speedup(1.9, 4)


def test_devices_and_another_comparison_are_refused():
    with pytest.raises(UserError, match="measure on a single device"):
        bench(["--configs", "debug", "--devices", "2", "--compare"])


class OneRank:
    """Trains the agent of the benchmark without other ranks."""

    closed = False

    def __init__(self, agent):
        self.agent = agent

    def train(self, feed):
        return self.agent.train(feed)

    def close(self):
        OneRank.closed = True


def test_one_and_all_devices_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(devices, "world_size", lambda: 2)
    monkeypatch.setattr(devices, "make_leader", lambda _, agent, *__: OneRank(agent))
    options = BenchConfig(repeats=1, seconds=0.0, steps=200)
    flags = {"task": "catch", "logdir": str(tmp_path)}
    results = devices.bench_devices(resolve(["debug"], flags=flags), options)
    assert results["devices"] == 2
    assert min(*results["alone_ms"], *results["together_ms"]) > 0
    assert OneRank.closed
    assert "2 devices are" in capsys.readouterr().out


@pytest.mark.extended
def test_updates_in_a_process_group_of_one_rank_are_measured(tmp_path, capsys):
    options = BenchConfig(repeats=1, seconds=0.0, steps=200, process_group=True)
    flags = {"task": "catch", "logdir": str(tmp_path)}
    results = devices.bench_process_group(resolve(["debug"], flags=flags), options)
    assert min(*results["without_group_ms"], *results["with_group_ms"]) > 0
    assert "The process group adds" in capsys.readouterr().out
    assert collective.world_size() == 1
