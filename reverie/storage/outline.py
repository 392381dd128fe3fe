"""Read the structure of a checkpoint file without the data of its arrays.

The structure (outline) is used to detect which program wrote a file, and to infer sizes
from the shapes of its arrays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from reverie.api import UserError
from reverie.storage.file_kind import PICKLE, TORCH, file_kind
from reverie.storage.limits import InvalidFile, read_bytes
from reverie.storage.numpy_pickle import parse_arrays
from reverie.storage.torch_file import read_shapes

MAX_PICKLE_BYTES = 16 << 30
"""Larger pickle files are refused. A checkpoint of the largest preset of DreamerV3 has
5 GiB."""


class Outline(NamedTuple):
    """The format of a file, and its contents without the data of arrays."""

    kind: str
    """Format, such as `a file of torch.save`."""
    contents: Any
    """Containers, numbers and arrays without data; None if they cannot be read."""
    problem: str = ""
    """Why the file cannot be read; a text that follows the path in a message."""


def read_outline(path: Path) -> Outline:
    """Return the outline of a file; raise `UserError` if it cannot be opened."""
    kind = ""
    try:
        kind = file_kind(path)
        if kind == TORCH:
            return Outline(kind, read_shapes(path))
        if kind == PICKLE:
            data = read_bytes(path, MAX_PICKLE_BYTES)
            return Outline(kind, parse_arrays(data, shapes_only=True))
    except InvalidFile as error:
        return Outline(kind, None, str(error))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}.\n"
            "  Fix: give a file that you have permission to read."
        ) from None
    return Outline(kind, None)
