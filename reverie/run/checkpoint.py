"""Checkpoints that are whole or absent.

A save is a new folder `ckpt/<step>-<save>`: for each part of the run its arrays as
safetensors and the rest of its state as JSON, and a manifest with the size and checksum
of every file. It is written under another name, flushed to the disk, and only then
renamed, so a folder with that name is complete. There is no pointer to the newest one
that could tear: it is found by looking. A folder that fails its checksums is moved to
`ckpt/quarantine` and the one before it is used. Nothing here reads a pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from reverie.api import StateDict, UserError
from reverie.storage.atomic import explain_full_disk, fsync

FORMAT = 1
_NAME = re.compile(r"(\d{12,})-(\d{6,})")


class Damaged(Exception):
    """A checkpoint folder does not hold what its manifest says."""


class Checkpoints:
    """The saves of one run, newest last."""

    def __init__(self, folder: Path, keep_last: int = 2, keep_every: int = 0):
        self.folder = folder
        self.keep_last = max(1, keep_last)
        self.keep_every = keep_every

    def save(self, step: int, parts: dict[str, StateDict]) -> Path:
        """Write all parts as one checkpoint; whole or not at all."""
        known = self.paths()
        number = 1 + max((self._numbers(path)[1] for path in known), default=0)
        final = self.folder / f"{step:012d}-{number:06d}"
        partial = self.folder / f".partial-{final.name}"
        with explain_full_disk(final):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                write_folder(partial, parts, {"step": step})
                os.rename(partial, final)
                fsync(self.folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        return final

    def newest(self, mine: bool = True) -> Path | None:
        """The newest checkpoint that is whole; damaged ones are put aside.

        Not `mine` means that another process may be writing here: nothing is moved, and
        a checkpoint that goes while it is looked at was only replaced by a newer one.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                verify(path)
                return path
            except Damaged as error:
                if not mine and not path.exists():
                    continue
                fate = f"moved to {self._quarantine(path)}" if mine else "passed over"
                then = "there is none before it"
                if path != paths[0]:
                    then = "the one before it is tried"
                warnings.warn(
                    f"Checkpoint {path} is damaged ({error}); it was {fate}, and "
                    f"{then}.",
                    stacklevel=2,
                )
        gone = not mine and any(not path.exists() for path in paths)
        return self.newest(mine) if gone else None

    def paths(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [p for p in self.folder.iterdir() if _NAME.fullmatch(p.name)]
        return sorted(found, key=lambda path: self._numbers(path)[::-1])

    @property
    def step(self) -> int:
        """The step of the newest checkpoint, 0 without any."""
        paths = self.paths()
        return self._numbers(paths[-1])[0] if paths else 0

    def prune(self) -> list[Path]:
        """Delete what need not be kept, and what a kill left half-written.

        Returns the checkpoints that stay.
        """
        paths = self.paths()
        kept = paths[-self.keep_last :]
        if self.keep_every > 0:
            old = [p for p in paths if self._numbers(p)[1] % self.keep_every == 0]
            kept = sorted({*old, *kept})
        for path in paths:
            if path not in kept:
                # Under a name nobody reads first, so that a kill leaves no half folder.
                doomed = path.with_name(f".partial-{path.name}")
                os.rename(path, doomed)
        for path in self.folder.glob(".partial-*"):
            shutil.rmtree(path, ignore_errors=True)
        return kept

    @property
    def shelf(self) -> Path:
        """Where damaged checkpoints are put."""
        return self.folder / "quarantine"

    def _quarantine(self, path: Path) -> Path:
        shelf = self.shelf
        shelf.mkdir(exist_ok=True)
        target = shelf / path.name
        while target.exists():
            target = target.with_name(target.name + "x")
        os.rename(path, target)
        return target

    @staticmethod
    def _numbers(path: Path) -> tuple[int, int]:
        match = _NAME.fullmatch(path.name)
        assert match
        return int(match[1]), int(match[2])


def write_folder(
    folder: Path, parts: dict[str, StateDict], facts: dict[str, Any]
) -> None:
    """Each part as `<part>.safetensors` and `<part>.json`, then the manifest."""
    files: dict[str, dict[str, Any]] = {}
    for part, state in parts.items():
        arrays: dict[str, torch.Tensor] = {}
        tree = _pack(state, arrays, "")
        if arrays:
            path = folder / f"{part}.safetensors"
            _write_synced(path, safetensors.torch.save(arrays))
            files[path.name] = _seal(path)
        path = folder / f"{part}.json"
        _write_synced(path, json.dumps(tree).encode())
        files[path.name] = _seal(path)
    manifest = {"format": FORMAT, **facts, "parts": sorted(parts), "files": files}
    _write_synced(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    fsync(folder)


def manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "manifest.json").read_bytes())
        sound = isinstance(found["files"], dict) and isinstance(found["parts"], list)
    except (OSError, ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise Damaged("its manifest is missing or unreadable")
    if found.get("format") != FORMAT:
        raise UserError(
            f"{folder} has checkpoint format {found.get('format')}, this version of "
            f"Reverie reads format {FORMAT}.\n"
            "  Fix: install the version that wrote it, or start in a new --logdir."
        )
    return dict(found)


def verify(folder: Path) -> None:
    """Raise `Damaged` unless every file is there, whole and unchanged."""
    for name, seal in manifest(folder)["files"].items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        try:
            size = path.stat().st_size
            if size != seal["bytes"]:
                raise Damaged(f"{name} has {size} bytes instead of {seal['bytes']}")
            if _seal(path) != seal:
                raise Damaged(f"{name} does not match its checksum")
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None


def read_part(folder: Path, part: str) -> StateDict:
    """One part of a checkpoint, on the CPU."""
    path = folder / f"{part}.json"
    try:
        tree = json.loads(path.read_bytes())
        arrays = folder / f"{part}.safetensors"
        tensors = safetensors.torch.load_file(arrays) if arrays.exists() else {}
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read: {' '.join(str(error).split())}.\n"
            "  Fix: point to a checkpoint folder written by Reverie."
        ) from None
    found = _unpack(tree, tensors)
    assert isinstance(found, dict)
    return found


def locate(path: Path) -> Path:
    """The checkpoint folder meant by a path to it, to its run, or to its `ckpt`."""
    path = path.expanduser()
    if (path / "manifest.json").is_file():
        try:
            verify(path)
        except Damaged as error:
            raise UserError(
                f"The checkpoint {path} is damaged: {error}.\n"
                "  Fix: name another one of the folders beside it."
            ) from None
        return path
    for folder in (path / "ckpt", path):
        saved = Checkpoints(folder)
        found = saved.newest(mine=False)
        if found:
            return found
        if saved.paths() or saved.shelf.is_dir():
            raise UserError(
                f"There is no checkpoint in {path} that is whole.\n"
                "  Fix: give another run, or copy this one again."
            )
    raise UserError(
        f"There is no checkpoint in {path}.\n"
        "  Fix: give a run folder (it has a `ckpt` folder inside) or one of the "
        "folders in `ckpt`."
    )


def nonfinite(state: Any, name: str = "") -> str | None:
    """The name of the first tensor in a state that has NaN or infinite entries."""
    if isinstance(state, dict):
        children = [(f"{name}/{key}", value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)):
        children = [(f"{name}/{i}", value) for i, value in enumerate(state)]
    elif isinstance(state, torch.Tensor) and state.is_floating_point():
        return None if bool(torch.isfinite(state).all()) else name.lstrip("/")
    else:
        return None
    return next((bad for n, v in children if (bad := nonfinite(v, n))), None)


def _write_synced(path: Path, data: bytes) -> None:
    """Write a file inside a folder that is renamed when it is complete."""
    path.write_bytes(data)
    fsync(path)


def _seal(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


# State as JSON with its arrays set aside.


def _pack(value: Any, arrays: dict[str, torch.Tensor], name: str) -> Any:
    if isinstance(value, dict):
        packed = {}
        for key, item in value.items():
            assert isinstance(key, str), f"state key {key!r} under {name!r} is no text"
            packed[key] = _pack(item, arrays, f"{name}/{key}" if name else key)
        return {"$dict": packed} if any(k.startswith("$") for k in packed) else packed
    if isinstance(value, (list, tuple)):
        return [_pack(item, arrays, f"{name}/{i}") for i, item in enumerate(value)]
    while name in arrays:  # {"a/b": x, "a": {"b": y}}
        name += "+"
    if isinstance(value, torch.Tensor):
        arrays[name] = value.detach().to("cpu").contiguous().clone()
        return {"$tensor": name}
    if isinstance(value, np.ndarray):
        arrays[name] = torch.from_numpy(np.array(value, order="C"))
        return {"$array": name}
    if isinstance(value, np.generic):
        return _pack(value.item(), arrays, name)
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint cannot hold {name!r}, a {type(value).__name__}")


def _unpack(value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return arrays[value["$tensor"]]
    if "$array" in value:
        return arrays[value["$array"]].numpy()
    if "$float" in value:
        return float(value["$float"])
    return {k: _unpack(v, arrays) for k, v in value.get("$dict", value).items()}
