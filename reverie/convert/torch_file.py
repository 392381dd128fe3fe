"""Read tensors out of files that PyTorch saved, and run nothing that is in them.

Such a file is a zip archive: a pickle that says what there is, and the raw numbers of
each tensor beside it. The pickle is read with a short list of names it may ask for;
any other is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
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


def read_torch_file(path: str | Path) -> Any:
    """What a file holds: containers, numbers, texts and tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith("/data.pkl")]
            if len(names) != 1:
                raise UserError(
                    f"{path} is not a file that PyTorch saved.\n"
                    "  Fix: pass the checkpoint itself, such as last.pt."
                )
            root = names[0].removesuffix("data.pkl")
            return _Reader(archive, root, str(path)).read()
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

    def read(self) -> Any:
        try:
            return self.load()
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
            return _rebuild
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module == "torch" and name in KINDS:
            return _Kind(KINDS[name])
        raise UserError(
            f"{self.path} asks for {module}.{name}, which no checkpoint needs.\n"
            "  Fix: do not use this file unless you know who made it."
        )

    def persistent_load(self, pid: Any) -> Tensor:
        what, kind, key, _, count = pid
        if what != "storage" or not isinstance(kind, _Kind):
            raise UserError(
                f"{self.path} refers to something other than numbers.\n"
                "  Fix: do not use this file unless you know who made it."
            )
        if key not in self.storages:
            data = bytearray(self.archive.read(f"{self.root}data/{key}"))
            empty = torch.empty(0, dtype=kind.dtype)
            flat = torch.frombuffer(data, dtype=kind.dtype) if data else empty
            self.storages[key] = flat[:count]
        return self.storages[key]


def _rebuild(
    flat: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> Tensor:
    return flat.as_strided(size, stride, offset).clone()
