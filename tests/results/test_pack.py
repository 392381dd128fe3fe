"""`reverie pack`: a trained agent as one file, and what is refused when it is read."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz_files import mutate
from score_files import PACKAGE_FILES

import reverie
from reverie.api import UserError
from reverie.cli.main import main
from reverie.results.pack import _without_arrays, open_for_package, write_package_file
from reverie.run import package
from reverie.run.checkpoint import find_checkpoint, read_part


@pytest.fixture
def packed(trained, tmp_path) -> Path:
    return write_package_file(open_for_package(trained), tmp_path / "agent.reverie")


def cached(tmp_path: Path) -> list[Path]:
    """Return the configs of all unpacked packages."""
    return sorted((tmp_path / "cache").rglob("config.yaml"))


def rewrite(path: Path, changes: dict[str, bytes | None]) -> Path:
    """Write a package again with other files; None removes a file."""
    with zipfile.ZipFile(path) as archive:
        files: dict[str, bytes | None] = {
            n: archive.read(n) for n in archive.namelist()
        }
    target = path.with_name("changed.reverie")
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in (files | changes).items():
            if data is not None:
                archive.writestr(name, data)
    return target


def test_a_package_has_weights_and_no_optimizer(trained, packed):
    with zipfile.ZipFile(packed) as archive:
        names = archive.namelist()
        settings = json.loads(archive.read("config.json"))
        results = json.loads(archive.read("results.json"))
    assert sorted(names) == PACKAGE_FILES
    assert str(trained) not in json.dumps(settings)
    assert (results["task"], results["seed"]) == ("catch", 3)
    assert results["command"].startswith("reverie train --configs debug")
    assert "frames" in results["training"]["window"]

    full = read_part(find_checkpoint(trained), "agent")
    state = read_part(find_checkpoint(package.run_path(packed)), "agent")
    assert torch.equal(state["enc"]["cnn0.weight"], full["enc"]["cnn0.weight"])
    assert "mu" in full["opt"]
    assert not state["opt"]["mu"]
    assert state["opt"]["step"] == full["opt"]["step"]  # scalars are kept


def test_a_folder_with_the_files_of_a_package(packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(packed) as archive:
        archive.extractall("download")
    Path("download/README.md").write_text("text")
    assert package.run_path("download") == package.run_path(packed)
    Path("download/agent.safetensors").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with pytest.raises(
        UserError, match=r"download is not .* has no agent\.safetensors"
    ):
        package.run_path("download")


def test_a_checkpoint_without_a_run_is_refused(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(packed) as archive:
        archive.extractall("download")
    Path("download/config.json").unlink()
    assert main(["eval", "download"]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_arrays_are_left_out():
    state = {
        "a": np.zeros(2),
        "b": [np.float64(1), torch.zeros(1)],
        "c": torch.tensor(4),
    }
    assert _without_arrays(state) == {"b": [1.0], "c": torch.tensor(4)}


def test_a_package_acts_and_scores_like_its_run(trained, packed, tmp_path, capsys):
    results = [
        reverie.evaluate(path, episodes=4, task="catch").episodes
        for path in (trained, packed)
    ]
    assert results[0] == results[1]
    players = [reverie.load(path) for path in (trained, packed)]
    obs = {"image": np.full(players[0].obs_space["image"].shape, 100, np.uint8)}
    assert players[0].act(obs) == players[1].act(obs)
    assert len(cached(tmp_path)) == 1  # unpacked once
    assert "unpacked to" in capsys.readouterr().err


@pytest.mark.slow
def test_a_package_scores_the_same_in_another_process(trained, packed, tmp_path):
    outputs = []
    for path in (trained, packed):
        command = [
            sys.executable,
            "-m",
            "reverie",
            "eval",
            str(path),
            "--episodes",
            "4",
        ]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        outputs.append(process.stdout)
    assert outputs[0] == outputs[1]
    assert "4 episodes" in outputs[0]


def test_commands(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["pack", str(trained), "mine"]) == 0
    assert capsys.readouterr().out.startswith("mine.reverie (")
    assert main(["eval", "mine.reverie", "--episodes", "2"]) == 0
    assert "2 episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["pack"], "Fix: reverie pack LOGDIR"),
        (["pack", "RUN"], "Fix: reverie pack LOGDIR"),
        (["pack", "RUN", "--out", "x"], "Fix: reverie pack --help"),
        (["pack", "nowhere", "a.reverie"], "nowhere does not exist"),
        (["pack", "RUN", "a.reverie", "--fast", "1"], "no option --fast"),
        (["pack", "RUN", "no/folder/a.reverie"], "a.reverie"),
        (["eval", "none.reverie"], "Fix: write it with `reverie pack"),
        (
            ["eval", "text.reverie"],
            "is not a package of Reverie: it cannot be",
        ),
    ],
)
def test_invalid_commands_exit_with_2(
    words, complaint, trained, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("text.reverie").write_text("text")
    words = [str(trained) if word == "RUN" else word for word in words]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Fix:" in error


def manifest(**changes) -> bytes:
    data = {"format": 1, "step": 3, "parts": ["agent", "loop"], "files": {}}
    return json.dumps(data | changes).encode()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"manifest.json": None}, "has no manifest.json"),
        ({"manifest.json": b"{"}, "manifest.json that cannot be read"),
        ({"manifest.json": b"[]"}, "is not a mapping"),
        ({"manifest.json": manifest(step="3")}, "without files or step"),
        ({"manifest.json": manifest(files={"agent.json": {}})}, "without sizes"),
        ({"manifest.json": manifest(files={"../x.json": {"bytes": 1}})}, "not a file"),
        ({"manifest.json": manifest(files={"a.pkl": {"bytes": 1}})}, "not JSON or"),
        ({"manifest.json": manifest()}, "is damaged"),
        ({"config.json": b'"text"'}, "is not a mapping"),
        ({"config.json": b"[" * 100_000}, "cannot be read"),
        ({"config.json": json.dumps({"a": "x" * 2_000_000}).encode()}, "1 MiB"),
        ({"config.json": json.dumps({"a": [0] * 100_000}).encode()}, "100,000 nested"),
        ({"../config.json": b"{}"}, "is not a file name"),
        ({"agent.safetensors": b"text"}, "of another size"),
        ({"agent.safetensors": None}, "has no agent.safetensors"),
    ],
)
def test_other_files_are_refused(changes, complaint, packed, tmp_path):
    path = rewrite(packed, changes)
    with pytest.raises(UserError, match=complaint):
        package.run_path(path)
    assert not cached(tmp_path)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_changed_weights_are_refused(packed, tmp_path):
    with zipfile.ZipFile(packed) as archive:
        weights = archive.read("agent.safetensors")
    changed = rewrite(packed, {"agent.safetensors": weights[:-1] + b"\x7f"})
    with pytest.raises(UserError, match="does not match its checksum"):
        package.run_path(changed)
    assert not cached(tmp_path)


@pytest.mark.extended
def test_damaged_files_are_refused_with_a_message(packed, tmp_path):
    rng = random.Random(0)
    whole, path = packed.read_bytes(), tmp_path / "damaged.reverie"
    messages = []
    for _ in range(40):
        path.write_bytes(mutate(whole, rng))
        with contextlib.suppress(UserError):
            package.run_path(path)
            continue
        with pytest.raises(UserError, match="Fix:") as error:
            package.run_path(path)
        messages.append(str(error.value))
    assert len(messages) > 20
    # a file that is not refused has the contents of the original one
    assert len(cached(tmp_path)) <= 1


def test_sizes_are_limited(packed, monkeypatch):
    monkeypatch.setattr(package, "MAX_SMALL_BYTES", 100)
    with pytest.raises(UserError, match="larger than"):
        package.run_path(packed)


def test_code_that_a_package_names_is_not_imported(packed, tmp_path, capsys):
    with zipfile.ZipFile(packed) as archive:
        settings = json.loads(archive.read("config.json"))
    settings["task"] = "evil_module:make"
    changed = rewrite(packed, {"config.json": json.dumps(settings).encode()})
    with pytest.raises(UserError, match="config imports code"):
        reverie.load(changed)
    assert main(["eval", str(changed)]) == 2
    assert "Fix: add --trust" in capsys.readouterr().err
    reverie.load(changed, task="catch")  # the task of the package is not used


def test_other_paths_are_not_changed(tmp_path):
    folder = tmp_path / "run.reverie"
    folder.mkdir()
    for path in (folder, tmp_path / "run", Path("~/x")):
        assert package.run_path(path) == path


@pytest.mark.parametrize("command", ["pack", "push"])
def test_a_checkpoint_of_another_program_is_not_packed(tmp_path, capsys, command):
    path = tmp_path / "latest.pt"
    torch.save({"agent_state_dict": {"_wm.encoder.weight": torch.zeros(1)}}, path)
    words = [str(path), str(tmp_path / "x.reverie")]
    if command == "push":
        words = [str(path), "user/name", "--dry-run", str(tmp_path / "upload")]
    assert main([command, *words]) == 2
    error = capsys.readouterr().err
    assert "is a checkpoint of dreamerv3-torch, which has no settings" in error
    assert f"Fix: reverie train --run.from_checkpoint {path} --task TASK" in error
