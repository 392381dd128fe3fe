"""`reverie bench --bench.vary`: how updates grow, and what is out of line."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest
import torch

from reverie.bench import scaling as growths
from reverie.bench import update as benches
from reverie.bench.scaling import growth, growth_table, trend
from reverie.bench.update import Bench, BenchConfig, the_machine
from reverie.run.config import resolve

SMALL = {"dreamer.batch_size": 2, "dreamer.batch_length": 4, "run.envs": 2}
FLAGS = {"task": "catch", **SMALL}


def test_growth_is_shown_and_what_is_off_the_trend_marked(
    monkeypatch, tmp_path, capsys
):
    few = {n: ([], {r".*\.batch_size": n}) for n in (2, 4, 8)}
    monkeypatch.setitem(growths.VARIANTS, "batch", few)
    options = BenchConfig(1, 0.0, 600, "batch", output=str(tmp_path / "x.json"))
    seen = []

    def more(blocks, settings):
        config = resolve(["debug", *blocks], flags={**FLAGS, **settings})
        seen.append(config.dreamer.batch_size)
        return config

    found = growth(more, options)
    assert seen == [2, 4, 8]
    assert [row["batch"] for row in found["growth"]] == [2, 4, 8]
    assert found["growth"][0]["parameters"] > 0
    assert "off trend" in capsys.readouterr().out
    rows = [
        {"batch": n, "parameters": 1e6, "update_ms": ms, "off_trend": off}
        for n, ms, off in ((1, 1.0, 1.0), (2, 4.0, 1.5), (4, 8.0, 1.0))
    ]
    lines = growth_table("batch", rows).splitlines()
    assert ["<--" in line for line in lines] == [False, False, True, False]


def test_every_variant_resolves():
    for name, variants in growths.VARIANTS.items():
        for size, (blocks, settings) in variants.items():
            config = resolve(["atari100k", *blocks], flags=settings)
            found = {
                "size": config.dreamer.rssm.deter,
                "batch": config.dreamer.batch_size,
                "length": config.dreamer.batch_length,
                "image": config.env.resize[0],
            }[name]
            assert found == size or name == "size"


def test_a_power_law_has_no_outliers_whatever_its_steps():
    sizes = [32, 64, 96, 128]
    np.testing.assert_allclose(trend(sizes, [x**1.7 for x in sizes]), 1)
    off = trend(sizes, [32, 64 * 1.4, 96, 128])
    assert off[1] == pytest.approx(1.4)
    assert off[2] < 1
    assert off[0] == off[3] == 1


def test_sizes_are_compared_by_what_they_have_and_not_by_their_names(
    monkeypatch, tmp_path
):
    counts = {12: 10e6, 25: 24e6, 50: 42e6}
    few = {n: ([], {"seed": n}) for n in counts}
    monkeypatch.setitem(growths.VARIANTS, "size", few)

    def measure(config, options, make_env):
        count = counts[config.seed]
        return {"parameters": count, "update_ms": count**0.7}

    monkeypatch.setattr(growths, "measure", measure)
    options = BenchConfig(1, 0.0, 1, "size", output=str(tmp_path / "x.json"))
    found = growth(lambda _, settings: resolve(["debug"], flags=settings), options)
    assert [row["off_trend"] for row in found["growth"]] == pytest.approx([1, 1, 1])


def test_algorithms_are_not_chosen_in_company():
    cudnn = torch.backends.cudnn
    seen = []

    class Agent:
        def train(self, feed):
            seen.append((cudnn.benchmark, cudnn.deterministic))

    subject = Bench(resolve(["debug"]), BenchConfig())
    subject.agent, subject.feed = Agent(), None
    subject.replay = types.SimpleNamespace(capacity=0)
    subject.fill = lambda steps: None
    before = cudnn.benchmark, cudnn.deterministic
    subject.warm_up()
    assert seen == [(False, True)]
    assert (cudnn.benchmark, cudnn.deterministic) == before


def test_a_config_is_timed_when_nobody_else_uses_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(benches.tempfile, "gettempdir", lambda: str(tmp_path))
    order = []

    def time_alone():
        with the_machine(alone=True):
            order.append("timed")

    waiting = threading.Thread(target=time_alone)
    with the_machine(alone=False), the_machine(alone=False):  # two warm up together
        waiting.start()
        waiting.join(0.2)
        order.append("warm")
    waiting.join()
    assert order == ["warm", "timed"]


def test_configs_brought_up_side_by_side_keep_their_order(monkeypatch, tmp_path):
    few = {n: ([], {r".*\.batch_size": n}) for n in (4, 2)}
    monkeypatch.setitem(growths.VARIANTS, "batch", few)
    output = str(tmp_path / "x.json")
    options = BenchConfig(1, 0.0, 300, "batch", at_once=2, output=output)
    flags = {**FLAGS, "agent": "random"}
    found = growth(lambda blocks, _: resolve(["debug", *blocks], flags=flags), options)
    assert [row["batch"] for row in found["growth"]] == [4, 2]
    assert all(row["update_ms"] > 0 for row in found["growth"])
