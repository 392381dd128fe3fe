"""Packages: a trained agent as a few files, without replay buffer and optimizer.

A package has `config.json` and `spaces.json` of the run, `results.json`, and the parts
of a checkpoint that are needed to act (`agent.safetensors`, `agent.json`, ...) with
their `manifest.json`. It is a single ZIP archive (`FILE.reverie`), a folder (such as a
download from the Hugging Face Hub), or a repository on the Hub (`hf://user/name`).
Other files are not read.

To use a package, it is unpacked to a run folder in the cache of the user
(`XDG_CACHE_HOME`, by default `~/.cache`). Its name is a checksum of the contents, so
that a package is unpacked once. All other code uses it as the folder of a run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from reverie.api import UserError
from reverie.log.messages import print_message
from reverie.run.checkpoint import PARTIAL, Damaged, verify
from reverie.run.config import CONFIG_FILE
from reverie.storage.atomic import create_file
from reverie.storage.limits import (
    MAX_YAML_BYTES,
    MAX_YAML_NODES,
    PART_BYTES,
    InvalidFile,
    check_name,
    open_member,
    open_regular,
    open_zip,
    parse_json,
)
from reverie.storage.os_errors import explain_write_errors

SUFFIX = ".reverie"
"""Suffix of packages that are ZIP archives."""
CONFIG, SPACES, MANIFEST = "config.json", "spaces.json", "manifest.json"
"""Files that every package has."""
RESULTS = "results.json"
"""File with the evaluation results of the run."""
MAX_SMALL_BYTES = 16 << 20
"""Maximum size of the files that describe a package."""
DATA_SUFFIXES = (".json", ".safetensors")
"""Suffixes of the files of a checkpoint; a package with others is refused."""

OpenFile = Callable[[str], AbstractContextManager[Any]]
"""Opens a file of a package by its name, for reading bytes."""


def run_path(name: str | Path) -> Path:
    """Return the run folder to load: unpack a package; other paths are unchanged.

    `name` is a run folder, a checkpoint, a file `*.reverie`, a folder with the files of
    a package, or `hf://user/name` with an optional `@revision`.
    """
    from reverie.run.hub import download, is_hub_name

    if is_hub_name(str(name)):
        return download(str(name))
    path = Path(name).expanduser()
    is_folder = all((path / file).is_file() for file in (CONFIG, SPACES, MANIFEST))
    if not is_folder and (path.suffix != SUFFIX or path.is_dir()):
        return Path(name)
    try:
        folder = _unpack_folder(path) if is_folder else _unpack_archive(path)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist.\n  Fix: write it with `reverie pack LOGDIR {path}`"
        ) from None
    except InvalidFile as error:
        raise package_error(str(path), error) from None
    print_message(f"Using {path}, unpacked to {folder}.")
    return folder


def _unpack_archive(path: Path) -> Path:
    with open_zip(path) as archive:
        members = {check_name(m.filename): m for m in archive.infolist()}

        def open_file(name: str) -> AbstractContextManager[Any]:
            if name not in members:
                raise InvalidFile(f"has no {name}")
            return open_member(archive, members[name])

        return unpack(open_file)


def _unpack_folder(path: Path) -> Path:
    def open_file(name: str) -> AbstractContextManager[Any]:
        if not (path / name).is_file():
            raise InvalidFile(f"has no {name}")
        return open_regular(path / name)

    return unpack(open_file)


def package_error(name: str, error: InvalidFile) -> UserError:
    """Return the error for a file, folder or repository that is not a package."""
    return UserError(
        f"{name} is not a package of Reverie: it {error}.\n  Fix: give a file that "
        "`reverie pack` wrote, or a repository that `reverie push` wrote."
    )


def unpack(open_file: OpenFile) -> Path:
    """Write a package as a run folder to the cache, if it is not there yet."""
    texts = {name: _read(open_file, name) for name in (CONFIG, SPACES, MANIFEST)}
    settings, manifest = _parse(texts, CONFIG), _parse(texts, MANIFEST)
    _parse(texts, SPACES)
    files, step = manifest.get("files"), manifest.get("step")
    if not isinstance(files, dict) or not isinstance(step, int) or step < 0:
        raise InvalidFile(f"has a {MANIFEST} without files or step")
    config = yaml.safe_dump(settings, sort_keys=False).encode()
    if len(config) > MAX_YAML_BYTES:
        raise InvalidFile(f"has a {CONFIG} that is larger than 1 MiB")
    digest = hashlib.sha256(b"".join(texts.values())).hexdigest()
    folder = _cache_folder() / digest[:32]
    if folder.is_dir():
        return folder
    with _partial_folder(folder) as partial:
        (partial / CONFIG_FILE).write_bytes(config)
        (partial / SPACES).write_bytes(texts[SPACES])
        number = 1  # number of the checkpoint; a package has only one
        target = partial / "ckpt" / f"{step:012d}-{number:06d}"
        target.mkdir(parents=True)
        (target / MANIFEST).write_bytes(texts[MANIFEST])
        for name, entry in files.items():
            if Path(check_name(name)).suffix not in DATA_SUFFIXES:
                raise InvalidFile(f"has {name}, which is not JSON or safetensors")
            _copy(open_file, name, target / name, _recorded_size(entry))
        try:
            verify(target)
        except Damaged as error:
            raise InvalidFile(f"is damaged: {error}") from None
    return folder


def _recorded_size(entry: Any) -> int:
    """Return the size of a file from its entry in the manifest."""
    size = entry.get("bytes") if isinstance(entry, dict) else None
    if not isinstance(size, int) or size < 0:
        raise InvalidFile(f"has a {MANIFEST} without sizes")
    return size


def _read(open_file: OpenFile, name: str) -> bytes:
    """Return the contents of a small file; raise if it is too large."""
    with open_file(name) as file:
        data = file.read(MAX_SMALL_BYTES + 1)
    if len(data) > MAX_SMALL_BYTES:
        raise InvalidFile(f"has a {name} that is larger than 16 MiB")
    return data


def _parse(texts: dict[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file; `texts` has the contents by name."""
    try:
        data = parse_json(texts[name], MAX_YAML_NODES)
    except ValueError as error:
        raise InvalidFile(f"has a {name} that cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise InvalidFile(f"has a {name} that is not a mapping")
    return data


def _copy(open_file: OpenFile, name: str, target: Path, size: int) -> None:
    """Copy a file in parts; raise if it does not have this size."""
    copied = 0
    with open_file(name) as source, open(create_file(target), "wb") as file:
        while part := source.read(PART_BYTES):
            copied += len(part)
            if copied > size:
                break
            file.write(part)
    if copied != size:
        raise InvalidFile(f"has a {name} of another size than in its {MANIFEST}")


@contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed if the block succeeds."""
    with explain_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder.parent))
        try:
            yield partial
            with suppress(OSError):  # another process has already written the folder
                os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _cache_folder() -> Path:
    """Return the folder of unpacked packages in the cache of the user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not cache.is_absolute():
        cache = Path("~/.cache").expanduser()
    return cache / "reverie" / "packages"
