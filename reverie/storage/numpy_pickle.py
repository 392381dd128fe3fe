"""NumPy arrays in untrusted pickles: check their description, then build them.

The arrays are views of the file's bytes. Their type, shape and number of bytes are
checked before they are passed to NumPy.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from reverie.storage.limits import Budget, InvalidFile
from reverie.storage.pickle_parser import (
    Description,
    Function,
    Name,
    PickleParser,
    convert_tree,
)

MAX_DIMENSIONS = 32
MAX_ITEMS = 1 << 48
"""Maximum number of entries of an array; more cannot be in memory."""
_NUMERIC = re.compile(r"b1|[iu][1248]|f[248]")
"""Accepted NumPy type codes: bool, integers and floats."""
_ORDERS = {"|": "=", "=": "=", "<": "<", ">": ">"}
"""Byte order of a dtype for each byte order in a pickle; `|` means that a number has
only one byte, `=` the order of this machine."""
_NDARRAY = Name("numpy", "ndarray")
_BFLOAT16 = Name("ml_dtypes", "bfloat16")
_RECONSTRUCT = frozenset(
    Name(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")
)
CONSTANTS = frozenset({_NDARRAY, _BFLOAT16})
"""Classes that a pickle passes to the functions below."""


def parse_arrays(data: bytes, shapes_only: bool = False) -> Any:
    """Parse a pickle of plain values and numeric arrays; raise `InvalidFile`.

    With `shapes_only`, arrays have no data: see `build_without_data`.
    """
    functions = ArrayFunctions(len(data)).by_name()
    value = PickleParser(data, functions, CONSTANTS).parse()
    return convert_tree(value, build_without_data if shapes_only else build_array)


class ArrayFunctions:
    """Safe replacements of the functions that build arrays when pickles are loaded.

    `size` is the maximum number of bytes of all arrays together. The methods have the
    arguments of the functions that they replace.
    """

    def __init__(self, size: int):
        self.budget = Budget(size, "arrays")

    def by_name(self) -> dict[Name, Function]:
        """Return the replacements by the name of the original function."""
        functions: dict[Name, Function] = {
            Name("numpy", "dtype"): DtypeDescription,
            Name("jax._src.array", "_reconstruct_array"): self._reconstruct_jax,
            **dict.fromkeys(_RECONSTRUCT, self._reconstruct),
        }
        for core in ("core", "_core"):
            functions[Name(f"numpy.{core}.multiarray", "scalar")] = self._scalar
            functions[Name(f"numpy.{core}.numeric", "_frombuffer")] = self._from_buffer
        return functions

    def _reconstruct(self, kind: Any, shape: Any, code: Any) -> ArrayDescription:
        if kind != _NDARRAY:
            raise InvalidFile("has an array of an unknown class")
        return ArrayDescription(self.budget)

    def _from_buffer(
        self, data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None
    ) -> ArrayDescription:
        if order not in ("C", "F") or axes is not None:
            raise InvalidFile("has an array in an unknown order")
        array = ArrayDescription(self.budget)
        array.set_state((1, shape, dtype, order == "F", data))
        return array

    def _scalar(self, dtype: Any, data: Any) -> ArrayDescription:
        array = ArrayDescription(self.budget, is_scalar=True)
        array.set_state((1, (), dtype, False, data))
        return array

    def _reconstruct_jax(
        self, function: Any, arguments: Any, state: Any, properties: Any
    ) -> ArrayDescription:
        if not isinstance(function, Name) or function not in _RECONSTRUCT:
            raise InvalidFile("has a JAX array that is not stored as a NumPy array")
        array = self._reconstruct(*arguments)
        array.set_state(state)
        return array


class DtypeDescription(Description):
    """The type of numbers, such as `f4`, and their byte order."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True):
        self.is_bfloat16 = code == _BFLOAT16
        if not self.is_bfloat16 and not (
            isinstance(code, str) and _NUMERIC.fullmatch(code)
        ):
            raise InvalidFile("has an array that is not numeric")
        self.code, self.order = "u2" if self.is_bfloat16 else code, "="

    def set_state(self, state: Any) -> None:
        # version, byte order, subarray, field names, fields, itemsize, alignment, flags
        if not (
            type(state) is tuple
            and len(state) == 8
            and type(state[1]) is str
            and state[1] in _ORDERS
            and state[2] is state[3] is state[4] is None
        ):
            raise InvalidFile("has an array whose type has fields or is damaged")
        self.order = _ORDERS[state[1]]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.order + self.code)


class ArrayDescription(Description):
    """Type, shape and bytes of an array."""

    def __init__(self, budget: Budget, is_scalar: bool = False):
        self.budget, self.is_scalar = budget, is_scalar
        self.data: memoryview | None = None

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5 or self.data is not None:
            raise InvalidFile("has a damaged array")
        _, self.shape, dtype, self.is_fortran, data = state
        if not isinstance(dtype, DtypeDescription):
            raise InvalidFile("has an array without a type")
        if not isinstance(data, memoryview):
            raise InvalidFile("has an array whose data is not bytes")
        check_shape(self.shape)
        self.type, size = dtype, math.prod(self.shape) * dtype.dtype.itemsize
        if len(data) != size:
            raise InvalidFile(
                f"has an array of shape {self.shape} with {len(data)} bytes instead "
                f"of {size}"
            )
        self.budget.take(size)
        self.data = data

    def build(self) -> np.ndarray | np.generic:
        """Return the array, or the scalar, that is described."""
        if self.data is None:
            raise InvalidFile("has an array without data")
        flat = np.frombuffer(self.data, self.type.dtype)
        if self.type.order == ">" or self.type.is_bfloat16:
            flat = flat.astype(flat.dtype.newbyteorder("="))
        if self.type.is_bfloat16:  # the upper half of a float32
            flat = (flat.astype(np.uint32) << 16).view(np.float32)
        if flat.dtype == np.bool_ and flat.view(np.uint8).max(initial=0) > 1:
            raise InvalidFile("has an array of bool with other values than 0 and 1")
        if self.is_scalar:
            value: np.generic = flat[0]
            return value
        return flat.reshape(self.shape, order="F" if self.is_fortran else "C")


def build_array(description: Description) -> np.ndarray | np.generic:
    """Return the array of a description; raise if it describes something else."""
    if not isinstance(description, ArrayDescription):
        raise InvalidFile("has a dtype where a value is expected")
    return description.build()


def build_without_data(description: Description) -> np.ndarray:
    """Return an array of this shape and type; a single zero is broadcast to all
    entries, which takes no memory."""
    if not isinstance(description, ArrayDescription) or description.data is None:
        raise InvalidFile("has an array without data")
    return np.broadcast_to(np.zeros((), description.type.dtype), description.shape)


def check_shape(shape: Any) -> None:
    """Raise `InvalidFile` unless a value is the shape of an array."""
    if (
        type(shape) is not tuple
        or len(shape) > MAX_DIMENSIONS
        or not all(is_size(n) for n in shape)
        or math.prod(max(n, 1) for n in shape) > MAX_ITEMS
    ):
        raise InvalidFile("has an array with an invalid shape")


def is_size(value: Any) -> bool:
    """True for an integer that can be a size, a stride or an offset."""
    return type(value) is int and 0 <= value <= MAX_ITEMS
