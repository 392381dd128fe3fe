"""A shortened demo prints a score and writes a learning curve and a video."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
from PIL import Image

from reverie.cli.main import main
from reverie.run import demo
from reverie.run.folder import resolve_logdir


@pytest.mark.extended
def test_the_demo_prints_score_curve_and_video(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("reverie.render.video.can_write_mp4", lambda: False)
    monkeypatch.chdir(tmp_path)
    words = "demo --device cpu --run.steps 320 --run.train_ratio 2"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "over 100 episodes of catch" in out
    named = dict(
        line.strip().rsplit(None, 1) for line in out.splitlines() if "logdir/" in line
    )
    with Image.open(tmp_path / named["learning curve"]) as curve:
        assert curve.size[0] > 300
    with Image.open(tmp_path / named["open-loop video"]) as video:
        assert video.n_frames >= 16  # the repeated last frame is merged
    assert re.search(r"\n  (\S+ -m )?reverie play logdir/demo -w\n", out)
    assert (tmp_path / "logdir/demo/ckpt").is_dir()
    # a second demo in the same folder starts from scratch
    assert main(words.split()) == 0


def test_a_demo_without_reports_prints_no_video(tmp_path, capsys, monkeypatch):
    def train(config):
        folder = resolve_logdir(config.logdir)
        folder.mkdir()
        (folder / "scores.jsonl").write_text('{"step": 1, "episode/score": 1}')

    def evaluate(*_):
        return SimpleNamespace(summary={"score": 1.0})

    monkeypatch.setattr("reverie.run.demo.train", train)
    monkeypatch.setattr("reverie.run.demo.evaluate", evaluate)
    words = ["demo", "--run.report_every", "0", "--logdir", str(tmp_path / "run")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "learning curve" in out
    assert "open-loop" not in out


def test_the_demo_names_the_program_as_it_can_be_called(tmp_path, monkeypatch):
    program = tmp_path / ".venv" / "bin" / "reverie"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in (".venv/bin/reverie", str(program)):
        monkeypatch.setattr(sys, "argv", [name, "demo"])
        advice = demo._play_advice(tmp_path / "my runs")
        assert advice.endswith("\n  .venv/bin/reverie play 'my runs' -w\n")
    monkeypatch.setenv("PATH", str(program.parent))
    assert "\n  reverie play" in demo._play_advice(tmp_path)
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"{sys.executable} -m reverie play" in demo._play_advice(tmp_path)


def test_the_demo_installs_what_the_page_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "missing_packages", lambda names: ["uvicorn"])
    lines = demo._play_advice(tmp_path).splitlines()
    assert lines[1].startswith("  pip install ")
    assert "[play]" in lines[1]


def test_the_demo_deletes_only_run_folders(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert main(["demo", "--logdir", str(tmp_path / "mine")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.tex").exists()
