"""Damaged checkpoints and replay files."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from reverie.replay.segment_files import listed_files
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "flipped":
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    else:
        pickled = pickle.dumps(Payload(path.parents[3] / "executed"))
        # of the same length as the original
        path.write_bytes(
            pickled.ljust(len(data), b"\0") if kind == "pickle" else pickled
        )


KINDS = ["truncated", "flipped", "missing", "pickle"]


@pytest.mark.extended_except("collector*truncated", "loop*flipped", "manifest*pickle")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["collector.safetensors", "loop.json"], KINDS),
        ("manifest.json", "truncated"),
        ("manifest.json", "pickle"),
    ],
)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(command, name, kind):
    run = command()
    assert run.train(200)[0] == 0
    good, bad = Checkpoints(run.logdir / "ckpt").paths()
    damage(bad / name, kind)
    with pytest.warns(UserWarning, match=f"{bad.name} is damaged"):
        code, error = run.train(300)
    assert code == 0, error
    assert f"Resumed {good.name}" in error
    assert (run.logdir / "ckpt" / "quarantine" / bad.name).is_dir()
    assert run.newest()[1] == 300
    assert not list(run.folder.rglob("executed"))


def test_a_pickle_with_a_valid_checksum_is_refused(command):
    run = command()
    assert run.train(100)[0] == 0
    path = run.logdir / "ckpt" / run.newest()[0]
    damage(path / "collector.safetensors", "pickle")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["collector.safetensors"] = checkpoint._checksum(
        path / "collector.safetensors"
    )
    (path / "manifest.json").write_text(json.dumps(manifest))
    code, error = run.train(200)
    assert code == 2
    assert "collector" in error
    assert not list(run.folder.rglob("executed"))


@pytest.mark.extended_except("truncated-disk", "flipped-ram")
@pytest.mark.parametrize("storage", ["ram", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_without_the_steps_of_a_damaged_replay_file(
    command, kind, storage
):
    run = command(**{"replay.storage": storage})
    run.switch("pixels")
    assert run.train(200)[0] == 0
    index = checkpoint.read_part(run.logdir / "ckpt" / run.newest()[0], "replay")
    name = listed_files(index["files"])[1].name
    damage(run.logdir / "replay" / name, kind)
    with pytest.warns(RuntimeWarning, match=f"{name}.*continues without steps"):
        code, error = run.train(300)
    assert code == 0, error
    assert "Resumed 000000000200" in error
    assert run.newest()[1] == 300
    aside = run.logdir / "replay" / "quarantine" / name
    assert aside.exists() == (kind != "missing")
    assert not list(run.folder.rglob("executed"))


def test_without_a_valid_checkpoint_nothing_is_overwritten(command):
    run = command()
    assert run.train(200)[0] == 0
    for path in Checkpoints(run.logdir / "ckpt").paths():
        damage(path / "loop.json", "truncated")
    kept = {p.name for p in (run.logdir / "replay").iterdir()}
    with pytest.warns(UserWarning, match="is damaged"):
        code, error = run.train(300)
    assert code == 2
    assert "Every checkpoint" in error
    assert run.train(300)[0] == 2
    assert {p.name for p in (run.logdir / "replay").iterdir()} == kept
    shutil.rmtree(run.logdir / "ckpt" / "quarantine")
    assert run.train(300)[0] == 0
