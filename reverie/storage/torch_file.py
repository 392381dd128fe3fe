"""Load tensors from files written by `torch.save` without executing code.

Such a file is a ZIP archive with a pickle of the object structure and the raw data of
each tensor storage. The pickle is parsed by `pickle_parser`, and the position of each
tensor in its storage is checked. Unlike `torch.load(weights_only=True)`, this can load
a subset of the keys, and reads the data of those tensors only.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reverie.api import UserError
from reverie.storage.file_kind import OLD_TORCH, TORCH, file_kind, zip_kind
from reverie.storage.limits import (
    ALWAYS_ALLOWED_BYTES,
    Budget,
    InvalidFile,
    open_member,
    open_zip,
    quote,
    read_parts,
)
from reverie.storage.numpy_pickle import (
    CONSTANTS,
    ArrayFunctions,
    build_array,
    build_without_data,
    check_shape,
    is_size,
)
from reverie.storage.pickle_parser import (
    Description,
    Function,
    Name,
    PickleParser,
    convert_tree,
)

STORAGE_DTYPES = {
    Name("torch", "FloatStorage"): torch.float32,
    Name("torch", "DoubleStorage"): torch.float64,
    Name("torch", "HalfStorage"): torch.float16,
    Name("torch", "BFloat16Storage"): torch.bfloat16,
    Name("torch", "LongStorage"): torch.int64,
    Name("torch", "IntStorage"): torch.int32,
    Name("torch", "ShortStorage"): torch.int16,
    Name("torch", "CharStorage"): torch.int8,
    Name("torch", "ByteStorage"): torch.uint8,
    Name("torch", "BoolStorage"): torch.bool,
}
MAX_COPIES = 4
"""Tensors may share a storage, but are copied; all tensors together may have this many
times the bytes of the file."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """Name of a tensor storage in the archive, number of elements, and their type."""

    key: str
    length: int
    dtype: torch.dtype


class _TensorDescription(Description):
    """A tensor whose data has not been read yet."""

    def __init__(
        self, storage: Any, offset: Any, size: Any, stride: Any, *hooks_and_flags: Any
    ):
        if not isinstance(storage, _Storage):
            raise InvalidFile("has a tensor without a storage")
        check_shape(size)
        has_strides = type(stride) is tuple and len(stride) == len(size)
        if not has_strides or not all(map(is_size, (offset, *stride))):
            raise InvalidFile("has a tensor with invalid strides")
        end = offset  # index after the last element in the storage
        if 0 not in size:
            end += 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if end > storage.length:
            raise InvalidFile("has a tensor that is larger than its storage")
        self.storage, self.offset = storage, offset
        self.size, self.stride = size, stride


def read_shapes(path: Path) -> Any:
    """Return the saved object with tensors on the device `meta`, without their data.

    Raises `OSError`, or `InvalidFile` if it is not a complete file of `torch.save`.
    """
    with open_zip(path) as archive:
        return _Reader(archive).read(None, shapes_only=True)


def read_torch_file(path: str | Path, keys: Collection[str] | None = None) -> Any:
    """Return the saved object: containers, numbers, strings, tensors and arrays.

    If the object is a dict, `keys` selects the entries to load.
    """
    try:
        try:
            with open_zip(Path(path)) as archive:
                kind = zip_kind(archive.namelist())
                if kind == TORCH:
                    return _Reader(archive).read(keys)
        except InvalidFile:
            kind = file_kind(path)
            if "ZIP" in kind or kind == TORCH:
                raise
    except InvalidFile as error:
        raise UserError(
            f"{path} {error}.\n  Fix: copy it again, or use a checkpoint that holds "
            "only tensors and plain containers."
        ) from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}.\n"
            "  Fix: pass a complete file written by PyTorch 1.6 or later."
        ) from None
    fix = "pass the checkpoint file, such as last.pt."
    if kind == OLD_TORCH:
        fix = "save it again with a current version of PyTorch."
    raise UserError(f"{path} is {kind}, not a file of torch.save.\n  Fix: {fix}")


def read_tensors(path: str | Path, entry: str = "") -> dict[str, Tensor]:
    """Return the tensors of a saved dict, or of its `entry` if it has one, by name."""
    data = read_torch_file(path)
    data = data.get(entry, data) if isinstance(data, Mapping) else {}
    items = data.items() if isinstance(data, Mapping) else ()
    return {k: v for k, v in items if isinstance(k, str) and isinstance(v, Tensor)}


class _Reader:
    """Reads the object in an archive that `torch.save` wrote."""

    def __init__(self, archive: zipfile.ZipFile):
        self.archive = archive
        self.storages: dict[str, bytearray] = {}
        names = [n for n in archive.namelist() if n.endswith("/data.pkl")]
        if len(names) != 1:
            raise InvalidFile("has more than one data.pkl")
        self.root = names[0].removesuffix("data.pkl")
        members = archive.infolist()
        if any(m.file_size != m.compress_size for m in members):
            raise InvalidFile("has compressed tensors, which torch.save does not write")
        assert archive.fp is not None  # it is open
        file_size = archive.fp.seek(0, os.SEEK_END)
        if sum(member.file_size for member in members) > file_size:
            raise InvalidFile("has members that overlap")
        self.tensor_budget = Budget(
            MAX_COPIES * file_size + ALWAYS_ALLOWED_BYTES, "tensors"
        )

    def read(self, keys: Collection[str] | None, shapes_only: bool = False) -> Any:
        """Return the saved object; see `read_torch_file` and `read_shapes`."""
        data = bytes(self._member("data.pkl"))
        functions: dict[Name, Function] = {
            **ArrayFunctions(len(data)).by_name(),
            Name("torch._utils", "_rebuild_tensor_v2"): _TensorDescription,
            Name("torch._utils", "_rebuild_parameter"): _tensor_of_parameter,
            Name("torch", "Size"): _checked_shape,
        }
        constants = CONSTANTS.union(STORAGE_DTYPES)
        value = PickleParser(data, functions, constants, _parse_storage_id).parse()
        if keys is not None and isinstance(value, dict):
            value = {key: value[key] for key in keys if key in value}
        return convert_tree(value, _build_meta_tensor if shapes_only else self._build)

    def _build(self, description: Description) -> Any:
        """Return the tensor or array of a description, with its data."""
        if not isinstance(description, _TensorDescription):
            return build_array(description)
        flat = self._storage_tensor(description.storage)
        self.tensor_budget.take(math.prod(description.size) * flat.itemsize)
        view = flat.as_strided(description.size, description.stride, description.offset)
        if description.storage.dtype != torch.bool:
            return view.clone()
        if view.numel() and view.max() > 1:
            raise InvalidFile("has a tensor of bool with other values than 0 and 1")
        return view.to(torch.bool)

    def _storage_tensor(self, storage: _Storage) -> Tensor:
        """Return the elements of a storage as a vector; bool as uint8, unchecked."""
        if storage.key not in self.storages:
            self.storages[storage.key] = self._member(f"data/{storage.key}")
        data = self.storages[storage.key]
        if storage.length * storage.dtype.itemsize > len(data):
            raise InvalidFile(f"has too few bytes in the storage {quote(storage.key)}")
        dtype = torch.uint8 if storage.dtype == torch.bool else storage.dtype
        if not storage.length:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=storage.length)

    def _member(self, name: str) -> bytearray:
        """Return the contents of a member of the archive."""
        try:
            member = self.archive.getinfo(self.root + name)
        except KeyError:
            raise InvalidFile(f"has no member {quote(name)!r}") from None
        with open_member(self.archive, member) as file:
            return bytearray().join(read_parts(file))


def _build_meta_tensor(description: Description) -> Any:
    """Return the tensor or array of a description, without data."""
    if not isinstance(description, _TensorDescription):
        return build_without_data(description)
    return torch.empty(description.size, dtype=description.storage.dtype, device="meta")


def _parse_storage_id(identifier: Any) -> _Storage:
    """Parse the id of a storage: ("storage", class, key, device, length)."""
    if type(identifier) is not tuple or len(identifier) != 5:
        raise InvalidFile("refers to objects outside of the file")
    _, kind, key, _, length = identifier
    if not isinstance(kind, Name) or kind not in STORAGE_DTYPES:
        raise InvalidFile("refers to data that is not a tensor storage")
    if type(key) is not str or not is_size(length):
        raise InvalidFile("has a damaged tensor storage")
    return _Storage(key, length, STORAGE_DTYPES[kind])


def _tensor_of_parameter(tensor: Any, *hooks_and_flags: Any) -> _TensorDescription:
    """Return the tensor of an `nn.Parameter`."""
    if not isinstance(tensor, _TensorDescription):
        raise InvalidFile("has a parameter that is not a tensor")
    return tensor


def _checked_shape(size: Any) -> Any:
    check_shape(size)
    return size
