"""Files of torch.save: what is read, and that hostile files are refused."""

from __future__ import annotations

import gc
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict

import numpy as np
import pytest
import torch
from fuzz_files import fuzz_reader
from torch import nn

from reverie.api import UserError
from reverie.storage import torch_file
from reverie.storage.torch_file import read_tensors, read_torch_file


def tensor(storage="0", count=6, offset=0, size=(2, 3), stride=(3, 1), kind="Float"):
    """The opcodes of a tensor, as `torch.save` writes them."""

    def plain(value) -> bytes:
        return pickle.dumps(value, protocol=2)[2:-1]

    identifier = plain("storage") + f"ctorch\n{kind}Storage\n".encode()
    identifier += plain(storage) + plain("cpu") + plain(count)
    start = b"ctorch._utils\n_rebuild_tensor_v2\n((" + identifier + b"tQ"
    layout = plain(offset) + plain(size) + plain(stride)
    return start + layout + b"\x89ccollections\nOrderedDict\n)RtR"


def write(path, content: bytes, compression=zipfile.ZIP_STORED, **storages):
    data = b"\x80\x02" + content + b"."
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3")
        for name, storage in {"0": bytes(24), **storages}.items():
            archive.writestr(f"archive/data/{name}", storage)
    return path


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=1)
    return file.getvalue()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "last.pt"


def test_the_helper_writes_what_torch_reads(path):
    write(path, tensor())
    torch.testing.assert_close(torch.load(path), torch.zeros(2, 3))
    torch.testing.assert_close(read_torch_file(path), torch.zeros(2, 3))


def test_everything_that_weights_need_is_read(path):
    shared = torch.arange(12.0)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    saved = {
        "module": module.state_dict(),
        "parameter": nn.Parameter(torch.ones(2)),
        "views": [shared, shared.reshape(3, 4).T, shared[3:5], shared],
        "expanded": torch.ones(1).expand(5),
        "types": [torch.ones(2).to(t) for t in (torch.bfloat16, torch.bool)],
        "long": torch.arange(3),
        "empty": torch.zeros(0, 3),
        "number": np.float64(0.5),
        "array": np.arange(3),
        "shape": torch.Size([1, 2]),
        "plain": {"a": (1, None, True), 2: OrderedDict(b=0.1)},
    }
    torch.save(saved, path)
    found = read_torch_file(path)
    assert found.keys() == saved.keys()
    for key in ("views", "types", "expanded", "long", "empty"):
        torch.testing.assert_close(found[key], saved[key])
    torch.testing.assert_close(found["module"], dict(saved["module"]))
    torch.testing.assert_close(found["parameter"], saved["parameter"].data)
    np.testing.assert_array_equal(found["array"], saved["array"])
    for key in ("plain", "number", "shape"):
        assert found[key] == saved[key]
    assert read_torch_file(path, ["long"]).keys() == {"long"}


HOSTILE = {
    "a negative offset": (tensor(offset=-1), "invalid strides"),
    "a negative stride": (tensor(stride=(3, -1)), "invalid strides"),
    "missing strides": (tensor(stride=(1,)), "invalid strides"),
    "an offset behind the end": (tensor(offset=1), "larger than its storage"),
    "strides behind the end": (tensor(stride=(3, 3)), "larger than its storage"),
    "a size behind the end": (tensor(size=(3, 3)), "larger than its storage"),
    "a negative size": (tensor(size=(-2, 3)), "invalid shape"),
    "a storage of few bytes": (tensor(count=7), "too few bytes"),
    "a storage of another type": (tensor(kind="Double"), "too few bytes"),
    "a missing storage": (tensor("1"), "no member 'data/1'"),
    "a storage in another folder": (tensor("../data.pkl"), "no member"),
    "a huge expanded tensor": (
        tensor(size=(1 << 20, 1 << 20), stride=(0, 0)),
        "more than 256 MiB of tensors",
    ),
    "a bool of another value": (tensor("bad", 1, 0, (), (), "Bool"), "other values"),
    "a tensor without a storage": (
        b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))tR",
        "without a storage",
    ),
    "another persistent id": (b"X\x01\x00\x00\x00aQ", "outside of the file"),
    "another storage class": (
        tensor().replace(b"FloatStorage", b"UntypedStorage"),
        r"torch\.UntypedStorage",
    ),
    "a function": (b"cos\nsystem\n(X\x04\x00\x00\x00truetR", r"os\.system"),
    "a module": (b"ctorch.nn.modules.linear\nLinear\n)\x81", "Linear"),
    "an extension": (b"\x82\x01", "EXT1"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(path, case):
    content, message = HOSTILE[case]
    write(path, content, bad=b"\x02")
    with pytest.raises(UserError, match=message) as error:
        read_torch_file(path)
    assert "Fix:" in str(error.value)


def test_tensors_that_share_a_storage_are_limited(path):
    """40,000 copies of 1 MB are 40 GB."""
    one = tensor("big", 1 << 18, 0, (1 << 18,), (1,))
    write(path, b"](" + one * 2000 + b"e", big=bytes(1 << 20))
    with pytest.raises(UserError, match="MiB of tensors"):
        read_torch_file(path)


def test_only_the_entries_of_a_bool_tensor_are_checked(path):
    """Thousands of tensors may share a large storage, so it is not read for each."""
    write(path, tensor("big", 2, 0, (), (), "Bool"), big=b"\x01\x02")
    assert read_torch_file(path) == torch.tensor(True)


def test_compressed_tensors_are_refused(path):
    count = 1 << 24
    content = tensor("big", count, 0, (count,), (1,))
    write(path, content, zipfile.ZIP_DEFLATED, big=bytes(4 * count))
    assert path.stat().st_size < 300_000
    with pytest.raises(UserError, match=r"which torch\.save does not write"):
        read_torch_file(path)


def test_overlapping_members_are_refused(path):
    """The list of members may contain the same bytes many times."""
    write(path, tensor(), big=bytes(1 << 20))
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")
    end = data.index(b"PK\x05\x06")
    directory = bytes(data[start:end])
    entry = directory[directory.rindex(b"PK\x01\x02") :]
    copies = [entry.replace(b"data/big", b"data/%03d" % i) for i in range(900)]
    directory += b"".join(copies)
    tail = struct.pack("<HHIIH", 904, 904, len(directory), start, 0)
    path.write_bytes(data[:start] + directory + b"PK\x05\x06\0\0\0\0" + tail)
    with pytest.raises(UserError, match="MiB of unpacked data"):
        read_torch_file(path)


def test_two_members_of_the_same_name_are_refused(path):
    write(path, tensor())
    with (
        zipfile.ZipFile(path, "a") as archive,
        pytest.warns(UserWarning, match="Duplicate"),
    ):
        archive.writestr("archive/data/0", bytes(24))
    with pytest.raises(UserError, match="two members of the same name"):
        read_torch_file(path)


@pytest.mark.parametrize(
    ("save", "kind"),
    [
        (
            lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
            "PyTorch before version 1.6",
        ),
        (lambda path: path.write_bytes(pickle.dumps({})), "a pickle"),
        (lambda path: path.write_bytes(npz()), "an NPZ file"),
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b""), "an empty file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (
            lambda path: torch.jit.save(torch.jit.script(nn.Linear(1, 1)), path),
            "a TorchScript model",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrong_files_are_named(path, save, kind):
    save(path)
    with pytest.raises(UserError, match=kind):
        read_torch_file(path)


@pytest.mark.extended
def test_damaged_files_do_not_crash(path):
    saved = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(3).bool()}
    torch.save({**nn.Linear(2, 1).state_dict(), **saved}, path)
    reader = "reverie.storage.torch_file:read_tensors"
    assert read_tensors(path).keys() == {"weight", "bias", "a", "b"}
    loaded, refused = fuzz_reader([path], reader, ["reverie.api:UserError"], 2000)
    assert loaded > 100
    assert refused > 500


def test_the_data_of_a_file_is_released(path):
    torch.save(torch.ones(8 << 20), path)
    read_torch_file(path)
    before = torch_file_objects()
    for _ in range(3):
        read_torch_file(path)
    assert torch_file_objects() == before


def torch_file_objects() -> int:
    gc.collect()
    return sum(type(x) is torch_file._Reader for x in gc.get_objects())


def test_members_that_overlap_are_refused(path):
    """The data of each member contains all later members, so the sizes add up."""
    names, data = [f"archive/data/{i}" for i in range(8)], bytes(1000)
    members = []
    for name in reversed(names):
        info = zipfile.ZipInfo(name)
        info.CRC, info.file_size = zlib.crc32(data), len(data)
        info.compress_size = info.file_size
        members.append((info, len(data)))
        data = info.FileHeader() + data
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + tensor(count=250) + b".")
        start = archive.fp.tell()
        archive.fp.write(data)
        end = archive.start_dir = archive.fp.tell()
        for info, size in members:
            info.header_offset = end - size - len(info.FileHeader())
            archive.filelist.append(info)
            archive.NameToInfo[info.filename] = info
        archive._didModify = True
    assert end - start < 2000
    with zipfile.ZipFile(path) as archive:
        assert sum(member.file_size for member in archive.infolist()) > 8000
    with pytest.raises(UserError, match="members that overlap"):
        read_torch_file(path)
