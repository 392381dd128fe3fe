"""Run the commands of the pages about sharing agents and about figures."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hub_server import TOKEN, run_hub
from score_files import write_run

import reverie
from reverie.cli.main import main
from reverie.play.load import load_run
from reverie.run.package import run_path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "train --configs debug --task catch --run.steps 100 --logger.outputs jsonl"


def printed(page: str, *names: str) -> list[list[str]]:
    """Return the commands in the code blocks of a page, as words."""
    blocks = (ROOT / "docs" / page).read_text().split("```")[1::2]
    lines = [shlex.split(line) for text in blocks for line in text.splitlines()]
    return [
        words[1:] for words in lines if words[:1] == ["reverie"] and words[1] in names
    ]


def test_commands_of_the_page_about_sharing(tmp_path, monkeypatch, capsys):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN.split(), "--logdir", "logdir/catch"]) == 0
    commands = printed("share.md", "pack", "push", "eval", "play")
    assert [words[0] for words in commands] == [
        *("pack", "eval", "play"),
        *("push", "eval", "play"),
        "push",
    ]
    with run_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        for words in commands:
            if words[0] == "play":  # without its server
                assert not load_run(run_path(words[1])).unavailable_reasons()[
                    "agent-env"
                ]
            else:
                more = ["--episodes", "2"] if words[0] == "eval" else []
                assert main([*words, *more]) == 0
    reverie.load("catch.reverie")
    assert (tmp_path / "upload" / "README.md").is_file()
    assert capsys.readouterr().out.count("2 episodes") == 2


@pytest.mark.extended
def test_commands_about_tables_and_figures(tmp_path, monkeypatch):
    monkeypatch.setattr("reverie.results.statistics.RESAMPLES", 20)
    monkeypatch.setattr("reverie.results.curves.RESAMPLES", 10)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for seed in range(2):
        for task in ("atari100k_boxing", "atari100k_pong"):
            write_run(tmp_path / "logdir" / f"{task}-{seed}", task, seed)
    commands = printed("viewing-results.md", "report", "plot")
    assert len(commands) == 4
    for words in commands:
        assert main(words) == 0
        for name in words[words.index("--out") + 1 :] if "--out" in words else []:
            assert name[:2] == "--" or name == "dreamerv3" or Path(name).stat().st_size
