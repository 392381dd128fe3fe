"""Checkpoints and replay files with right checksums and wrong contents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from reverie.cli.main import main
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.storage import array_file
from reverie.storage.array_file import FileRecord
from reverie.storage.segments import ORDER


def replace(path: Path, data: bytes) -> None:
    """Replace a file of a checkpoint and its checksum."""
    path.write_bytes(data)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["files"][path.name] = checkpoint._checksum(path)
    (path.parent / "manifest.json").write_text(json.dumps(manifest))


CONTENTS = [
    b"[]",
    b"{}",
    b"7",
    b'{"clock": {}, "logger": 1, "envs": [], "files": 5, "index": {}}',
    b'{"a": {"$tensor": "missing"}}',
    b'{"a": {"$array": ["x"]}}',
    b'{"a": {"$float": {}}}',
    b"[" * 100_000,
    b"\xff\xfe",
]


@pytest.mark.extended_except("loop")
@pytest.mark.parametrize("part", ["loop", "collector", "replay"])
def test_a_part_with_other_contents_is_an_error(command, part):
    run = command()
    assert run.train(200)[0] == 0
    newest = Checkpoints(run.logdir / "ckpt").newest()
    path = newest / f"{part}.json"
    good = path.read_bytes()
    for content in CONTENTS:
        replace(path, content)
        code, error = run.train(300)
        assert code == 2, content
        assert "Fix:" in error
    replace(path, good)
    assert run.train(300)[0] == 0


def change_segment(run, change) -> str:
    """Replace the arrays of the newest segment, its checksum and those that list it."""
    newest = Checkpoints(run.logdir / "ckpt").newest()
    folder = run.logdir / "replay"
    index = json.loads((newest / "replay.json").read_text())
    rows = index["files"][-1][2]
    record = FileRecord(*rows)
    arrays = array_file.read_layout(folder, record).open(folder)[1]
    arrays = {key: np.array(value) for key, value in arrays.items()}
    change(arrays)
    stem = record.name.rpartition("-")[0]
    index["files"][-1][2] = list(array_file.write_arrays(folder, stem, arrays).record)
    replace(newest / "replay.json", json.dumps(index).encode())
    return index["files"][-1][2][0]


@pytest.mark.extended_except("ram-*float32", "disk-*reward*")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("reward"), "has no 'reward'"),
        (lambda arrays: arrays.update(reward=np.zeros(3)), "expected float32"),
        (lambda arrays: arrays.update(action=arrays["action"][:-1]), "'action' as"),
        (lambda arrays: arrays[ORDER].fill(1 << 30), "invalid order"),
    ],
)
@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_a_replay_file_with_other_arrays_is_not_used(command, change, message, storage):
    run = command(**{"replay.storage": storage})
    assert run.train(200)[0] == 0
    name = change_segment(run, change)
    with pytest.warns(RuntimeWarning, match=message):
        assert run.train(300)[0] == 0
    assert (run.logdir / "replay" / "quarantine" / name).exists()


def test_weights_that_are_not_numbers_are_refused(command, tmp_path):
    run = command(agent="dreamer")
    assert run.train(120)[0] == 0
    newest = Checkpoints(run.logdir / "ckpt").newest()
    path = newest / "agent.safetensors"
    arrays = safetensors.torch.load_file(path)
    arrays["dyn/dynin0.weight"][0, 0] = float("nan")
    replace(path, safetensors.torch.save(arrays))
    message = "dyn/dynin0.weight"
    words = run.words(200, **{"run.from_checkpoint": run.logdir})
    words[words.index("--logdir") + 1] = str(tmp_path / "other")
    for command_line in (["eval", str(run.logdir), "--episodes", "1"], words):
        assert main(command_line) == 2
        error = run.capsys.readouterr().err
        assert message in error
        assert "NaN or infinite" in error
