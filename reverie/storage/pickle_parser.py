"""Parse pickles of plain values without calling the functions that a file names.

`pickle.Unpickler` calls functions that the file names, with arguments from the file, so
a list of allowed functions is safe only if each of them is safe for every argument;
`numpy.ndarray` is not. Here the opcodes are interpreted in Python. Only the opcodes
that files of weights need are accepted. A name such as `numpy.dtype` is replaced by a
function of Reverie that checks its arguments and returns a `Description`, from which
the caller builds the array after the whole file has been checked.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reverie.storage.limits import Budget, InvalidFile, check_tree, quote

MAX_OPCODES = 1_000_000
"""About 20 opcodes describe an array, so this allows for tens of thousands."""
MAX_DIGITS = 100
"""Maximum length of a number that is stored as text."""
MAX_INT_KEYS = 20_000
"""Maximum number of dict keys that are integers. Integers with the same hash make each
lookup in a dict linear in its size, and so the parsing time quadratic."""
_MISSING = object()  # value of unused entries of the memo

# Opcodes of the pickle format (see `pickletools`), by what they push on the stack. The
# `Struct` is the type of a number, or of the length of a text or of bytes.
_OPCODE_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_STOP = ord(".")
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_EMPTY: dict[int, type] = {ord(")"): tuple, ord("]"): list, ord("}"): dict}
_NUMBERS = {
    ord("K"): struct.Struct("B"),
    ord("M"): struct.Struct("<H"),
    ord("J"): struct.Struct("<i"),
    ord("G"): struct.Struct(">d"),
}
_TEXTS = {
    0x8C: struct.Struct("B"),
    ord("X"): struct.Struct("<I"),
    0x8D: struct.Struct("<Q"),
}
_BYTES = {
    ord("C"): struct.Struct("B"),
    ord("B"): struct.Struct("<I"),
    0x8E: struct.Struct("<Q"),
    0x96: struct.Struct("<Q"),
}
_BYTE, _UINT32, _UINT64 = _TEXTS[0x8C], struct.Struct("<I"), _TEXTS[0x8D]


@dataclass(frozen=True, slots=True)
class Name:
    """A function or class that the file refers to; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return quote(f"{self.module}.{self.name}")


class Description:
    """An object that is described by the file and built after parsing."""

    def set_state(self, state: Any) -> None:
        """Add the values that the opcode BUILD passes to `__setstate__`."""
        raise InvalidFile("sets the state of an object that has none")


Function = Callable[..., Any]


class PickleParser:
    """Interprets one pickle of protocol 0 to 5, as Python 3 writes them.

    `functions` are called instead of the names in the file; names in `constants` may
    only be arguments. `load_persistent` is called with the ids of objects that are
    stored outside the pickle, such as tensor storages of PyTorch.
    """

    def __init__(
        self,
        data: bytes,
        functions: Mapping[Name, Function],
        constants: frozenset[Name] = frozenset(),
        load_persistent: Callable[[Any], Any] | None = None,
    ):
        self.data, self.view = data, memoryview(data)
        self.position = 0
        self.functions: dict[Name, Function] = {
            **functions,
            Name("_codecs", "encode"): self._encode,
            Name("__builtin__", "bytes"): _empty_bytes,
            Name("collections", "OrderedDict"): _empty_dict,
        }
        self.constants, self.load_persistent = constants, load_persistent
        # Protocols 0 to 2 store bytes as text. Encoding the same text repeatedly
        # would let a small file fill the memory.
        self.encoded = Budget(len(data), "text that is encoded as bytes")
        self.stack: list[Any] = []
        self.marked_stacks: list[list[Any]] = []  # the stacks below each MARK
        # Values that opcodes refer to by index. A list, because a file could choose
        # indices for which a dict is slow.
        self.memo: list[Any] = []
        self.int_keys = 0  # number of dict keys so far that are integers

    def parse(self) -> Any:
        """Return the value, made of dicts, lists, tuples, strings, bytes (as
        memoryviews), numbers and descriptions; raise `InvalidFile` for anything else.
        """
        try:
            value = self._interpret()
        except InvalidFile:
            raise
        except (
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            struct.error,
        ) as error:
            raise InvalidFile(f"is damaged at byte {self.position}") from error
        check_tree(value, _children)
        return value

    def _interpret(self) -> Any:
        """Execute the opcodes until STOP, and return the top of the stack."""
        for _ in range(MAX_OPCODES):
            code = self.data[self.position]
            self.position += 1
            if code == _STOP:
                return self.stack.pop()
            if code in _NUMBERS:
                self.stack.append(self._number(_NUMBERS[code]))
            elif code in _TEXTS:
                view = self._take(self._number(_TEXTS[code]))
                self.stack.append(str(view, "utf-8", "surrogatepass"))
            elif code in _BYTES:
                self.stack.append(self._take(self._number(_BYTES[code])))
            elif code in _CONSTANTS:
                self.stack.append(_CONSTANTS[code])
            elif code in _EMPTY:
                self.stack.append(_EMPTY[code]())
            elif code in _OPERATIONS:
                _OPERATIONS[code](self)
            else:
                name = _OPCODE_NAMES.get(code)
                raise InvalidFile(
                    f"has the pickle opcode {name}, which is not allowed"
                    if name
                    else f"is damaged at byte {self.position - 1}"
                )
        raise InvalidFile(f"has more than {MAX_OPCODES:,} pickle opcodes")

    def _take(self, size: int) -> memoryview:
        """Return the next `size` bytes and move the position after them."""
        part = self.view[self.position : self.position + size]
        if len(part) != size:
            raise InvalidFile("ends in the middle of a value; it is not complete")
        self.position += size
        return part

    def _number(self, format: struct.Struct) -> Any:
        return format.unpack(self._take(format.size))[0]

    def _line(self) -> bytes:
        """Return the bytes up to the next newline; protocol 0 stores values as text."""
        end = self.data.index(b"\n", self.position)
        line = self.data[self.position : end]
        self.position = end + 1
        return line

    def _digits(self) -> bytes:
        """Return the next line, which is a number."""
        line = self._line()
        if len(line) > MAX_DIGITS:
            raise InvalidFile(f"has a number of {len(line)} digits")
        return line

    def _pop_to_mark(self) -> list[Any]:
        """Remove and return the values above the last MARK."""
        items = self.stack
        self.stack = self.marked_stacks.pop()
        return items

    # Opcodes, in the order of `_OPERATIONS`. `_text_` marks those of protocol 0, whose
    # arguments are text, `_to_mark` those that use all values above the last MARK.

    def _mark(self) -> None:
        self.marked_stacks.append(self.stack)
        self.stack = []

    def _pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._pop_to_mark()

    def _discard_to_mark(self) -> None:
        self._pop_to_mark()

    def _skip_protocol(self) -> None:
        protocol = self._number(_BYTE)
        if protocol > 5:
            raise InvalidFile(f"has pickle protocol {protocol}; 0 to 5 can be read")

    def _skip_frame_size(self) -> None:
        self._take(_UINT64.size)

    def _text_int(self) -> None:
        line = self._digits()
        flags = {b"00": False, b"01": True}
        self.stack.append(flags[line] if line in flags else int(line))

    def _text_long(self) -> None:
        self.stack.append(int(self._digits().rstrip(b"L")))

    def _text_float(self) -> None:
        self.stack.append(float(self._digits()))

    def _text_string(self) -> None:
        self.stack.append(str(self._line(), "raw-unicode-escape"))

    def _long(self) -> None:
        digits = self._take(self._number(_BYTE))
        self.stack.append(int.from_bytes(digits, "little", signed=True))

    def _tuple_to_mark(self) -> None:
        items = self._pop_to_mark()
        self.stack.append(tuple(items))

    def _tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def _list_to_mark(self) -> None:
        items = self._pop_to_mark()
        self.stack.append(items)

    def _dict_to_mark(self) -> None:
        items = self._pop_to_mark()
        self.stack.append({})
        self._set_items(items)

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _append_to_mark(self) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise InvalidFile("appends to an object that is not a list")
        target.extend(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_items_to_mark(self) -> None:
        self._set_items(self._pop_to_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise InvalidFile("sets items of an object that is not a dict")
        keys = items[::2]
        for key in keys:
            # Nested tuples may take exponential time to hash, and large integers may
            # all have the same hash.
            if not (type(key) is str or (type(key) is int and abs(key) < 1 << 60)):
                kind = type(key).__name__
                raise InvalidFile(f"has a key that is a {kind}, not a string")
        self.int_keys += sum(type(key) is int for key in keys)
        if self.int_keys > MAX_INT_KEYS:
            raise InvalidFile(f"has more than {MAX_INT_KEYS:,} keys that are integers")
        target.update(zip(keys, items[1::2], strict=True))

    def _get(self, index: int) -> None:
        if not 0 <= index < len(self.memo) or self.memo[index] is _MISSING:
            raise LookupError
        self.stack.append(self.memo[index])

    def _put(self, index: int) -> None:
        if not 0 <= index < MAX_OPCODES:
            raise LookupError
        self.memo += [_MISSING] * (index + 1 - len(self.memo))
        self.memo[index] = self.stack[-1]

    def _memoize(self) -> None:
        self._put(len(self.memo))

    def _text_global(self) -> None:
        module, name = str(self._line(), "utf-8"), str(self._line(), "utf-8")
        self._global(module, name)

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._global(module, name)

    def _global(self, module: Any, name: Any) -> None:
        """Push the name of a function or class, if it is allowed."""
        if type(module) is not str or type(name) is not str:
            raise InvalidFile("has a name that is not a string")
        found = Name(module, name)
        if found not in self.functions and found not in self.constants:
            raise InvalidFile(f"contains {found}, which is not allowed")
        self.stack.append(found)

    def _reduce(self) -> None:
        """Call the replacement of a named function with a tuple of arguments."""
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or type(arguments) is not tuple:
            raise InvalidFile("calls an object that is not a function")
        if name not in self.functions:
            raise InvalidFile(f"calls {name}, which is not allowed")
        self.stack.append(self.functions[name](*arguments))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is dict and type(state) is dict:
            return  # attributes of an OrderedDict, such as `_metadata` of PyTorch
        if not isinstance(target, Description):
            raise InvalidFile("sets the state of an object that has none")
        target.set_state(state)

    def _text_persistent(self) -> None:
        self._load_persistent(str(self._line(), "ascii"))

    def _stack_persistent(self) -> None:
        self._load_persistent(self.stack.pop())

    def _load_persistent(self, identifier: Any) -> None:
        if self.load_persistent is None:
            raise InvalidFile("refers to objects outside of the file")
        self.stack.append(self.load_persistent(identifier))

    def _encode(self, text: Any, encoding: Any) -> memoryview:
        """Replacement of `codecs.encode`, with which protocols 0 to 2 store bytes."""
        if type(text) is not str or encoding != "latin1":
            raise InvalidFile("has bytes that are not encoded as latin1")
        self.encoded.take(len(text))
        return memoryview(text.encode("latin1"))


_OPERATIONS: dict[int, Callable[[PickleParser], None]] = {
    ord("("): PickleParser._mark,
    ord("0"): PickleParser._pop,
    ord("1"): PickleParser._discard_to_mark,
    0x80: PickleParser._skip_protocol,
    0x95: PickleParser._skip_frame_size,
    ord("I"): PickleParser._text_int,
    ord("L"): PickleParser._text_long,
    ord("F"): PickleParser._text_float,
    ord("V"): PickleParser._text_string,
    0x8A: PickleParser._long,
    ord("t"): PickleParser._tuple_to_mark,
    0x85: lambda parser: parser._tuple_of(1),
    0x86: lambda parser: parser._tuple_of(2),
    0x87: lambda parser: parser._tuple_of(3),
    ord("l"): PickleParser._list_to_mark,
    ord("d"): PickleParser._dict_to_mark,
    ord("a"): PickleParser._append,
    ord("e"): PickleParser._append_to_mark,
    ord("s"): PickleParser._set_item,
    ord("u"): PickleParser._set_items_to_mark,
    ord("g"): lambda parser: parser._get(int(parser._digits())),
    ord("h"): lambda parser: parser._get(parser._number(_BYTE)),
    ord("j"): lambda parser: parser._get(parser._number(_UINT32)),
    ord("p"): lambda parser: parser._put(int(parser._digits())),
    ord("q"): lambda parser: parser._put(parser._number(_BYTE)),
    ord("r"): lambda parser: parser._put(parser._number(_UINT32)),
    0x94: PickleParser._memoize,
    ord("c"): PickleParser._text_global,
    0x93: PickleParser._stack_global,
    ord("R"): PickleParser._reduce,
    ord("b"): PickleParser._build,
    ord("P"): PickleParser._text_persistent,
    ord("Q"): PickleParser._stack_persistent,
}
"""Accepted opcodes. Sets, instances (INST, OBJ, NEWOBJ), extension codes and
out-of-band buffers are refused.
"""


def convert_tree(value: Any, build: Callable[[Description], Any]) -> Any:
    """Return parsed values with every description replaced by `build(description)`.

    An object that the file refers to several times is built once, so that a small file
    does not fill the memory with copies.
    """
    built: dict[int, Any] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, Description | memoryview):
            if id(value) not in built:
                built[id(value)] = (
                    build(value) if isinstance(value, Description) else bytes(value)
                )
            return built[id(value)]
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(convert(item) for item in value)
        return value

    return convert(value)


def _children(value: Any) -> Any:
    """Return the values directly inside a container; raise if it is only a name."""
    if isinstance(value, Name):
        raise InvalidFile(f"contains {value}, which is not a value")
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _empty_bytes() -> memoryview:
    return memoryview(b"")


def _empty_dict() -> dict[Any, Any]:
    return {}
