"""The programs in `benchmarks/` that judge or record what runs have left behind."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", FOLDER / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_curves_that_lie_apart_are_told_from_those_that_do_not():
    curves = load("curves.py")
    rng = np.random.default_rng(0)

    def runs(slope, *offsets):
        steps = np.repeat(np.arange(8, 808, 8), 8)  # of eight environments
        noise = rng.normal(size=(len(offsets), len(steps))) * 0.1
        means = [slope * steps / 800 + offset for offset in offsets]
        return [list(zip(steps, run, strict=True)) for run in np.array(means) + noise]

    plain = runs(1, -0.05, 0, 0.05)
    same, other = runs(1, -0.04, 0.01, 0.04), runs(0.5, -0.05, 0, 0.05)
    steps, binned = curves.binned({"plain": plain, "fast": same})
    assert binned["plain"].shape == (3, len(steps)) == (3, 16)
    np.testing.assert_allclose(binned["plain"].mean(0), steps / 800, atol=0.2)
    assert curves.verdict(binned)["within_the_spread"]
    _, binned = curves.binned({"plain": plain, "fast": other})
    assert not curves.verdict(binned)["within_the_spread"]


def test_a_finished_atari_run_is_recorded_with_its_curve(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    out.mkdir()
    scores = {100_000: 5, 350_000: 10, 400_000: 20}
    lines = [json.dumps({"step": k, "episode/score": v}) for k, v in scores.items()]
    (run / "scores.jsonl").write_text("\n".join(lines))
    rates = [{"fps/policy": x, "usage/gpu": 0.5} for x in (1, 290, 310, 2)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rates)))
    (run / "config.yaml").write_text("task: atari100k_krull\nseed: 3\n")
    row = load("atari100k.py").record(run, out)
    assert row["score"] == "15.0 ± 7.1"  # of episodes after frame 340,000
    assert row["episodes"] == 2
    assert row["steps/s"] == "290 to 310"  # neither the start nor the end
    assert row["seconds"] == "?"
    kept = sorted(path.name for path in out.iterdir())
    assert kept == ["krull-seed3.jsonl", "krull.png"]


@pytest.mark.parametrize("name", ["curves.py", "atari100k.py"])
def test_a_program_says_what_it_does(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        load(name).main()
    assert "usage:" in capsys.readouterr().out


def test_a_run_on_crafter_is_drawn_beside_what_its_dreams_promise(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    scores = [(500, 1.0), (900, 3.0), (1500, 4.0), (2500, 6.0)]
    lines = [json.dumps({"step": k, "episode/score": v}) for k, v in scores]
    (run / "scores.jsonl").write_text("\n".join(lines))
    dreamt, collected = "train/actor_critic/dream_reward", "collect/reward_mean"
    metrics = [{"step": 1, collected: 0.1}, {"step": 2, dreamt: 0.3, collected: 0.2}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    crafter = load("iris_crafter.py")
    rewards = crafter.read_rewards(run / "metrics.jsonl")
    assert rewards == {"dreamt": [(2, 0.3)], "collected": [(1, 0.1), (2, 0.2)]}
    crafter.record(run, out, "crafter", first=1000)
    first, *tenths = capsys.readouterr().out.splitlines()
    assert first.endswith("2.00 ± 0.71, 2 episodes")  # at random
    assert [line.split()[4] for line in tenths] == ["4.00", "6.00"]
    kept = sorted(path.name for path in out.iterdir())
    assert kept == ["crafter-dreams.png", "crafter-seed0.jsonl", "crafter.png"]
