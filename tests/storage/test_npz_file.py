"""NPZ files: equal to numpy.load, and hostile files are refused."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from fuzz_files import fuzz_reader

from reverie.storage.limits import InvalidFile
from reverie.storage.npz_file import read_npz, read_npz_headers

EXAMPLE = {
    "image": np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3),
    "reward": np.array([0.5, 1.5], np.float32),
    "is_first": np.array([True, False]),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big endian": np.arange(3, dtype=">i4"),
    "number": np.array(3),
    "empty": np.zeros((0, 4)),
    "text": np.array(["a", "bc"]),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_read_as_by_numpy(tmp_path, save):
    path = tmp_path / "x.npz"
    save(path, **EXAMPLE)
    found = read_npz(path)
    with np.load(path) as expected:
        assert list(found) == expected.files
        for key, value in found.items():
            np.testing.assert_array_equal(value, expected[key])
            assert value.dtype == expected[key].dtype
            assert value.flags.writeable
    assert read_npz(path, lambda key: key == "reward").keys() == {"reward"}
    headers = {key: (value.shape, value.dtype) for key, value in EXAMPLE.items()}
    assert read_npz_headers(path) == headers


def test_members_that_are_not_arrays_are_skipped(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, a=np.ones(2))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "hello")
        archive.writestr("folder/", "")
    assert read_npz(path).keys() == read_npz_headers(path).keys() == {"a"}


def npy(shape, descr="'<f4'", data=b"", order="False") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    header = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{}], object), allow_pickle=True)
    return file.getvalue()


HOSTILE = {
    "objects": (objects(), "pickled objects"),
    "objects over bytes": (npy("(2,)", "'|O'", bytes(16)), "pickled objects"),
    "fields of objects": (npy("(1,)", "[('a', '|O')]", bytes(8)), "pickled objects"),
    "fields": (npy("(1,)", "[('a', '<f4')]", bytes(4)), "not an array of numbers"),
    "a shape of a terabyte": (npy("(1 << 40,)"), "damaged header"),
    "a large shape": (npy(f"({1 << 40},)"), "another size"),
    "a shape that overflows": (npy(f"({1 << 33}, {1 << 33})"), "another size"),
    "too few bytes": (npy("(2,)", data=bytes(7)), "another size"),
    "too many bytes": (npy("(2,)", data=bytes(9)), "another size"),
    "a negative size": (npy("(-1, -2)", data=bytes(8)), "not an array of numbers"),
    "a bool as size": (npy("(True, 2)", data=bytes(8)), "not an array of numbers"),
    "many dimensions": (npy(repr((1,) * 100), data=bytes(4)), "not an array of"),
    "items without bytes": (npy(f"({1 << 50},)", "'|S0'"), "not an array of numbers"),
    "an empty shape that overflows": (npy(f"(0, {1 << 62}, {1 << 62})"), "invalid"),
    "code": (npy("__import__('os').getcwd()"), "damaged header"),
    "a deep header": (npy("(" * 5000), "damaged header"),
    "an open string": (npy("'''"), "damaged header"),
    "an incomplete header": (npy("(2,)")[:20], "damaged header"),
    "a long header": (npy("(2,)" + " " * 60_000), "damaged header"),
    "another version": (b"\x93NUMPY\x09\x09" + bytes(50), "damaged header"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_are_refused(tmp_path, case):
    content, message = HOSTILE[case]
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("reward.npy", content)
    with pytest.raises(InvalidFile, match=message):
        read_npz(path)


def test_a_small_file_does_not_unpack_to_gigabytes(tmp_path):
    path = tmp_path / "x.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("image.npy", "w") as file,
    ):
        file.write(npy(f"({300 << 20},)", "'|u1'"))
        for _ in range(300):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InvalidFile, match="more than 256 MiB of unpacked data"):
        read_npz(path)


@pytest.mark.extended
def test_damaged_files_do_not_crash(tmp_path):
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
    np.savez(paths[0], **EXAMPLE)
    np.savez_compressed(paths[1], **EXAMPLE)
    reader, errors = "reverie.storage.npz_file:read_npz", ["builtins:OSError"]
    errors += ["reverie.storage.limits:InvalidFile"]
    loaded, refused = fuzz_reader(paths, reader, errors, 3000)
    assert loaded > 100
    assert refused > 1000
