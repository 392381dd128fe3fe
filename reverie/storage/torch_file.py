"""Read tensors out of files that PyTorch saved, and run nothing that is in them.

Such a file is a zip archive: a pickle that says what there is, and the raw numbers of
each tensor beside it. The pickle is read with a short list of names it may ask for;
any other is refused. Numbers are read last, and only those that are wanted.
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

KINDS = {
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


class _Kind(NamedTuple):
    dtype: torch.dtype


class _Storage(NamedTuple):
    key: str
    length: int
    dtype: torch.dtype


class _Stored(NamedTuple):
    """A tensor whose numbers have not been read yet."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def read_torch_file(path: str | Path, keys: Collection[str] | None = None) -> Any:
    """What a file holds: containers, numbers, texts and tensors.

    Of a mapping, all entries or those that `keys` names.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith("/data.pkl")]
            if len(names) != 1:
                raise UserError(
                    f"{path} is not a file that PyTorch saved.\n"
                    "  Fix: pass the checkpoint itself, such as last.pt."
                )
            root = names[0].removesuffix("data.pkl")
            return _Reader(archive, root, str(path)).read(keys)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read: {error}.\n"
            "  Fix: pass a file saved by PyTorch 1.6 or later, whole."
        ) from None


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
            return self._filled(data)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.path} is not a whole checkpoint ({error}).\n"
                "  Fix: copy it again."
            ) from error

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: _Stored(
                storage, offset, size, stride
            )
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module == "torch" and name in KINDS:
            return _Kind(KINDS[name])
        raise UserError(
            f"{self.path} asks for {module}.{name}, which no checkpoint needs.\n"
            "  Fix: do not use this file unless you know who made it."
        )

    def persistent_load(self, pid: Any) -> _Storage:
        what, kind, key, _, count = pid
        if what != "storage" or not isinstance(kind, _Kind):
            raise UserError(
                f"{self.path} refers to something other than numbers.\n"
                "  Fix: do not use this file unless you know who made it."
            )
        return _Storage(key, count, kind.dtype)

    def _filled(self, nest: Any) -> Any:
        """The same nest with the numbers of its tensors."""
        if isinstance(nest, _Stored):
            flat = self._numbers(nest.storage)
            return flat.as_strided(nest.size, nest.stride, nest.offset).clone()
        if isinstance(nest, dict):
            return type(nest)((key, self._filled(x)) for key, x in nest.items())
        if isinstance(nest, list | tuple):
            return type(nest)(self._filled(x) for x in nest)
        return nest

    def _numbers(self, storage: _Storage) -> Tensor:
        key, length, dtype = storage
        if key not in self.storages:
            data = bytearray(self.archive.read(f"{self.root}data/{key}"))
            empty = torch.empty(0, dtype=dtype)
            flat = torch.frombuffer(data, dtype=dtype) if data else empty
            self.storages[key] = flat[:length]
        return self.storages[key]
