"""Checkpoints of other implementations are found, and errors describe other files."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import reverie
from reverie.api import UserError
from reverie.cli import main as cli
from reverie.convert.importers import find_file, open_file
from reverie.run.config import Config, resolve
from reverie.run.imported import import_state, infer_settings

IRIS = {"tokenizer.quantizer.codebook": torch.zeros(4, 2)}
VTA = {"state_model.abs_feat.weight": torch.zeros(4, 6)}
TORCH = {"agent_state_dict": {"_wm.encoder._cnn.layers.0.weight": torch.zeros(2)}}
DREAMER = {"params": {"dyn/obs0/bias": np.zeros(2, np.float32)}, "counters": {}}


def save_pickle(value, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


def make_wrong_files(folder: Path) -> dict[str, str]:
    """Write files that are not checkpoints; return how errors describe each of them."""
    (folder / "text.pt").write_text("some text")
    (folder / "empty.pt").write_bytes(b"")
    np.savez(folder / "episode.npz", a=np.zeros(2))
    np.save(folder / "array.npy", np.zeros(2))
    with zipfile.ZipFile(folder / "files.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    with zipfile.ZipFile(folder / "sb3.zip", "w") as archive:
        archive.writestr("policy.pth", "weights")
    (folder / "data.hdf5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(40))
    save_file({"x": np.ones(2, np.float32)}, folder / "model.safetensors")
    (folder / "model.onnx").write_bytes(b"\x08\x07\x12\x07pytorch\x1a\x052.0.0:")
    (folder / "options.json").write_text('{"a": 1}')
    (folder / "video.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(20))
    event = struct.pack("<QI", 24, 0) + b"\x09" + struct.pack("<d", 1e9)
    (folder / "events.out").write_bytes(event + b"\x1a\rbrain.Event:2")
    save_pickle([1, 2], folder / "list.pkl")
    save_pickle({"weights": np.zeros(2)}, folder / "other.pkl")
    save_pickle(np.random.RandomState(0), folder / "object.pkl")
    save_pickle({"agent": {}, "_timestamp": 1.0}, folder / "checkpoint.ckpt")
    torch.save({"steps": 3, "model": {"a": torch.zeros(2)}}, folder / "other.pt")
    torch.save({"tokenizer.embedding.weight": torch.zeros(2)}, folder / "iris.pt")
    torch.save({"action_mlp_state_dict": {}, "config": {}}, folder / "clone.pt")
    torch.save(torch.nn.Linear(1, 1), folder / "module.pt")
    old = folder / "old.pt"
    torch.save({"a": torch.zeros(2)}, old, _use_new_zipfile_serialization=False)
    (folder / "half.pt").write_bytes((folder / "other.pt").read_bytes()[:300])
    (folder / "folder").mkdir()
    (folder / "folder" / "a.txt").write_text("text")
    return {
        "text.pt": "is a text file",
        "empty.pt": "is an empty file",
        "episode.npz": "is an NPZ file.*--offline.data",
        "array.npy": "is a NumPy array",
        "files.zip": "is a ZIP archive, not a checkpoint",
        "sb3.zip": "is a model of Stable-Baselines3",
        "data.hdf5": "is an HDF5 file.*--offline.data",
        "model.safetensors": "is a safetensors file",
        "model.onnx": "is an ONNX model",
        "options.json": "is a JSON file",
        "video.mp4": "is a video",
        "events.out": "is a TensorBoard event file",
        "list.pkl": "is a pickle with a list",
        "other.pkl": "is a pickle with the entries weights",
        "object.pkl": "is a pickle that contains numpy.random",
        "checkpoint.ckpt": "is a checkpoint of danijar/dreamerv3 before 2024",
        "other.pt": "is a file of torch.save with the entries steps, model",
        "iris.pt": "is a checkpoint of IRIS, the predecessor",
        "clone.pt": "is a behavior-cloning head of the robomimic fork of dreamerv3",
        "module.pt": "is a file of torch.save that contains torch.nn.*state_dict",
        "old.pt": "PyTorch before version 1.6.*save it again",
        "half.pt": "incomplete or damaged.*copy it again",
        "folder": "no checkpoint in .*a folder with a.txt",
        "nothing.pt": "nothing.pt does not exist",
    }


COMMANDS = {
    "eval": "eval FILE --task catch",
    "draw": "draw boundaries FILE",
    "train": "train --task catch --run.from_checkpoint FILE --logdir LOGDIR",
    "bc": "bc --offline.data nothing --bc.run FILE --logdir LOGDIR",
}
TRAINING_FILES = ("text.pt", "episode.npz", "model.safetensors", "list.pkl", "other.pt")
"""Files that training commands are tested with. Only a few, because these commands
resolve a whole config before they read the file."""


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("wrong")
    return folder, make_wrong_files(folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_of_commands_describe_other_files(
    command, wrong_files, tmp_path, capsys
):
    folder, names = wrong_files
    for name, kind in names.items():
        if command in ("train", "bc") and name not in TRAINING_FILES:
            continue
        paths = {"FILE": str(folder / name), "LOGDIR": str(tmp_path / "run")}
        words = [paths.get(word, word) for word in COMMANDS[command].split()]
        assert cli.main(words) == 2, name
        message = " ".join(capsys.readouterr().err.split())
        assert "Fix: " in message
        with pytest.raises(UserError, match=kind):
            raise UserError(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("function", [reverie.load, reverie.evaluate])
def test_errors_in_python_describe_other_files(function, wrong_files):
    folder, names = wrong_files
    for name, kind in names.items():
        with pytest.raises(UserError, match=f"(?s){kind}"):
            function(folder / name, task="catch")


@pytest.mark.parametrize(
    ("paths", "contents", "program"),
    [
        (["last.pt", "checkpoints/last.pt"], IRIS, "Δ-IRIS"),
        (["model_best.pt", "ckpt_900.pt"], VTA, "VTA"),
        (["latest.pt"], TORCH, "dreamerv3-torch"),
        (["latest_model.pt"], TORCH["agent_state_dict"], "dreamerv3-torch"),
        (["agent.pkl", "ckpt/20250101T/agent.pkl"], DREAMER, "danijar/dreamerv3"),
        (["20250101T/agent.pkl", "ckpt/agent/2025T/agent.pkl"], DREAMER, "danijar"),
    ],
)
def test_files_are_found_in_run_folders(paths, contents, program, tmp_path):
    for number, path in enumerate(paths):
        file = tmp_path / str(number) / path
        file.parent.mkdir(parents=True)
        save = save_pickle if file.suffix == ".pkl" else torch.save
        save(contents, file)
        assert find_file(tmp_path / str(number), Config) == file
        imported = open_file(file, Config)
        assert program in imported.importer.program
        assert imported.path == file


def test_the_latest_checkpoint_is_found(tmp_path):
    folder = tmp_path / "ckpt"
    for name in ("20250101T1", "20250102T1", "20250103T1"):
        (folder / name).mkdir(parents=True)
        save_pickle(DREAMER, folder / name / "agent.pkl")
    newest = folder / "20250103T1" / "agent.pkl"
    assert find_file(tmp_path, Config) == newest
    (folder / "latest").write_text("20250102T1\n")
    assert find_file(tmp_path, Config) == folder / "20250102T1" / "agent.pkl"
    (folder / "latest").write_text("../somewhere")
    assert find_file(folder, Config) == newest
    numbered = tmp_path / "numbers"
    numbered.mkdir()
    for step in (900, 10_000):
        torch.save(VTA, numbered / f"ckpt_{step}.pt")
    assert find_file(numbered, Config) == numbered / "ckpt_10000.pt"


def test_a_folder_with_files_of_two_programs_is_an_error(tmp_path):
    torch.save(IRIS, tmp_path / "last.pt")
    torch.save(VTA, tmp_path / "model_best.pt")
    with pytest.raises(UserError, match=r"several programs: last.pt, model_best.pt"):
        find_file(tmp_path, Config)


def test_errors_describe_wrong_files_of_two_programs(tmp_path):
    torch.save({"a": 1}, tmp_path / "last.pt")
    save_pickle({"x": 1}, tmp_path / "agent.pkl")
    (tmp_path / "a.txt").write_text("hello")
    for name, kind in (("a.txt", "text file"), ("agent.pkl", "pickle with the")):
        with pytest.raises(UserError, match=f"{kind}.*\n  Fix: use the folder of"):
            open_file(tmp_path / name, Config)


def test_errors_for_files_next_to_a_checkpoint_suggest_it(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    torch.save(IRIS, tmp_path / "checkpoints" / "last.pt")
    torch.save(7, tmp_path / "checkpoints" / "epoch.pt")
    with pytest.raises(UserError, match=r"with a int.*\n  Fix: use .*last\.pt"):
        open_file(tmp_path / "checkpoints" / "epoch.pt", Config)
    own = tmp_path / "000000000001-000001"
    own.mkdir()
    (own / "manifest.json").write_text("{}")
    (own / "agent.json").write_text("{}")
    with pytest.raises(UserError, match=rf"JSON file.*\n  Fix: .*{own.name}"):
        open_file(own / "agent.json", Config)


def test_an_agent_that_does_not_import_a_file_is_an_error(tmp_path):
    torch.save(IRIS, tmp_path / "last.pt")
    flags = {"run.from_checkpoint": str(tmp_path), "task": "catch"}
    with pytest.raises(UserError, match=r"Δ-IRIS.*'random'.\n  Fix: --configs iris_"):
        resolve(["random"], flags=flags)
    save_pickle(DREAMER, tmp_path / "agent.pkl")
    flags["run.from_checkpoint"] = str(tmp_path / "agent.pkl")
    with pytest.raises(UserError, match=r"'vta'.\n  Fix: --agent dreamer"):
        resolve(["vta_balls"], flags=flags)


@pytest.mark.parametrize(
    ("name", "contents", "fix"),
    [
        ("last.pt", IRIS, "--task crafter_reward, or --task atari_GAME"),
        ("model_best.pt", VTA, "--config FILE.json"),
        ("latest.pt", TORCH, "--task TASK"),
        ("agent.pkl", DREAMER, "--task TASK"),
    ],
)
def test_the_task_is_asked_for(name, contents, fix, tmp_path, capsys):
    save = save_pickle if name == "agent.pkl" else torch.save
    save(contents, tmp_path / name)
    assert cli.main(["eval", str(tmp_path / name)]) == 2
    message = capsys.readouterr().err
    assert "does not contain its task" in message
    assert fix in message


@pytest.mark.parametrize(
    ("name", "task", "preset"),
    [
        ("CrafterReward-v1", "crafter_reward", "iris_crafter"),
        ("MsPacmanNoFrameskip-v4", "atari_ms_pacman", "iris_atari"),
    ],
)
def test_the_task_of_a_delta_iris_run_is_read(name, task, preset, tmp_path):
    for folder in ("checkpoints", "config"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "checkpoints" / "last.pt"
    torch.save(IRIS, path)
    config = f"env: {{train: {{id: {name}}}, keymap: 'atari/${{.train.id}}'}}\n"
    (tmp_path / "config" / "trainer.yaml").write_text(config)
    importer = open_file(path, Config).importer
    assert importer.find_task(path) == task
    assert importer.presets(task, IRIS) == (preset,)
    (tmp_path / "config" / "trainer.yaml").write_text("env: {train: {id: Other}}")
    assert importer.find_task(path) == ""


def test_config_files_are_found(tmp_path):
    torch.save(VTA, tmp_path / "model_best.pt")
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}))
    importer = open_file(tmp_path / "model_best.pt", Config).importer
    assert importer.find_config(tmp_path / "model_best.pt") is None
    (tmp_path / "a.json").write_text(json.dumps({"env_type": "bouncing_balls"}))
    assert importer.find_config(tmp_path / "model_best.pt") == tmp_path / "a.json"
    (tmp_path / "b.json").write_text(json.dumps({"env_type": "3d_maze"}))
    with pytest.raises(
        UserError, match=r"several configs.*a.json, b.json.\n  Fix: --c"
    ):
        importer.find_config(tmp_path / "model_best.pt")


def fits_no_program(value):
    """Return contents with the names of checkpoints, but one value for all of them."""
    names = (
        "dyn/obs0/bias",
        "dyn/dyngru/kernel",
        "dyn/dynin0/bias",
        "dyn/obslogit/bias",
    )
    dreamer = dict.fromkeys((*names, "enc/cnn3/kernel", "dec/imgout/kernel"), value)
    layers = {f"_wm.encoder._cnn.layers.{i}.weight": value for i in range(4)}
    return [
        {"params": dreamer, "counters": {}},
        {"params": dreamer | {"enc/cnn0/kernel": 3}},
        {"agent_state_dict": layers | {"_wm.dynamics._cell.layers.x.weight": value}},
        {"tokenizer.quantizer.codebook": value, "world_model.x": value},
        {"state_model.abs_feat.weight": value, "state_model.x": [value]},
    ]


@pytest.mark.parametrize("shape", [(), (0,), (2,), (0, 0, 0, 0), (3, 3, 3, 3)])
def test_unexpected_shapes_are_one_message(shape, tmp_path):
    arrays, tensors = np.zeros(shape, np.float32), torch.zeros(shape)
    refused = 0
    for value in (arrays, tensors, 3):
        for save in (save_pickle, torch.save):
            for contents in fits_no_program(value):
                path = tmp_path / f"{refused}.pt"
                try:
                    save(contents, path)
                    imported = open_file(path, Config)
                    infer_settings(imported, {}, ".*")
                    import_state(imported, {"dyn": {}, "enc": {}, "world": {}}, ".*")
                except UserError as error:
                    assert "Fix:" in str(error)  # noqa: PT017
                    refused += 1
    assert refused > 20
