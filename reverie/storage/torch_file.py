"""Load tensors from files written by `torch.save` without executing code.

`torch.load(weights_only=True)` accepts only tensors and plain containers. The file is
memory-mapped: without `verify`, only the data of the returned tensors is read.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reverie.api import UserError


def read_torch_file(
    path: str | Path, keys: Collection[str] | None = None, verify: bool = True
) -> Any:
    """Return the saved object: containers, numbers, strings and tensors.

    If the object is a mapping, `keys` selects the entries to load. With `verify`, the
    checksums in the file are compared first.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if verify else None
        if damaged:
            raise ValueError(f"{damaged} has a wrong checksum")
        data = torch.load(path, "cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        name = found[1] if found else "unknown code"
        raise UserError(
            f"{path} would import {name}, which is not allowed.\n"
            "  Fix: use a checkpoint that holds only tensors and plain containers."
        ) from None
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path} cannot be read: {reason}.\n"
            "  Fix: pass a complete file written by torch.save of PyTorch 1.6 or later."
        ) from None
    if keys is not None and isinstance(data, Mapping):
        data = {key: data[key] for key in keys if key in data}
    return _copy_tensors(data)


def read_tensors(path: str | Path, entry: str = "") -> dict[str, Tensor]:
    """Return the tensors of a saved dict, or of its `entry` if it has one, by name."""
    data = read_torch_file(path)
    data = data.get(entry, data) if isinstance(data, Mapping) else {}
    items = data.items() if isinstance(data, Mapping) else ()
    return {k: v for k, v in items if isinstance(k, str) and isinstance(v, Tensor)}


def _copy_tensors(nest: Any) -> Any:
    """Copy the tensors in nested containers, so that the file is no longer mapped."""
    if isinstance(nest, Tensor):
        return nest.detach().clone()
    if isinstance(nest, dict):
        return type(nest)((key, _copy_tensors(x)) for key, x in nest.items())
    if isinstance(nest, list | tuple):
        return type(nest)(_copy_tensors(x) for x in nest)
    return nest
