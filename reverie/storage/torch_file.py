"""Load tensors from files written by `torch.save` without executing code.

Such a file is a zip archive with a pickle of the object structure and the raw data of
each tensor storage. The unpickler accepts only a short list of names and rejects all
others. Unlike `torch.load(weights_only=True)`, it can load a subset of the keys, and
reads the data of those tensors only.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reverie.api import UserError

STORAGE_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _StorageType(NamedTuple):
    dtype: torch.dtype


class _Storage(NamedTuple):
    key: str
    length: int
    dtype: torch.dtype


class _LazyTensor(NamedTuple):
    """A tensor whose data has not been read yet."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def read_torch_file(path: str | Path, keys: Collection[str] | None = None) -> Any:
    """Return the saved object: containers, numbers, strings and tensors.

    If the object is a mapping, `keys` selects the entries to load.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith("/data.pkl")]
            if len(names) != 1:
                raise UserError(
                    f"{path} is not a file written by torch.save.\n"
                    "  Fix: pass the checkpoint file, such as last.pt."
                )
            root = names[0].removesuffix("data.pkl")
            return _Reader(archive, root, str(path)).read(keys)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read: {error}.\n"
            "  Fix: pass a complete file written by PyTorch 1.6 or later."
        ) from None


def read_tensors(path: str | Path, entry: str = "") -> dict[str, Tensor]:
    """Return the tensors of a saved dict, or of its `entry` if it has one, by name."""
    data = read_torch_file(path)
    data = data.get(entry, data) if isinstance(data, Mapping) else {}
    items = data.items() if isinstance(data, Mapping) else ()
    return {k: v for k, v in items if isinstance(k, str) and isinstance(v, Tensor)}


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str, path: str):
        super().__init__(io.BytesIO(archive.read(root + "data.pkl")))
        self.archive, self.root, self.path = archive, root, path
        self.storages: dict[str, Tensor] = {}

    def read(self, keys: Collection[str] | None) -> Any:
        try:
            data = self.load()
            if keys is not None and isinstance(data, Mapping):
                data = {key: data[key] for key in keys if key in data}
            return self._load_tensors(data)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.path} is not a complete checkpoint ({error}).\n"
                "  Fix: copy it again."
            ) from error

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: _LazyTensor(
                storage, offset, size, stride
            )
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module == "torch" and name in STORAGE_DTYPES:
            return _StorageType(STORAGE_DTYPES[name])
        raise UserError(
            f"{self.path} would import {module}.{name}, which is not allowed.\n"
            "  Fix: use a checkpoint that holds only tensors and plain containers."
        )

    def persistent_load(self, pid: Any) -> _Storage:
        tag, kind, key, _, count = pid
        if tag != "storage" or not isinstance(kind, _StorageType):
            raise UserError(
                f"{self.path} refers to data that is not a tensor storage.\n"
                "  Fix: use a checkpoint that holds only tensors and plain containers."
            )
        return _Storage(key, count, kind.dtype)

    def _load_tensors(self, nest: Any) -> Any:
        """Replace the lazy tensors in nested containers by loaded ones."""
        if isinstance(nest, _LazyTensor):
            flat = self._load_storage(nest.storage)
            return flat.as_strided(nest.size, nest.stride, nest.offset).clone()
        if isinstance(nest, dict):
            return type(nest)((key, self._load_tensors(x)) for key, x in nest.items())
        if isinstance(nest, list | tuple):
            return type(nest)(self._load_tensors(x) for x in nest)
        return nest

    def _load_storage(self, storage: _Storage) -> Tensor:
        key, length, dtype = storage
        if key not in self.storages:
            data = bytearray(self.archive.read(f"{self.root}data/{key}"))
            empty = torch.empty(0, dtype=dtype)
            flat = torch.frombuffer(data, dtype=dtype) if data else empty
            self.storages[key] = flat[:length]
        return self.storages[key]
