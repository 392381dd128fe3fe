"""`reverie bench --bench.vary`: scaling of the update time."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest
import torch

from reverie.bench import scaling, update
from reverie.bench.scaling import bench_scaling, deviations, scaling_table
from reverie.bench.update import BenchConfig, UpdateBenchmark, machine_lock
from reverie.run.config import resolve

SMALL = {"dreamer.batch_size": 2, "dreamer.batch_length": 4, "run.envs": 2}
FLAGS = {"task": "catch", **SMALL}


def test_scaling_is_printed_and_deviations_are_marked(monkeypatch, tmp_path, capsys):
    few = {n: ([], {r".*\.batch_size": n}) for n in (2, 4, 8)}
    monkeypatch.setitem(scaling.VARIANTS, "batch", few)
    options = BenchConfig(1, 0.0, 600, "batch", output=str(tmp_path / "x.json"))
    seen = []

    def more(presets, settings):
        config = resolve(["debug", *presets], flags={**FLAGS, **settings})
        seen.append(config.dreamer.batch_size)
        return config

    results = bench_scaling(more, options)
    assert seen == [2, 4, 8]
    assert [row["batch"] for row in results["scaling"]] == [2, 4, 8]
    assert results["scaling"][0]["parameters"] > 0
    assert "deviation" in capsys.readouterr().out
    rows = [
        {"batch": n, "parameters": 1e6, "update_ms": ms, "deviation": off}
        for n, ms, off in ((1, 1.0, 1.0), (2, 4.0, 1.5), (4, 8.0, 1.0))
    ]
    lines = scaling_table("batch", rows).splitlines()
    assert ["<--" in line for line in lines] == [False, False, True, False]


@pytest.mark.extended
def test_algorithms_are_compared_with_the_given_config(tmp_path, capsys, monkeypatch):
    few = ("default", "plan2explore", "dreamerv3_torch")
    monkeypatch.setattr(scaling, "ALGORITHMS", {k: scaling.ALGORITHMS[k] for k in few})
    options = BenchConfig(1, 0.0, 200, "algorithm", output=str(tmp_path / "x.json"))

    def more(presets, settings, base=()):
        names = [*base, "debug", *presets]
        return resolve(names, flags={**FLAGS, **settings})

    results = bench_scaling(more, options)
    rows = {row["algorithm"]: row for row in results["algorithm"]}
    assert tuple(rows) == few
    assert rows["plan2explore"]["parameters"] > rows["default"]["parameters"]
    assert all(row["update_ms"] > 0 for row in rows.values())
    table = capsys.readouterr().out.split("ratio\n")[1].splitlines()
    assert [line.split()[0] for line in table[:3]] == list(rows)
    assert table[0].endswith("1.00x")


def test_algorithms_that_do_not_change_the_agent_are_left_out():
    def more(presets, settings, base=()):
        names = [*base, "debug", "iris_tiny", *presets]
        return resolve(names, flags={"task": "catch", **settings})

    assert list(scaling.algorithm_configs(more)) == ["default", "plan2explore"]


def test_every_algorithm_differs_from_the_default():
    def more(presets, settings, base=()):
        return resolve([*base, "debug", *presets], flags={**FLAGS, **settings})

    configs = scaling.algorithm_configs(more)
    assert list(configs) == list(scaling.ALGORITHMS)


def test_every_variant_resolves():
    for name, variants in scaling.VARIANTS.items():
        for size, (presets, settings) in variants.items():
            config = resolve(["atari100k", *presets], flags=settings)
            results = {
                "size": config.dreamer.rssm.deter,
                "batch": config.dreamer.batch_size,
                "length": config.dreamer.batch_length,
                "image": config.env.resize[0],
            }[name]
            assert results == size or name == "size"


def test_power_law_has_no_deviations():
    sizes = [32, 64, 96, 128]
    np.testing.assert_allclose(deviations(sizes, [x**1.7 for x in sizes]), 1)
    off = deviations(sizes, [32, 64 * 1.4, 96, 128])
    assert off[1] == pytest.approx(1.4)
    assert off[2] < 1
    assert off[0] == off[3] == 1


def test_sizes_are_compared_by_their_parameters(monkeypatch, tmp_path):
    counts = {12: 10e6, 25: 24e6, 50: 42e6}
    few = {n: ([], {"seed": n}) for n in counts}
    monkeypatch.setitem(scaling.VARIANTS, "size", few)

    def measure(config, options, make_env):
        count = counts[config.seed]
        return {"parameters": count, "update_ms": count**0.7}

    monkeypatch.setattr(scaling, "measure_update", measure)
    options = BenchConfig(1, 0.0, 1, "size", output=str(tmp_path / "x.json"))
    results = bench_scaling(
        lambda _, settings: resolve(["debug"], flags=settings), options
    )
    assert [row["deviation"] for row in results["scaling"]] == pytest.approx([1, 1, 1])


def test_cudnn_algorithms_are_not_chosen_during_warm_up():
    cudnn = torch.backends.cudnn
    seen = []

    class Agent:
        def train(self, feed):
            seen.append((cudnn.benchmark, cudnn.deterministic))

    benchmark = UpdateBenchmark(resolve(["debug"]), BenchConfig())
    benchmark.agent, benchmark.feed = Agent(), None
    benchmark.replay = types.SimpleNamespace(capacity=0)
    benchmark.fill = lambda steps: None
    before = cudnn.benchmark, cudnn.deterministic
    benchmark.warm_up()
    assert seen == [(False, True)]
    assert (cudnn.benchmark, cudnn.deterministic) == before


def test_exclusive_lock_waits_for_shared_locks(monkeypatch, tmp_path):
    monkeypatch.setattr(update.tempfile, "gettempdir", lambda: str(tmp_path))
    order = []

    def time_alone():
        with machine_lock(exclusive=True):
            order.append("timed")

    waiting = threading.Thread(target=time_alone)
    with (
        machine_lock(exclusive=False),
        machine_lock(exclusive=False),
    ):  # two benchmarks warm up at the same time
        waiting.start()
        waiting.join(0.2)
        order.append("warm")
    waiting.join()
    assert order == ["warm", "timed"]


@pytest.mark.extended
def test_parallel_jobs_keep_the_order_of_configs(monkeypatch, tmp_path):
    few = {n: ([], {r".*\.batch_size": n}) for n in (4, 2)}
    monkeypatch.setitem(scaling.VARIANTS, "batch", few)
    output = str(tmp_path / "x.json")
    options = BenchConfig(1, 0.0, 300, "batch", jobs=2, output=output)
    flags = {**FLAGS, "agent": "random"}
    results = bench_scaling(
        lambda presets, _: resolve(["debug", *presets], flags=flags), options
    )
    assert [row["batch"] for row in results["scaling"]] == [4, 2]
    assert all(row["update_ms"] > 0 for row in results["scaling"])
