"""Atomic checkpoints with checksums.

A checkpoint is a folder `ckpt/<step>-<number>`, or `ckpt/<step>-<number>-epoch<epoch>`
with the completed epochs of an agent that counts them. For each part of the run it has
the arrays as safetensors and the remaining state as JSON, and a manifest with the size
and checksum of every file. It is written under a temporary name, flushed to disk, and
then renamed, so a folder with the final name is complete. No file points to the newest
checkpoint; it is found by its number. A checkpoint that fails its checksums is moved to
`ckpt/quarantine` and the previous one is used. Pickle is not used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch

from reverie.api import StateDict, UserError
from reverie.storage.atomic import create_file, fsync, make_folder
from reverie.storage.limits import (
    InvalidFile,
    check_name,
    open_regular,
    quote,
    read_json,
)
from reverie.storage.os_errors import FILE_INTACT, explain_write_errors

FORMAT = 1
"""Version of the file format."""
PARTIAL = ".partial-"
"""Prefix of checkpoints that are being written or deleted."""
REQUIRED = ("agent", "loop")
"""Parts of every checkpoint."""
_NAME = re.compile(r"(\d{12,})-(\d{6,})(?:-epoch(\d{4,}))?")
"""Matches names of checkpoints: step, number, and completed epochs."""


class _Counters(NamedTuple):
    """The counters in the name of a checkpoint."""

    step: int
    number: int  # 1 for the first checkpoint of a run
    epoch: int  # completed epochs; 0 if they are not counted


class Damaged(Exception):
    """The files of a checkpoint do not match its manifest."""


class Checkpoints:
    """The checkpoints of one run, newest last.

    Keeps the newest `keep_last`, every `keep_every`-th one, and the first one after
    every `keep_epochs` epochs (0: none). A checkpoint without one of the `required`
    parts is treated as damaged.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        keep_every: int = 0,
        keep_epochs: int = 0,
        required: Collection[str] = REQUIRED,
    ):
        self.folder = folder
        self.required = required
        self.keep_last = max(1, keep_last)
        self.keep_every = keep_every
        self.keep_epochs = keep_epochs

    def save(
        self, step: int, parts: dict[str, StateDict], epoch: int | None = None
    ) -> Path:
        """Write all parts as one checkpoint, atomically.

        `epoch` is the number of completed epochs; None if they are not counted.
        """
        number = 1 + max((_counters(path).number for path in self.paths()), default=0)
        suffix = "" if epoch is None else f"-epoch{epoch:04d}"
        final = self.folder / f"{step:012d}-{number:06d}{suffix}"
        partial = self.folder / f"{PARTIAL}{final.name}"
        make_folder(self.folder)
        with explain_write_errors(final):
            _delete(partial)
            partial.mkdir()
            try:
                write_folder(partial, parts, step)
                os.rename(partial, final)
                fsync(self.folder)
            except BaseException:
                _delete(partial)
                raise
        return final

    def newest(self, read_only: bool = False) -> Path | None:
        """Return the newest valid checkpoint; damaged ones are moved to quarantine.

        With `read_only` nothing is moved, because another process may be writing here.
        If that process deletes a checkpoint during the check, there is a newer one.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                verify(path, self.required)
                return path
            except Damaged as error:
                if read_only and not path.exists():
                    continue
                action = (
                    "skipped"
                    if read_only
                    else f"moved to {self._move_to_quarantine(path)}"
                )
                next_step = "Trying the previous checkpoint."
                if path == paths[0]:
                    next_step = "There is no older checkpoint."
                message = f"Checkpoint {path} is damaged ({error}) and was {action}."
                warnings.warn(f"{message} {next_step}", stacklevel=2)
        # search again if the other process has deleted a checkpoint meanwhile
        deleted = read_only and any(not path.exists() for path in paths)
        return self.newest(read_only) if deleted else None

    def paths(self) -> list[Path]:
        """Return all checkpoint folders, oldest first."""
        if not self.folder.is_dir():
            return []
        paths = [p for p in self.folder.iterdir() if _NAME.fullmatch(p.name)]
        return sorted(paths, key=lambda path: _counters(path)[1::-1])  # number, step

    @property
    def step(self) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        paths = self.paths()
        return _counters(paths[-1]).step if paths else 0

    def prune(self) -> list[Path]:
        """Delete old checkpoints and incomplete ones of killed runs.

        Returns the checkpoints that are kept.
        """
        paths = self.paths()
        keep = {*paths[-self.keep_last :], *self._first_of_epochs(paths)}
        if self.keep_every > 0:
            keep |= {p for p in paths if _counters(p).number % self.keep_every == 0}
        kept = [path for path in paths if path in keep]
        for path in paths:
            if path not in kept:
                # Renamed first, so that a kill leaves no incomplete checkpoint.
                partial = path.with_name(f"{PARTIAL}{path.name}")
                with explain_write_errors(path):
                    _delete(partial)
                    os.rename(path, partial)
        for path in self.folder.glob(f"{PARTIAL}*"):
            _delete(path)
        return kept

    @property
    def quarantine(self) -> Path:
        """Folder of damaged checkpoints."""
        return self.folder / "quarantine"

    def _move_to_quarantine(self, path: Path) -> Path:
        """Move a damaged checkpoint to the quarantine folder; return its new path."""
        make_folder(self.quarantine)
        target = self.quarantine / path.name
        while os.path.lexists(target):
            target = target.with_name(target.name + "x")  # until the name is free
        with explain_write_errors(target):
            os.rename(path, target)
        return target

    def _first_of_epochs(self, paths: list[Path]) -> Iterable[Path]:
        """Return the first of these checkpoints after every `keep_epochs` epochs."""
        if self.keep_epochs <= 0:
            return ()
        first: dict[int, Path] = {}
        for path in paths:
            first.setdefault(_counters(path).epoch // self.keep_epochs, path)
        return [path for multiple, path in first.items() if multiple]


def _counters(path: Path) -> _Counters:
    """Return the counters in the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match
    return _Counters(int(match[1]), int(match[2]), int(match[3] or 0))


def write_folder(folder: Path, parts: dict[str, StateDict], step: int) -> None:
    """Write `<part>.safetensors` and `<part>.json` of each part, then the manifest."""
    files: dict[str, dict[str, Any]] = {}
    for part, state in parts.items():
        arrays: dict[str, torch.Tensor] = {}
        contents = {"json": json.dumps(_pack(state, arrays, "")).encode()}
        if arrays:
            contents["safetensors"] = safetensors.torch.save(arrays)
        for suffix, data in contents.items():
            path = folder / f"{part}.{suffix}"
            _write_synced(path, data)
            files[path.name] = _checksum(path)
    manifest = {"format": FORMAT, "step": step, "parts": sorted(parts), "files": files}
    _write_synced(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    fsync(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; raise `Damaged` if it is not valid."""
    try:
        manifest = read_json(folder / "manifest.json")
        kinds = type(manifest["files"]), type(manifest["parts"])
        valid = kinds == (dict, list)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and error.errno in FILE_INTACT:
            raise
        valid = False
    if not valid:
        raise Damaged("its manifest is missing or unreadable")
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder} has checkpoint format {quote(str(manifest.get('format')))}, "
            f"this version of Reverie reads format {FORMAT}.\n"
            "  Fix: install the version that wrote it, or start in a new --logdir."
        )
    return dict(manifest)


def verify(folder: Path, required: Collection[str] = REQUIRED) -> None:
    """Raise `Damaged` unless every file has the size and checksum in the manifest.

    The manifest must list files of every part, and no unlisted files of the parts may
    exist.
    """
    if folder.is_symlink():
        raise Damaged("it is a symbolic link")
    manifest = read_manifest(folder)
    parts, files = manifest["parts"], manifest["files"]
    try:
        for name in (*parts, *files):
            check_name(name)
    except InvalidFile as error:
        raise Damaged(f"its manifest {error}") from None
    if missing := sorted({*required} - {*parts}):
        raise Damaged(f"it has no {' and no '.join(missing)}")
    for part in parts:
        if f"{part}.json" not in files:
            raise Damaged(f"its manifest does not list {part}.json")
        arrays = f"{part}.safetensors"
        if arrays not in files and os.path.lexists(folder / arrays):
            raise Damaged(f"its manifest does not list {arrays}")
    for name, expected in files.items():
        _verify_file(folder / name, expected)


def _verify_file(path: Path, expected: Any) -> None:
    """Raise `Damaged` unless a file has the size and checksum of its manifest entry."""
    name = path.name
    try:
        with open_regular(path, follow_links=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                raise Damaged(f"{name} has {size} bytes instead of {expected['bytes']}")
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise Damaged(f"{name} does not match its checksum")
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except InvalidFile as error:
        raise Damaged(f"{name} {error}") from None
    except (KeyError, TypeError):
        raise Damaged(f"its manifest has no checksum of {name}") from None
    except OSError as error:
        if error.errno in FILE_INTACT:
            raise
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None


def read_part(folder: Path, part: str) -> StateDict:
    """Return the state of one part of a checkpoint, with tensors on the CPU."""
    path = folder / f"{part}.json"
    try:
        tree = read_json(path)
        arrays = folder / f"{part}.safetensors"
        tensors = {}
        if arrays.exists():
            open_regular(arrays).close()  # raises if it is a pipe, which would block
            tensors = safetensors.torch.load_file(arrays)
        state = _unpack(tree, tensors)
        if not isinstance(state, dict):
            raise ValueError(f"it has a {type(state).__name__}, not a dict")
    except (
        OSError,
        ValueError,
        AttributeError,
        LookupError,
        TypeError,
        safetensors.SafetensorError,
    ) as error:
        raise UserError(
            f"{path} cannot be read: {' '.join(str(error).split())}.\n"
            "  Fix: give a checkpoint folder written by Reverie."
        ) from None
    return state


@contextmanager
def explain_mismatch(path: Path) -> Iterator[None]:
    """Convert errors of `load_state_dict` to a `UserError`.

    A checkpoint with valid checksums may still not fit the run.
    """
    try:
        yield
    except (
        ArithmeticError,  # numbers that are infinite or too large
        AssertionError,
        AttributeError,
        LookupError,
        RecursionError,  # deeply nested JSON in the state of a random generator
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"The checkpoint {path} does not fit this run ({reason[:300]}).\n  Fix: "
            "delete it to resume from the previous one, or start in a new --logdir."
        ) from error


def has_checkpoint(path: Path) -> bool:
    """True if `path` is a checkpoint, or a run folder with checkpoints of Reverie."""
    return (path / "manifest.json").is_file() or any(
        checkpoints.paths() or checkpoints.quarantine.is_dir()
        for checkpoints in (Checkpoints(path / "ckpt"), Checkpoints(path))
    )


def find_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint of a run folder, or `path` if it is a checkpoint."""
    path = path.expanduser()
    if (path / "manifest.json").is_file():
        try:
            verify(path)
        except Damaged as error:
            raise UserError(
                f"The checkpoint {path} is damaged: {error}.\n"
                "  Fix: give another checkpoint of this run."
            ) from None
        return path
    for folder in (path / "ckpt", path):
        checkpoints = Checkpoints(folder)
        newest = checkpoints.newest(read_only=True)
        if newest:
            return newest
        if checkpoints.paths() or checkpoints.quarantine.is_dir():
            raise UserError(
                f"Every checkpoint in {path} is damaged.\n"
                "  Fix: give another run, or copy this one again."
            )
    problem = f"There is no checkpoint in {path}{_describe_folder(path)}"
    raise UserError(
        f"{problem if path.exists() else f'{path} does not exist'}.\n"
        "  Fix: give a run folder (it has a `ckpt` folder inside) or one of the "
        "folders in `ckpt`."
    )


def _describe_folder(path: Path) -> str:
    """Return a clause about what is at `path` instead of a checkpoint."""
    if not path.is_dir():
        return ", which is a file"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return ", which is an empty folder"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f", a folder with {', '.join(names[:4])}{more}"


def find_nonfinite(state: Any, name: str = "") -> str | None:
    """Return the name of the first tensor with NaN or infinite entries, if any."""
    if isinstance(state, dict):
        children = [(f"{name}/{key}", value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)):
        children = [(f"{name}/{i}", value) for i, value in enumerate(state)]
    elif isinstance(state, torch.Tensor) and state.is_floating_point():
        return None if bool(torch.isfinite(state).all()) else name.lstrip("/")
    else:
        return None
    return next((bad for n, v in children if (bad := find_nonfinite(v, n))), None)


def check_finite(state: StateDict, components: Iterable[str], path: Path) -> None:
    """Raise if a weight of these components is NaN or infinite."""
    weights = {name: state[name] for name in components if name in state}
    if name := find_nonfinite(weights):
        raise UserError(
            f"{name} of {path} has entries that are NaN or infinite.\n"
            "  Fix: use an earlier checkpoint, or another file."
        )


def _write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to disk."""
    with open(create_file(path), "wb") as file:
        file.write(data)
    fsync(path)


def _checksum(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _delete(path: Path) -> None:
    """Delete a folder with its contents, or a symbolic link without its target."""
    if path.is_dir() and not path.is_symlink():
        with suppress(RecursionError):  # folders nested more than 1,000 deep
            shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _pack(value: Any, arrays: dict[str, torch.Tensor], name: str) -> Any:
    """Return a state as JSON data, with references to its arrays.

    Arrays are added to `arrays`, and `{"$tensor": NAME}` or `{"$array": NAME}` takes
    their place. `name` is the path of `value` in the state.
    """
    if isinstance(value, dict):
        packed = {}
        for key, item in value.items():
            assert isinstance(key, str), f"key {key!r} under {name!r} is not a str"
            packed[key] = _pack(item, arrays, f"{name}/{key}" if name else key)
        return {"$dict": packed} if any(k.startswith("$") for k in packed) else packed
    if isinstance(value, (list, tuple)):
        return [_pack(item, arrays, f"{name}/{i}") for i, item in enumerate(value)]
    while name in arrays:  # in {"a/b": x, "a": {"b": y}}, both are named a/b
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
    raise TypeError(f"cannot save {name!r} of type {type(value).__name__}")


def _unpack(value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """Return the state that `_pack` converted to the JSON data `value`."""
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
