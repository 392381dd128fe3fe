"""Programs in `benchmarks/` that evaluate or record finished runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(ROOT / "tools"))

import run_benchmarks  # noqa: E402

from reverie.campaign.queue import Queue, QueuedRun  # noqa: E402
from reverie.play.controls import make_controls  # noqa: E402
from reverie.play.messages import encode_view  # noqa: E402
from reverie.play.pane_images import PaneImage  # noqa: E402
from reverie.play.session import View  # noqa: E402
from reverie.spaces import Space  # noqa: E402


def load(name):
    """Import a program by its file name."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", FOLDER / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_bench_lists_every_program():
    assert set(run_benchmarks.PROGRAMS) == {path.stem for path in FOLDER.glob("*.py")}


def test_without_a_gpu_only_programs_that_need_one_or_finished_runs_are_skipped():
    reasons = {
        name: run_benchmarks.skip_reason(program, has_gpu=False)
        for name, program in run_benchmarks.PROGRAMS.items()
    }
    needs_gpu = {name for name, reason in reasons.items() if "CUDA GPU" in reason}
    assert needs_gpu == {"scan", "iris", "curves", "vta_balls"}
    records_runs = {
        name for name, reason in reasons.items() if "finished run" in reason
    }
    assert records_runs == {"atari100k", "iris_crafter"}
    for name in needs_gpu:
        assert not run_benchmarks.skip_reason(run_benchmarks.PROGRAMS[name], True)


@pytest.mark.parametrize("name", run_benchmarks.PROGRAMS)
def test_arguments_of_make_bench_are_valid(name, tmp_path, monkeypatch):
    program = run_benchmarks.PROGRAMS[name]
    if program.skip_reason or not program.arguments:
        return
    parse = argparse.ArgumentParser.parse_known_args

    def parse_only(self, *args):
        _, others = parse(self, *args)
        assert all("." in word for word in others), others  # settings of runs
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
    monkeypatch.syspath_prepend(str(FOLDER))
    words = program.arguments.format(out=tmp_path).split()
    monkeypatch.setattr("sys.argv", [name, *words])
    with pytest.raises(KeyboardInterrupt):
        load(f"{name}.py").main()


def test_make_bench_reports_skipped_and_failed_programs(tmp_path, monkeypatch, capsys):
    programs = {
        "good": run_benchmarks.Program("--out {out}/x"),
        "bad": run_benchmarks.Program(),
        "slow": run_benchmarks.Program(),
        "kernels": run_benchmarks.Program(gpu_reason="it measures kernels"),
    }
    (tmp_path / "good.py").write_text("import sys; print('words', *sys.argv[1:])")
    (tmp_path / "bad.py").write_text("import sys; sys.exit('no result')")
    (tmp_path / "slow.py").write_text("import time; time.sleep(20)")
    monkeypatch.setattr(run_benchmarks, "PROGRAMS", programs)
    monkeypatch.setattr(run_benchmarks, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(run_benchmarks, "TIMEOUT", 1.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "out"
    assert run_benchmarks.main([str(out)]) == 1
    text = capsys.readouterr().out
    assert f"words --out {out}/x" in text
    assert "bad.py failed with exit code 1" in text
    assert "slow.py did not end within 1 s" in text
    assert "kernels.py is skipped: it needs a CUDA GPU, because it measures" in text
    assert text.splitlines()[-1] == "These benchmarks failed: bad, slow"
    assert (out / "good.txt").read_text() == f"words --out {out}/x\n"
    assert run_benchmarks.main([str(out), "good", "kernels"]) == 0


def test_equal_learning_curves_agree_and_different_ones_do_not():
    curves = load("curves.py")
    rng = np.random.default_rng(0)

    def make_runs(slope, *offsets):
        steps = np.repeat(np.arange(8, 808, 8), 8)  # eight environments
        noise = rng.normal(size=(len(offsets), len(steps))) * 0.1
        means = [slope * steps / 800 + offset for offset in offsets]
        return [list(zip(steps, run, strict=True)) for run in np.array(means) + noise]

    plain = make_runs(1, -0.05, 0, 0.05)
    equal, different = make_runs(1, -0.04, 0.01, 0.04), make_runs(0.5, -0.05, 0, 0.05)
    steps, binned = curves.bin_scores({"plain": plain, "fast": equal})
    assert binned["plain"].shape == (3, len(steps)) == (3, 16)
    np.testing.assert_allclose(binned["plain"].mean(0), steps / 800, atol=0.2)
    assert curves.compare(binned)["agree"]
    _, binned = curves.bin_scores({"plain": plain, "fast": different})
    assert not curves.compare(binned)["agree"]


def write_atari_run(run, game, score, finished=True, start="10:00", flags=""):
    """Write the files of a run of 440 seconds; scores count from frame 340,000 or
    380,000 on."""
    run.mkdir(parents=True)
    scores = {100_000: 0, 350_000: score - 5, 390_000: score + 5, 440_000: score}
    lines = [
        json.dumps({"step": frame, "seconds": frame / 1000, "episode/score": value})
        for frame, value in scores.items()
    ]
    (run / "scores.jsonl").write_text("\n".join(lines) + "\n")
    (run / "config.yaml").write_text(f"task: atari100k_{game}\nseed: 3\n")
    words = f"train --configs size12m --task atari100k_{game} --logdir {run} --seed 3"
    command = ["/bin/reverie", *words.split(), *flags.split()]
    time = f"2026-01-01T{start}:00+0000"
    about = {"command": command, "gpu": "H200", "time": time}
    about |= {"finished": True} if finished else {}
    (run / "about.json").write_text(json.dumps([about]))


@pytest.mark.extended
def test_atari_campaign_is_recorded_with_scores_index_curves_and_table(
    tmp_path, monkeypatch, capsys
):
    campaign, out = tmp_path / "campaign", tmp_path / "benchmarks" / "atari100k"
    queue = Queue(campaign)
    campaign.mkdir()
    queue.add([QueuedRun(name, name, "", 3, []) for name in ("krull", "pong", "hero")])
    queue.open_worker()
    for status in queue.statuses():
        name = status.run.name
        write_atari_run(campaign / "runs" / name, name, 10, finished=name != "hero")
        claim = queue.claim(status)
        if name != "hero":  # which is still running
            queue.end_attempt(claim, "finished")
    out.mkdir(parents=True)
    readme = out.parent / "README.md"
    readme.write_text("# A\n<!-- begin atari100k -->\nold\n<!-- end atari100k -->\nB\n")
    words = ["atari100k.py", str(campaign), "--out", str(out), "--commit", "abc"]
    monkeypatch.setattr("sys.argv", words)
    program = load("atari100k.py")
    monkeypatch.setattr(program, "RESAMPLES", 20)  # of the intervals
    program.main()
    files = sorted(path.name for path in out.iterdir())
    assert files == [
        *("krull-seed3.jsonl", "krull.png", "pong-seed3.jsonl", "pong.png"),
        "runs.json",
    ]
    entry = json.loads((out / "runs.json").read_text())["krull-seed3.jsonl"]
    assert entry["command"] == (
        "reverie train --configs size12m --task atari100k_krull --seed 3"
    )
    assert (entry["commit"], entry["gpu"], entry["seconds"]) == ("abc", "H200", 440)
    assert entry["settings"]["size"] == "size12m"
    text = readme.read_text()
    assert "old" not in text
    assert text.endswith("<!-- end atari100k -->\nB\n")
    (row,) = [line for line in text.splitlines() if "[Krull]" in line]
    # mean of three episodes, and of the one between frames 380,000 and 400,000
    assert "| 3 | 10 ± 5 | 3 | 15 | 1 | 7,935 ± 785 |" in row
    copy = tmp_path / "copy" / "atari100k"
    monkeypatch.setattr("sys.argv", ["atari100k.py", str(out), "--out", str(copy)])
    program.main()  # merges another recorded folder
    assert (copy / "runs.json").read_text() == (out / "runs.json").read_text()
    assert row in capsys.readouterr().out
    hero = ["atari100k.py", str(campaign / "runs" / "hero"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", hero)
    with pytest.raises(SystemExit, match="has not finished"):
        program.main()
    monkeypatch.setattr("sys.argv", [*hero, "--frames", "4e5"])
    program.main()
    assert "stopped after 440,000 frames" in readme.read_text()


def test_atari_runs_keep_what_is_recorded_and_say_what_ran_at_the_same_time(
    tmp_path, monkeypatch, capsys
):
    campaign, out = tmp_path / "campaign", tmp_path / "benchmarks" / "atari100k"
    runs = {
        "krull": ("krull", "10:00", "--dreamer.harmony True"),
        "pong": ("pong", "10:07", ""),
        "hero": ("hero", "10:14", ""),
        "gopher": ("gopher", "10:30", ""),
    }
    queue = Queue(campaign)
    campaign.mkdir()
    queue.add([QueuedRun(name, name, "", 3, []) for name in runs])
    queue.open_worker()
    for status in queue.statuses():
        game, start, flags = runs[status.run.name]
        folder = campaign / "runs" / status.run.name
        write_atari_run(folder, game, 10, game != "hero", start, flags)
        result = "finished" if game != "hero" else "stopped"
        queue.end_attempt(queue.claim(status), result, seconds=450)
    recorded = tmp_path / "recorded"
    write_atari_run(recorded, "krull", 20)
    program = load("atari100k.py")
    monkeypatch.setattr(program, "RESAMPLES", 20)  # of the intervals
    for path, commit in ((recorded, "abc"), (campaign, "def")):
        words = ["atari100k.py", str(path), "--out", str(out), "--commit", commit]
        monkeypatch.setattr("sys.argv", words)
        program.main()
    index = json.loads((out / "runs.json").read_text())
    notes = {name: entry["note"] for name, entry in index.items()}
    assert notes == {
        "gopher-seed3.jsonl": "no other run of the campaign at the same time",
        "krull-harmony-seed3.jsonl": "at the same time as Pong",
        "krull-seed3.jsonl": "",
        "pong-seed3.jsonl": "at the same time as Hero, Krull harmony",
    }
    text = capsys.readouterr().out
    assert "hero has not finished (440,000 frames)" in text
    assert "number of runs per commit: abc (1), def (3)" in text
    standard, _, with_options = text.rpartition("Runs with the options `harmony`:")
    (row,) = [x for x in standard.splitlines() if "(atari100k/krull-seed3" in x][1:]
    assert "| 20 ± 5 |" in row
    assert "(atari100k/krull-harmony-seed3.jsonl)" in with_options
    assert "[Gopher]" not in with_options


@pytest.mark.parametrize(
    "name", ["curves.py", "atari100k.py", "vta_balls.py", "iris_crafter.py"]
)
def test_program_prints_help(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        load(name).main()
    assert "usage:" in capsys.readouterr().out


def test_crafter_run_is_recorded_with_imagined_and_collected_rewards(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    scores = [(500, 1.0), (900, 3.0), (1500, 4.0), (2500, 6.0)]
    lines = [json.dumps({"step": k, "episode/score": v}) for k, v in scores]
    (run / "scores.jsonl").write_text("\n".join(lines))
    crafter = load("iris_crafter.py")
    names = crafter.REWARD_METRICS
    imagined, collected = names["imagined"], names["collected"]
    metrics = [{"step": 1, collected: 0.1}, {"step": 2, imagined: 0.3, collected: 0.2}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    rewards = crafter.read_rewards(run / "metrics.jsonl")
    assert rewards == {"imagined": [(2, 0.3)], "collected": [(1, 0.1), (2, 0.2)]}
    crafter.record(run, out, "crafter", first=1000)
    first, *tenths = capsys.readouterr().out.splitlines()
    assert first.endswith("2.00 ± 0.71, 2 episodes")  # random steps
    assert [line.split()[4] for line in tenths] == ["4.00", "6.00"]
    files = sorted(path.name for path in out.iterdir())
    assert files == ["crafter-dreams.png", "crafter-seed0.jsonl", "crafter.png"]


def test_settings_of_vta_variants_exist():
    from reverie.worlds.vta.config import VTAConfig

    for _, settings in load("vta_balls.py").VARIANTS.values():
        VTAConfig(**settings)


@pytest.mark.extended
def test_crafter_worlds_are_those_of_the_original(monkeypatch, capsys):
    pytest.importorskip("crafter")
    monkeypatch.setattr("sys.argv", ["crafter_worlds.py", "--worlds", "1"])
    load("crafter_worlds.py").main()  # compares the worlds
    assert "ratio" in capsys.readouterr().out


def test_the_client_of_play_speed_reads_views_and_controls():
    client = load("play_speed.py")
    space = {"action": Space(np.int32, (), 0, 3)}
    controls = make_controls(space, ("left", "stay", "right"))
    keys = client.single_keys([asdict(control) for control in controls])
    assert keys == ["ArrowLeft", "ArrowRight"]
    image = PaneImage("real", np.zeros((8, 8, 3), np.uint8))
    header = client.decode(encode_view(View(3, {"number": 3}, [image])))
    assert (header["number"], len(header["images"])) == (3, 1)
