"""Files of one episode each, in the time convention of `api.py`.

An episode is a dict of arrays with the same length. Its file is named
`<id>-<rows>-<checksum>.safetensors`; `datasets/readers/npz.py` reads and writes the
layout of dreamerv3-torch instead.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reverie.spaces import Arrays
from reverie.storage.array_file import (
    find_corruption,
    read_layout,
    record_from_name,
    write_arrays,
)
from reverie.storage.atomic import fsync, make_folder
from reverie.storage.limits import check_name
from reverie.storage.os_errors import explain_write_errors


def write_episode(directory: Path, name: str, episode: Arrays) -> Path:
    """Write one episode atomically; returns its path."""
    make_folder(directory, parents=True)
    check_name(name)
    file = write_arrays(directory, f"{name}-{len(episode['is_first'])}", episode)
    path = directory / file.record.name
    with explain_write_errors(path):
        fsync(path)
        fsync(directory)
    return path


def read_episode(path: Path) -> Arrays:
    """Read one episode; raise `ValueError` if it is corrupt."""
    try:
        record = record_from_name(path)
        if problem := find_corruption(path.parent, record, follow_links=True):
            raise ValueError(f"{path} {problem}")
        layout = read_layout(path.parent, record, follow_links=True)
        arrays = layout.open(path.parent)[1]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a complete episode ({error})") from error
    return {key: np.array(array) for key, array in arrays.items()}
