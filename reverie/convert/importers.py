"""Find and recognize checkpoints of other implementations.

Such a checkpoint is a file, or a run folder of its implementation. A file is recognized
by its contents, not by its name, and each agent declares the importers of its files
(`AgentConfig.importers`), so all commands accept the same files.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from reverie.api import UserError
from reverie.capabilities import AgentConfig
from reverie.convert.importer import Importer, entry_names
from reverie.plugins import import_object
from reverie.storage.file_kind import OLD_TORCH, PICKLE, TORCH
from reverie.storage.limits import quote
from reverie.storage.outline import Outline, read_outline

RECORDINGS = ("an NPZ file", "an HDF5 file", "a Parquet file")
"""Formats of recorded episodes, as named by `file_kind`."""


class ImportedFile(NamedTuple):
    """A checkpoint file of another implementation."""

    path: Path
    agent: str
    """The agent that imports it."""
    importer: Importer
    contents: Any
    """Nested containers, and arrays that have a shape but no data."""

    def describe(self) -> str:
        return f"{self.path} is a checkpoint of {self.importer.program}"

    @contextmanager
    def explain_import_errors(self) -> Iterator[None]:
        """Raise errors of the importer as `UserError`.

        A file with the expected names may still have unexpected shapes or values.
        """
        try:
            yield
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,  # of PyTorch, about shapes
            TypeError,
            ValueError,
        ) as error:
            reason = quote(" ".join(f"{type(error).__name__}: {error}".split()))
            raise UserError(
                f"{self.describe()}, but its arrays have unexpected shapes or values "
                f"({reason}).\n  Fix: copy it again, or use another checkpoint."
            ) from error


def find_file(path: Path, schema: type) -> Path | None:
    """Return `path` if it is a file, or the checkpoint file in the folder `path`.

    None if there is none. `schema` is the config class with the settings of agents.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        return None
    files = _find_files(path, schema)
    if len(files) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in files)
        raise UserError(
            f"{path} has checkpoints of several programs: {names}.\n"
            f"  Fix: use one of them, such as {files[0]}"
        )
    return files[0] if files else None


def _find_files(folder: Path, schema: type) -> list[Path]:
    """Return the checkpoint files of all programs in a folder, one of each."""
    importers = _all_importers(schema)
    found = [files[0] for _, importer in importers if (files := importer.find(folder))]
    return list(dict.fromkeys(found))


def open_file(path: Path, schema: type) -> ImportedFile:
    """Recognize a checkpoint file; raise an error that describes any other file."""
    outline = _read(path)
    for agent, importer in _all_importers(schema):
        if importer.matches(outline.contents):
            return ImportedFile(path, agent, importer, outline.contents)
    raise UserError(
        f"{path} {_describe_file(outline)}.\n  Fix: {_suggest(path, outline, schema)}"
    )


def _read(path: Path) -> Outline:
    return _read_version(path, path.stat().st_mtime_ns if path.exists() else 0)


@functools.lru_cache(maxsize=16)
def _read_version(path: Path, mtime: int) -> Outline:
    """Read a file again if its modification time `mtime` has changed."""
    return read_outline(path)


def _load_importers(config: type[AgentConfig]) -> list[Importer]:
    return [import_object(name, "The importer") for name in config.importers]


def _all_importers(schema: type) -> Iterator[tuple[str, Importer]]:
    """Yield the importers of all agents, with the names of the agents."""
    for name, kind in typing.get_type_hints(schema).items():
        if isinstance(kind, type) and issubclass(kind, AgentConfig):
            for importer in _load_importers(kind):
                yield name, importer


def _list_files(importers: list[Importer]) -> str:
    """List the files of all programs: `latest.pt of dreamerv3-torch, last.pt of ...`"""
    names = [f"{each.file} of {each.program}" for each in importers]
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _describe_file(outline: Outline) -> str:
    """Describe a file that is not a checkpoint; the text follows the path."""
    kind, contents = outline.kind, outline.contents
    if outline.problem:
        return f"is {kind} that {outline.problem}" if kind else outline.problem
    if kind not in (TORCH, PICKLE):
        return f"is {kind}, not a checkpoint"
    names = entry_names(contents)
    if known := _describe_other_program(contents):
        return f"is {known}, which cannot be imported"
    if not isinstance(contents, Mapping):
        return f"is {kind} with a {type(contents).__name__}, not a checkpoint"
    entries = f"the entries {', '.join(names[:4])}" if names else "no entries"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"is {kind} with {entries}{more}, not a checkpoint of a known program"


def _describe_other_program(contents: Any) -> str:
    """Describe a known checkpoint that has no importer; empty if not recognized."""
    names = set(map(str, contents)) if isinstance(contents, Mapping) else set()
    if "tokenizer.embedding.weight" in names:
        return "a checkpoint of IRIS, the predecessor of Δ-IRIS"
    if {"agent", "_timestamp"} <= names:
        return "a checkpoint of danijar/dreamerv3 before 2024, with other networks"
    if "action_mlp_state_dict" in names:
        return "a behavior-cloning head of the robomimic fork of dreamerv3-torch"
    if {"state_dict", "pytorch-lightning_version"} <= names:
        return "a checkpoint of PyTorch Lightning"
    return ""


def _suggest(path: Path, outline: Outline, schema: type) -> str:
    """Return the fix for a path that is not a checkpoint."""
    if (path.parent / "manifest.json").is_file() or (path.parent / "ckpt").is_dir():
        return f"use its folder, {path.parent}"
    importers = [importer for _, importer in _all_importers(schema)]
    for other in _find_files(path.parent, schema):
        contents = _read(other).contents
        if any(importer.matches(contents) for importer in importers):
            return f"use {other}"
    if outline.kind == OLD_TORCH:
        return "save it again with a current version of PyTorch."
    if outline.problem or "damaged" in outline.kind:
        return (
            "copy it again, or save a file that has only tensors and plain containers, "
            "such as a state_dict()."
        )
    files = _list_files(importers)
    fix = f"use the folder of a run, or {files}."
    if outline.kind in RECORDINGS:
        fix += " For recorded episodes, use --offline.data."
    return fix
