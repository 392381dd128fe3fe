"""Section `files`: damaged and hostile run folders, weights, datasets and configs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import shutil
import socket
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos.datasets import write_chunks, write_hdf5
from chaos.hostile import (
    STRINGS,
    VALUES,
    hostile_npz,
    hostile_pickle,
    hostile_torch_file,
    hostile_yaml,
    mutate,
)
from chaos.processes import run
from chaos.sections import Section

DREAMER = (
    "train --configs debug --task catch --run.clock steps --run.steps 120 "
    "--run.save_every 30 --run.log_every 30 --run.report_every 0 --run.envs 2 "
    "--logger.outputs jsonl --replay.storage disk"
)
READERS = (
    "train --logdir run --run.steps 124",
    "eval run --episodes 1",
    "data inspect run",
    "data export run exported",
    "report run --format json",
    "pack run packed",
    "train --configs debug --task catch --run.steps 8 --run.envs 1 "
    "--run.from_checkpoint run --logdir other",
)
"""Commands that read a run folder."""
KINDS = (  # that replace a file or folder of a run
    "folder",
    "deep folder",
    "pipe",
    "socket",
    "link to a file",
    "link to a folder",
    "loop",
    "hard link",
)
MARKER = "executed"
"""File that hostile code would write."""


@functools.cache
def trained_run() -> Path:
    """A run of Dreamer with a replay buffer on disk, trained once."""
    folder = Path(tempfile.mkdtemp())
    outcome = run([*DREAMER.split(), "--logdir", str(folder / "run")], folder)
    assert not outcome.problems([0]), outcome.problems([0])
    (folder / "run" / ".lock").unlink()
    return folder / "run"


def trial(name: str, rng: random.Random, folder: Path) -> list[str]:
    """Read damaged files: the command must not crash, hang or change other files."""
    outside = folder / "outside"
    outside.mkdir()
    (outside / "file").write_text("not to be changed")
    inside = folder / "work"
    inside.mkdir()
    arguments, description = CLASSES[name](rng, inside)
    outcome = run(arguments, inside)
    problems = outcome.problems()
    if [path.name for path in outside.iterdir()] != ["file"] or (
        (outside / "file").read_text() != "not to be changed"
    ):
        problems.append("a file outside of the run folder was changed")
    if (inside / MARKER).exists():
        problems.append("code of a file was executed")
    return [f"({description}) {text}" for text in problems]


def damaged_bytes(rng: random.Random, folder: Path) -> tuple[list[str], str]:
    """Damage a file of a run; return a command that reads it, and a description."""
    path = _random_file(rng, _copy_run(folder))
    data = path.read_bytes()
    how = rng.choice(["mutated", "truncated", "zeros", "appended", "emptied"])
    place = rng.randrange(len(data) + 1)
    changed = {
        "mutated": mutate(data, rng),
        "truncated": data[:place],
        "zeros": bytes(len(data)),
        "appended": data + rng.randbytes(100),
        "emptied": b"",
    }
    path.write_bytes(changed[how])
    return rng.choice(READERS).split(), f"{how} {path.relative_to(folder)}"


def missing_files(rng: random.Random, folder: Path) -> tuple[list[str], str]:
    """Delete a file or folder of a run."""
    path = rng.choice(sorted(_copy_run(folder).rglob("*")))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return rng.choice(READERS).split(), f"deleted {path.relative_to(folder)}"


def wrong_kinds(rng: random.Random, folder: Path) -> tuple[list[str], str]:
    """Replace a file or folder of a run by a folder, pipe, socket or link."""
    logdir = _copy_run(folder)
    extra = [logdir / name for name in (".lock", "ckpt/.partial-1", "media", "run_id")]
    path = rng.choice([*sorted(logdir.rglob("*")), *extra])
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind = rng.choice(KINDS)
    target = folder.parent / "outside"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, _inside(path.parent):
            server.bind(path.name)
    elif kind == "hard link":
        os.link(target / "file", path)
    elif kind == "deep folder":
        path.mkdir()
        with _inside(path):
            for _ in range(1100):
                os.mkdir("a")
                os.chdir("a")
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to(target / "file" if kind == "link to a file" else target)
    return rng.choice(READERS).split(), f"{path.relative_to(folder)} is a {kind}"


def wrong_values(
    rng: random.Random, folder: Path, values: Any = VALUES
) -> tuple[list[str], str]:
    """Replace values in a JSON file of a run, with matching checksums."""
    logdir = _copy_run(folder)
    paths = sorted(logdir.rglob("*.json"))
    path = rng.choice(paths)
    data = json.loads(path.read_text())
    leaves = list(_leaves(data))
    place: list = []
    if leaves:
        place = rng.choice(leaves)
        value = rng.choice(values)
        _set(data, place, value() if callable(value) else value)
    # a placeholder, because `json.dumps` cannot write lists this deep
    path.write_text(json.dumps(data).replace('"DEEP_NESTING"', "[" * 100_000))
    _fix_checksums(logdir)
    where = ".".join(map(str, place))
    return rng.choice(READERS).split(), f"{path.relative_to(folder)}: {where}"


def wrong_names(rng: random.Random, folder: Path) -> tuple[list[str], str]:
    """Replace names of files in a run, with matching checksums."""
    outside = str(folder.parent / "outside" / "file")
    return wrong_values(rng, folder, [*STRINGS, outside, f"../../{outside}"])


def hostile_config(rng: random.Random, folder: Path) -> tuple[list[str], str]:
    """Change the config of a run."""
    logdir = _copy_run(folder)
    (folder / "evilmod.py").write_text(f"open({str(folder / MARKER)!r}, 'w')\n")
    text, description = hostile_yaml((logdir / "config.yaml").read_text(), rng)
    (logdir / "config.yaml").write_text(text)
    return rng.choice(READERS[:3]).split(), description


def weights(rng: random.Random, folder: Path) -> tuple[list[str], str]:
    """Write a hostile checkpoint in the format of another implementation."""
    marker = folder / MARKER
    if rng.random() < 0.5:
        path, data = folder / "agent.pkl", hostile_pickle(rng, marker)
    else:
        path, data = folder / "latest.pt", hostile_torch_file(rng, marker)
    path.write_bytes(data)
    arguments = "train --configs debug --task catch --run.steps 8 --logdir other"
    return [*arguments.split(), "--run.from_checkpoint", str(path)], path.name


def datasets(rng: random.Random, folder: Path) -> tuple[list[str], str]:
    """Write a hostile dataset."""
    kind = rng.choice(["npz", "zip", "hdf5", "replay", "json"])
    data = folder / "data"
    data.mkdir()
    if kind == "npz":
        (data / "episode.npz").write_bytes(hostile_npz(rng, folder / MARKER))
    elif kind == "zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(rng.choice(["reward.npy", "../x.npy"]), bytes(10**8))
        (data / "episode.npz").write_bytes(buffer.getvalue())
    elif kind == "hdf5":
        write_hdf5(data / "episodes.hdf5", rng)
    elif kind == "replay":
        write_chunks(data, rng)
    else:
        deep = rng.choice(["[" * 100_000, '{"a":' * 100_000, "{}", "1" * 10_000])
        (data / "spaces.json").write_text(deep)
        (data / "dataset.json").write_text(deep)
    path = rng.choice([data, *data.iterdir()])
    return ["data", rng.choice(["inspect", "stats"]), str(path)], f"{kind} dataset"


CLASSES: dict[str, Callable[[random.Random, Path], tuple[list[str], str]]] = {
    "damaged bytes": damaged_bytes,
    "missing files": missing_files,
    "links, pipes, folders": wrong_kinds,
    "wrong values, right checksums": wrong_values,
    "wrong names, right checksums": wrong_names,
    "hostile configs": hostile_config,
    "hostile weights": weights,
    "hostile datasets": datasets,
}


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Change the current folder; paths of sockets and deep folders are limited."""
    previous = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(previous)


def _copy_run(folder: Path) -> Path:
    return Path(shutil.copytree(trained_run(), folder / "run"))


def _random_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))


def _leaves(value: Any, place: tuple = ()) -> Any:
    """Yield the keys that lead to each value in JSON data."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield (*place, key)
            yield from _leaves(inner, (*place, key))


def _set(data: Any, place: tuple, value: Any) -> None:
    """Set the value to which these keys lead."""
    for key in place[:-1]:
        data = data[key]
    data[place[-1]] = value


def _fix_checksums(logdir: Path) -> None:
    """Make the manifests of checkpoints match their files."""
    for path in logdir.glob("ckpt/*/manifest.json"):
        try:
            manifest = json.loads(path.read_text())
            for name, record in manifest["files"].items():
                data = (path.parent / name).read_bytes()
                record["bytes"] = len(data)
                record["sha256"] = hashlib.sha256(data).hexdigest()
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            OSError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            continue  # this manifest was changed
        path.write_text(json.dumps(manifest))


SECTIONS = [
    Section(
        "files",
        "damaged and hostile run folders, weights, datasets and configs",
        lambda: tuple(CLASSES),
        trial,
    )
]
