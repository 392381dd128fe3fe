"""`reverie bench --bench.vary`: how updates grow, and what is out of line."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from reverie.run import bench as benches
from reverie.run import growth as growths
from reverie.run.bench import BenchConfig, the_machine
from reverie.run.config import resolve
from reverie.run.growth import growth, growth_table, trend

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
