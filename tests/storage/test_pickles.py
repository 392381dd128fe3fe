"""Pickles of arrays: every protocol is read, and hostile files call nothing."""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import struct
import sys
import time
import tracemalloc
import types

import cloudpickle
import numpy as np
import pytest
from fuzz_files import fuzz_reader

from reverie.api import UserError
from reverie.convert.dreamerv3.weights import read_checkpoint
from reverie.storage.limits import InvalidFile
from reverie.storage.numpy_pickle import parse_arrays
from reverie.storage.pickle_parser import MAX_OPCODES

NUMPY = "numpy._core.multiarray"
EXAMPLE = {
    "params": {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "steps": np.arange(10, dtype=np.int32)[::2],
        "mask": np.array([True, False]),
        "half": np.ones((1, 2, 1), np.float16),
        "empty": np.zeros((0, 3), np.float32),
        "number": np.float32(3),
        "array of one": np.array(7, np.int64),
        "big endian": np.arange(3, dtype=">f4"),
    },
    "counters": {"updates": 3, "big": 1 << 100, "rate": 0.1, "names": ["a", ("b",)]},
    "flags": [True, False, None, b"", b"\x00\xff", "Δ", -1, 300, 70000],
}


def check_equal(found, expected):
    if isinstance(expected, np.ndarray | np.generic):
        assert type(found) is type(expected)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            check_equal(found[key], value)
    else:
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dumps", [pickle.dumps, pickle._dumps, cloudpickle.dumps])
def test_every_protocol_is_read(protocol, dumps):
    check_equal(parse_arrays(dumps(EXAMPLE, protocol=protocol)), EXAMPLE)


def test_names_of_older_versions_of_numpy_are_read():
    data = pickle.dumps(EXAMPLE, protocol=2).replace(b"numpy._core", b"numpy.core")
    check_equal(parse_arrays(data), EXAMPLE)


def test_shared_arrays_are_one_array():
    array = np.ones(3)
    found = parse_arrays(pickle.dumps([array, array]))
    assert found[0] is found[1]


def op(*parts) -> bytes:
    """Join opcodes, strings (as text) and integers."""
    encoded = [
        part
        if isinstance(part, bytes)
        else struct.pack("<BI", ord("X"), len(part.encode())) + part.encode()
        if isinstance(part, str)
        else pickle.dumps(part, protocol=2)[2:-1]
        for part in parts
    ]
    return b"\x80\x04" + b"".join(encoded) + b"."


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def dtype(code, *state) -> bytes:
    state = state or (3, "<", None, None, None, -1, -1, 0)
    start = name("numpy", "dtype") + op(code, False, True)[2:-1] + b"\x87R"
    return start + b"(" + b"".join(op(part)[2:-1] for part in state) + b"tb"


def array(shape, code: bytes, data: bytes, fortran=False) -> bytes:
    start = name(NUMPY, "_reconstruct") + name("numpy", "ndarray")
    start += op((0,), b"C\x01b")[2:-1] + b"\x87R"
    raw = b"B" + struct.pack("<I", len(data)) + data
    return start + b"(" + op(1, shape)[2:-1] + code + op(fortran)[2:-1] + raw + b"tb"


def test_the_helpers_write_what_pickle_reads():
    found = pickle.loads(op(array((2,), dtype("f4"), bytes(8))))
    np.testing.assert_array_equal(found, np.zeros(2, np.float32))


def test_bfloat16_is_read_as_float32():
    code = name("numpy", "dtype") + name("ml_dtypes", "bfloat16") + b"\x89\x88\x87R"
    values = np.array([1.0, -2.5], np.float32)
    upper = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    found = parse_arrays(op(array((2,), code, upper)))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values)


def test_arrays_of_jax_are_read(monkeypatch):
    module = types.ModuleType("jax._src.array")

    def _reconstruct_array(function, arguments, state, properties):
        raise AssertionError("called by the file")

    _reconstruct_array.__module__ = module.__name__
    _reconstruct_array.__qualname__ = "_reconstruct_array"
    module._reconstruct_array = _reconstruct_array
    for key in ("jax", "jax._src"):
        monkeypatch.setitem(sys.modules, key, types.ModuleType(key))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    values = np.arange(4, dtype=np.float32)

    class JaxArray:
        def __reduce__(self):
            function, arguments, state = values.__reduce__()
            rest = (function, arguments, state, {"weak_type": False})
            return _reconstruct_array, rest

    check_equal(parse_arrays(pickle.dumps({"a": JaxArray()})), {"a": values})


FLOATS = dtype("f4")
SYSTEM = name("os", "system")
HOSTILE = {
    "a call of os.system": (op(SYSTEM, ("true",), b"R"), r"os\.system"),
    "posix.system by the stack": (op("posix", "system", b"\x93"), r"posix\.system"),
    "builtins.eval": (op(name("builtins", "eval"), ("1",), b"R"), r"builtins\.eval"),
    "a control character": (op(name("\x1b[2J", "x")), r"\\x1b\[2J\.x"),
    "an instance": (op(b"(", b"i", b"os\nsystem\n"), "INST"),
    "an object": (op(b"(", name("numpy", "ndarray"), b"o"), "OBJ"),
    "a new object": (op(name("numpy", "ndarray"), ((2,),), b"\x81"), "NEWOBJ"),
    "a new object with keywords": (op(name("numpy", "ndarray"), b")}\x92"), "NEWOBJ_E"),
    "an extension": (op(b"\x82\x01"), "EXT1"),
    "an out-of-band buffer": (op(b"\x97"), "NEXT_BUFFER"),
    "a set": (op(b"\x8f"), "EMPTY_SET"),
    "a huge integer": (op(b"\x8b\xff\xff\xff\x7f"), "LONG4"),
    "many digits": (b"I" + b"9" * 5000 + b"\n.", "5000 digits"),
    "a persistent id": (op("1", b"Q"), "outside of the file"),
    "a persistent id as text": (b"Pnone\n.", "outside of the file"),
    "the constructor of arrays": (
        op(name("numpy", "ndarray"), ((8,),), b"R"),
        r"calls numpy\.ndarray",
    ),
    "another class of arrays": (
        op(name(NUMPY, "_reconstruct"), FLOATS, (0,), b"C\x01b\x87R"),
        "unknown class",
    ),
    "objects over bytes": (op(array((2,), dtype("O"), bytes(16))), "not numeric"),
    "records": (op(array((2,), dtype("V8"), bytes(16))), "not numeric"),
    "long doubles": (op(array((1,), dtype("f16"), bytes(16))), "not numeric"),
    "fields": (
        op(dtype("f4", 3, "<", None, ("a",), {}, 4, 1, 0)),
        "fields or is damaged",
    ),
    "a byte order of another length": (
        op(dtype("f4", 3, "<<<<", None, None, None, -1, -1, 0)),
        "fields or is damaged",
    ),
    "flags of objects": (op(array((2,), dtype("f4"), bytes(7))), "7 bytes instead"),
    "too few bytes": (op(array((1 << 40,), FLOATS, bytes(8))), "8 bytes instead of"),
    "too many bytes": (op(array((1,), FLOATS, bytes(8))), "8 bytes instead of 4"),
    "a negative size": (op(array((-2, -1), FLOATS, bytes(8))), "invalid shape"),
    "a size that overflows": (op(array((1 << 62, 4), FLOATS, b"")), "invalid shape"),
    "an empty array that overflows": (
        op(array((0, 1 << 40, 1 << 40), FLOATS, b"")),
        "invalid shape",
    ),
    "a bool as a size": (op(array((True,), FLOATS, bytes(4))), "invalid shape"),
    "many dimensions": (op(array((1,) * 65, FLOATS, bytes(4))), "invalid shape"),
    "two states": (
        op(array((1,), FLOATS, bytes(4)), b"(tb"),
        "damaged array",
    ),
    "no state": (
        op(name(NUMPY, "_reconstruct"), name("numpy", "ndarray"), (0,), b"C\x01b\x87R"),
        "without data",
    ),
    "bools of other values": (op(array((1,), dtype("b1"), b"\x02")), "other values"),
    "a type as a value": (op(FLOATS), "where a value is expected"),
    "a class as a value": (op(name("numpy", "ndarray")), "not a value"),
    "state of a list": (op(b"]}b"), "sets the state"),
    "state of a class": (op(name("numpy", "ndarray"), b"}b"), "sets the state"),
    "a call of a string": (op("numpy", b")R"), "not a function"),
    "a key that is a tuple": (op(b"}", (1,), 1, b"s"), "key that is a tuple"),
    "a key with a chosen hash": (op(b"}", (1 << 61) - 1, 1, b"s"), "key that is a int"),
    "a stack without values": (op(b"0"), "damaged at byte"),
    "an unknown memo": (op(b"h\x05"), "damaged at byte"),
    "an index of the memo that is too large": (
        op(b"Nr", struct.pack("<I", MAX_OPCODES)),
        "damaged at byte",
    ),
    "a gap in the memo": (op(b"Nq\x05h\x04"), "damaged at byte"),
    "many integers as keys": (
        op(b"}(", *(b"J%bN" % struct.pack("<i", i) for i in range(20_001)), b"u"),
        "20,000 keys that are integers",
    ),
    "an unknown opcode": (op(b"\xfe"), "damaged at byte"),
    "a missing end": (op(1)[:-1], "damaged at byte"),
    "an incomplete string": (b"\x80\x04X\xff\xff\xff\xff.", "not complete"),
    "an invalid string": (op(b"X\x01\x00\x00\x00\xff"), "damaged at byte"),
    "a later protocol": (b"\x80\x09N.", "protocol 9"),
    "odd items of a dict": (op(b"}(", 1, b"u"), "damaged at byte"),
    "a list that contains itself": (op(b"]\x94h\x00a"), "nested more than"),
    "lists in lists": (op(b"]" * 100_000 + b"a" * 99_999), "nested more than"),
    "tuples in tuples": (op(b")" + b"\x85" * 100_000), "nested more than"),
    "tuples of shared tuples": (op(b")" + b"\x94h\x00\x86" * 200), "nested"),
    "another encoding": (op(name("_codecs", "encode"), ("a", "zip"), b"R"), "latin1"),
}


def doubled(levels: int) -> bytes:
    """Opcodes of a tuple that contains a tuple twice, nested `levels` times."""
    parts = [b")\x94"]
    for level in range(levels):
        parts.append(b"0h%ch%c\x86\x94" % (level, level))
    return b"".join(parts)


HOSTILE["a tuple with 2 ** 40 entries"] = (op(doubled(40)), "nested values")
HOSTILE["a name with 2 ** 40 entries"] = (op(doubled(40), b"h\x28\x93"), "not a string")
HOSTILE["a key with 2 ** 40 entries"] = (op(b"}", doubled(40), 1, b"s"), "key that is")
HOSTILE["an encoding with 2 ** 40 entries"] = (
    op(doubled(40), b"0", name("_codecs", "encode"), "a", b"h\x28\x86R"),
    "latin1",
)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused(case):
    data, message = HOSTILE[case]
    start = time.process_time()
    with pytest.raises(InvalidFile, match=message):
        parse_arrays(data)
    assert time.process_time() - start < 30


def test_every_opcode_is_allowed_or_refused():
    """Every opcode is executed or raises `InvalidFile`, for any stack."""
    for opcode in pickletools.opcodes:
        for before in (b"", b"N", b"NN", b"]N", b"}NN", b"(", name("numpy", "dtype")):
            code = opcode.code.encode("latin1")
            data = b"\x80\x04" + before + code + b"\x01\n\x00\x00\x00\n\x00\x00\x00."
            with contextlib.suppress(InvalidFile):
                parse_arrays(data)


def encode_repeatedly(size: int, count: int) -> bytes:
    text = op("a" * size, b"\x940", "latin1", b"\x940")[2:-1]
    call = name("_codecs", "encode") + b"h\x00h\x01\x86R"
    return op(text, b"]", (b"(" + call * 100 + b"e") * (count // 100))


def arrays_of_one_buffer(count: int) -> bytes:
    big = b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20)
    call = name("numpy._core.numeric", "_frombuffer") + b"(h\x00h\x01"
    call += op((1 << 18,), "C")[2:-1] + b"tR"
    return op(big, b"\x940", dtype(">f4"), b"\x940", b"](", call * count, b"e")


@pytest.mark.extended
@pytest.mark.parametrize(
    "data",
    [
        encode_repeatedly(1_000_000, 10_000),
        arrays_of_one_buffer(5000),
        op(b"}" * (MAX_OPCODES + 1)),
        op(b"](" + b"N" * 900_000 + b"e\x94" + b"h\x00\x86" * 30),
    ],
)
def test_small_files_do_not_fill_the_memory(data):
    assert len(data) < 4_000_000
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(InvalidFile):
            parse_arrays(data)
        assert tracemalloc.get_traced_memory()[1] < 300_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 30


def test_bytes_that_are_referred_to_repeatedly_are_copied_once():
    """100,000 copies of 1 MB would be 100 GB."""
    big = b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20)
    found = parse_arrays(op(big, b"\x940](", b"h\x00" * 100_000, b"e"))
    assert len(found) == 100_000
    assert len({id(value) for value in found}) == 1


@pytest.mark.extended
def test_damaged_pickles_do_not_crash(tmp_path):
    paths = [tmp_path / f"{protocol}.pkl" for protocol in range(6)]
    for protocol, path in enumerate(paths):
        path.write_bytes(pickle.dumps(EXAMPLE, protocol=protocol))
    reader = "reverie.convert.dreamerv3.weights:read_checkpoint"
    loaded, refused = fuzz_reader(paths, reader, ["reverie.api:UserError"], 3000)
    assert loaded > 100
    assert refused > 1000


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "an empty file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
        (b'{"params": {}}', "a JSON file"),
        (b"PK\x03\x04" + bytes(30), "a ZIP archive that is incomplete"),
        (b"\x1f\x8b" + bytes(20), "a gzip archive"),
        (b"<html>not found</html>", "an HTML or XML page"),
        (b"Please log in to download", "damaged"),
    ],
)
def test_wrong_files_are_named(tmp_path, content, kind):
    path = tmp_path / "agent.pkl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=kind):
        read_checkpoint(path)
