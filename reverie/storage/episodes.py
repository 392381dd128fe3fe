"""Whole episodes as files, in our own time convention (see `api.py`).

An episode is a dict of arrays that share their first axis. It is stored as a file
`<id>-<rows>-<checksum>.safetensors`; `readers/npz.py` does the same in the layout of
dreamerv3-torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reverie.api import UserError
from reverie.storage import segments as files
from reverie.storage.segments import Arrays

Episode = Arrays


def write_episode(directory: Path, name: str, episode: Episode) -> Path:
    """Write one episode, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    source = files.write(directory, f"{name}-{len(episode['is_first'])}", episode)
    files.sync(directory, [source.record.name])
    return directory / source.record.name


def read_episode(path: Path) -> Episode:
    """Read one episode; a damaged file is a ValueError that says what is wrong."""
    try:
        size, crc = path.stat().st_size, int(path.stem.rpartition("-")[2], 16)
        record = files.FileRecord(path.name, size, crc)
        if why := files.problem(path.parent, record):
            raise ValueError(f"{path} {why}")
        columns = files.find(path.parent, record).open(path.parent)[1]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole episode ({error})") from error
    return {key: np.array(value) for key, value in columns.items()}


def read_episodes(directory: Path) -> Iterator[tuple[str, Episode]]:
    """Every readable episode of a folder by name; damaged files are named, skipped."""
    paths = sorted(directory.glob(f"*{files.SUFFIX}"))
    if not paths:
        raise UserError(
            f"{directory} holds no episodes (*{files.SUFFIX}).\n"
            "  Fix: check the path, or export some first."
        )
    for path in paths:
        try:
            episode = read_episode(path)
        except ValueError as error:
            warnings.warn(f"{error}; skipped", RuntimeWarning, stacklevel=2)
            continue
        yield path.stem.rsplit("-", 2)[0], episode
