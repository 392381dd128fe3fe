"""`reverie push` and `hf://`: the files of a repository, and a local Hub."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hub_server import TOKEN, run_hub
from PIL import Image
from score_files import PACKAGE_FILES

import reverie
from reverie.api import UserError
from reverie.cli.main import main
from reverie.render.video import can_write_mp4
from reverie.results import push as pushing
from reverie.results.model_card import model_card
from reverie.run import hub as hubs

FILES = ["README.md", *PACKAGE_FILES]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local Hub, with a cache of downloads in the folder of the test."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with run_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


def metadata_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_dry_run_writes_all_files(trained, tmp_path, capsys):
    folder = tmp_path / "repository"
    words = ["push", str(trained), "user/catch", "--dry-run", str(folder)]
    assert main([*words, "--video", "False"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    card = (folder / "README.md").read_text()
    metadata = metadata_of(card)
    assert metadata["library_name"] == "reverie"
    assert "reinforcement-learning" in metadata["tags"]
    (entry,) = metadata["model-index"][0]["results"]
    assert entry["dataset"]["type"] == "catch"
    assert entry["metrics"][0]["type"] == "mean_reward"
    assert 'reverie.load("hf://user/catch")' in card
    assert main(words) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_a_video_is_written(trained, tmp_path, monkeypatch, capsys, suffix):
    if suffix == "mp4" and not can_write_mp4():
        pytest.skip("needs the extra video")
    monkeypatch.setattr(pushing, "video_suffix", lambda: suffix)
    monkeypatch.setattr("reverie.evaluation.recorders.video_suffix", lambda: suffix)
    monkeypatch.setattr(pushing, "MAX_FRAMES", 5)
    files = pushing.write_repository(trained, "user/name", tmp_path / "a")
    assert f"replay.{suffix}" in files
    content = (tmp_path / "a" / f"replay.{suffix}").read_bytes()
    card, error = (tmp_path / "a" / "README.md").read_text(), capsys.readouterr().err
    if suffix == "mp4":
        assert content[4:8] == b"ftyp"
        assert "`replay.mp4`" in card
        assert not error
    else:
        assert Image.open(io.BytesIO(content)).n_frames <= 5
        assert "](replay.gif)" in card
        assert "replay.mp4 needs imageio with ffmpeg.\n  Fix: pip install" in error


def test_an_environment_without_images_has_no_video(
    trained, tmp_path, monkeypatch, capsys
):
    def record(run, folder):
        raise UserError("This environment has no images.\n  Fix: remove --videos.")

    monkeypatch.setattr(pushing, "_record", record)
    files = pushing.write_repository(trained, "user/name", tmp_path / "a")
    assert files == FILES
    assert "There is no replay." in capsys.readouterr().err


def test_model_card_of_an_evaluated_agent():
    results = {"task": "reach", "agent": "bc", "seed": 1, "step": 5000, "updates": 90}
    evaluation = {"episodes": 20, "score": 0.75, "score_std": 0.5, "success": 0.8}
    origin = {"command": "reverie bc", "commit": "abc", "versions": {"torch": "2.9"}}
    training = {"score": 0.5, "window": "mean of episodes at 1 to 2 frames"}
    card = model_card(
        "user/name",
        {**results, **origin, "evaluation": evaluation, "training": training},
    )
    metrics = metadata_of(card)["model-index"][0]["results"][0]["metrics"]
    assert [(m["type"], m["value"]) for m in metrics] == [
        ("mean_reward", "0.75 +/- 0.5"),
        ("success_rate", "0.8"),
    ]
    assert "| evaluation, 20 episodes, success | 0.8 |" in card
    assert "| training, mean of episodes at 1 to 2 frames | 0.5 |" in card
    assert "commit abc of Reverie, torch 2.9" in card
    empty = model_card("user/name", results, "replay.mp4")
    assert "model-index" not in metadata_of(empty)
    assert "No episode had ended" in empty


def test_push_and_load(trained, hub, tmp_path, capsys):
    words = ["push", str(trained), "user/catch", "--video", "False"]
    assert main(words) == 0
    first = capsys.readouterr().out.strip()
    (commit,) = hub.repositories["user/catch"]
    assert first == f"hf://user/catch@{commit}"
    assert sorted(hub.repositories["user/catch"][commit]) == FILES

    latest = hub.commit("user/catch", {"evil.py": b"", "model.pkl": b""})
    agent = reverie.load("hf://user/catch")
    assert f"at commit {latest}" in capsys.readouterr().err
    obs = {"image": np.full(agent.obs_space["image"].shape, 100, np.uint8)}
    assert agent.act(obs) == reverie.load(trained).act(obs)
    read = {line.rpartition("/")[2] for line in hub.requests if line[:3] == "GET"}
    assert not {name for name in read if name.endswith((".py", ".pkl", ".md"))}

    assert main(["eval", f"hf://user/catch@{commit}", "--episodes", "2"]) == 0
    captured = capsys.readouterr()
    assert f"at commit {commit}" in captured.err
    assert "2 episodes" in captured.out
    expected = reverie.evaluate(trained, episodes=2).summary
    assert reverie.evaluate(f"hf://user/catch@{commit}", episodes=2).summary == expected

    with pytest.raises(UserError, match="has no such revision"):
        reverie.load("hf://user/catch@other")


def test_a_repository_that_is_not_a_package(hub):
    hub.commit("user/other", {"config.json": b"{}"})
    with pytest.raises(UserError, match="is not a package of Reverie"):
        reverie.load("hf://user/other")
    hub.commit("user/other", {"spaces.json": b"{}", "manifest.json": b"[]"})
    with pytest.raises(UserError, match="is not a mapping"):
        reverie.load("hf://user/other")
    with pytest.raises(UserError, match="no repository user/none that you may use"):
        reverie.load("hf://user/none")


def test_a_push_without_a_login_is_refused(trained, hub, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "another")
    assert main(["push", str(trained), "user/catch", "--video", "False"]) == 2
    error = capsys.readouterr().err
    assert "Fix:" in error
    assert "hf auth login" in error
    assert not hub.repositories


def test_the_hub_cannot_be_reached(tmp_path, monkeypatch, capsys):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["eval", "hf://user/catch"]) == 2
    assert "The Hub cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hf://user", "hf://a/b/c", "hf://../x", "hf://u/n@"])
def test_names_of_repositories(name):
    with pytest.raises(UserError, match="is not the name of a repository"):
        hubs.parse_name(name)
    assert hubs.is_hub_name(name)
    assert hubs.parse_name("user/a-b.c@v1") == ("user/a-b.c", "v1")
    assert hubs.parse_name(str(Path("hf://user/name"))) == ("user/name", None)


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"Fix: pip install .*\[hub\]"):
        reverie.load("hf://user/name")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["push", "RUN"], "Fix: reverie push LOGDIR user/name"),
        (["push", "RUN", "name", "--dry-run", "x"], "is not the name of a repository"),
        (["push", "RUN", "user/name@v1"], "Fix: reverie push"),
        (["push", "RUN", "user/name", "--publik", "1"], "has no option --publik"),
    ],
)
def test_invalid_commands_exit_with_2(
    words, complaint, trained, capsys, tmp_path, monkeypatch
):
    pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    words = [str(trained) if word == "RUN" else word for word in words]
    assert main(words) == 2
    assert complaint in capsys.readouterr().err


def test_results_of_an_evaluation_are_included(trained, tmp_path):
    reverie.evaluate(trained, episodes=2)
    try:
        pushing.write_repository(trained, "user/name", tmp_path / "a", video=False)
    finally:
        (trained / "eval.json").unlink()
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    assert results["evaluation"]["episodes"] == 2
