"""The demo, shortened: it ends with a score, a curve and a dream one can open."""

from __future__ import annotations

from PIL import Image

from reverie.cli.main import main
from reverie.run.folder import resolve_logdir


def test_the_demo_prints_score_curve_and_video(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "demo --device cpu --run.steps 320 --run.train_ratio 2"
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    assert "over 100 episodes of catch" in said
    named = dict(
        line.strip().rsplit(None, 1) for line in said.splitlines() if "logdir/" in line
    )
    with Image.open(tmp_path / named["learning curve"]) as curve:
        assert curve.size[0] > 300
    with Image.open(tmp_path / named["open-loop video"]) as dream:
        assert dream.n_frames > 16
    # Again in the same folder: from scratch, as a demo should.
    assert main(words.split()) == 0


def test_a_demo_without_reports_prints_no_video(tmp_path, capsys, monkeypatch):
    def train(config):
        folder = resolve_logdir(config.logdir)
        folder.mkdir()
        (folder / "scores.jsonl").write_text('{"step": 1, "episode/score": 1}')

    monkeypatch.setattr("reverie.run.demo.train", train)
    monkeypatch.setattr("reverie.run.demo.evaluate", lambda *_: {"score": 1.0})
    words = ["demo", "--run.report_every", "0", "--logdir", str(tmp_path / "run")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "learning curve" in said
    assert "open-loop" not in said


def test_the_demo_deletes_only_run_folders(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert main(["demo", "--logdir", str(tmp_path / "mine")]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.tex").exists()
