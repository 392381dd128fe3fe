"""HDF5 files that refer to other files, are damaged, or declare huge arrays."""

from __future__ import annotations

import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from fuzz_files import fuzz_reader

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode
from reverie.datasets.episodes import open_episodes
from reverie.datasets.readers import hdf5_file
from reverie.datasets.readers.hdf5_file import Hdf5File
from reverie.storage import limits

h5py = pytest.importorskip("h5py")


def write(path, episodes=2, rows=3):
    with h5py.File(path, "w") as file:
        for i in range(episodes):
            group = file.create_group(f"data/demo_{i}")
            group["obs/position"] = np.zeros((rows, 2), np.float32)
            group["actions"] = np.zeros((rows, 2), np.float32)
            group["rewards"] = np.zeros(rows)
            group["dones"] = np.zeros(rows, np.int64)
            group.attrs["num_samples"] = rows
        file["data"].attrs["env_args"] = '{"env_name": "x"}'
        file["mask/train"] = np.array([b"demo_0"])
        texts = h5py.string_dtype()
        file.create_dataset("mask/valid", data=["demo_1"], dtype=texts)
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "demos.hdf5")


def read_everything(path) -> int:
    """Use a file like the commands do; returns how many episodes can be read."""
    reader = open_episodes(path)
    try:
        _ = reader.metadata, reader.masks, reader.obs_space, reader.act_space
        readable = 0
        for name in reader.names():
            try:
                reader.rows(name)
                reader.read(name)
                readable += 1
            except BadEpisode:
                continue
        return readable
    finally:
        reader.close()


def assert_refused(path: Path, message: str) -> None:
    """Check that the third episode is refused with this message."""
    reader = open_episodes(path)
    with pytest.raises(BadEpisode, match=message):
        reader.read("demo_2")
    reader.close()


def test_the_example_is_valid(path):
    assert read_everything(path) == 2
    reader = open_episodes(path)
    assert reader.masks == {"train": ["demo_0"], "valid": ["demo_1"]}
    reader.close()


def test_soft_links_in_the_file_are_followed(path):
    with h5py.File(path, "a") as file:
        file["data/demo_2"] = h5py.SoftLink("/data/demo_0")
        file["data/demo_1/obs/copy"] = h5py.SoftLink("position")
    assert read_everything(path) == 3


def external_link(file, other):
    file["data/demo_2"] = h5py.ExternalLink(other, "/data/demo_0")


def soft_link_to_external_link(file, other):
    file["elsewhere"] = h5py.ExternalLink(other, "/data")
    file["data/demo_2"] = h5py.SoftLink("/elsewhere/demo_0")


def external_array(file, other):
    copy_of_first_episode(file)
    del file["data/demo_2/actions"]
    file["data/demo_2/actions"] = h5py.ExternalLink(other, "/data/demo_0/actions")


def external_storage(file, other):
    copy_of_first_episode(file)
    del file["data/demo_2/actions"]
    file.create_dataset(
        "data/demo_2/actions", (3, 2), np.float32, external=[(other, 0, 24)]
    )


def virtual_dataset(file, other):
    copy_of_first_episode(file)
    del file["data/demo_2/actions"]
    layout = h5py.VirtualLayout((3, 2), np.float32)
    layout[:] = h5py.VirtualSource(other, "data/demo_0/actions", (3, 2))
    file.create_virtual_dataset("data/demo_2/actions", layout)


def copy_of_first_episode(file):
    file.copy("data/demo_0", "data/demo_2")


@pytest.mark.parametrize(
    "change",
    [
        external_link,
        soft_link_to_external_link,
        external_array,
        external_storage,
        virtual_dataset,
    ],
)
def test_data_in_other_files_is_refused(tmp_path, path, change):
    other = write(tmp_path / "other.data")
    with h5py.File(path, "a") as file:
        change(file, str(other))
    assert read_everything(path) == 2
    assert_refused(path, "in another file")


def test_circular_links_are_refused(path):
    with h5py.File(path, "a") as file:
        file["a"], file["b"] = h5py.SoftLink("/b"), h5py.SoftLink("/a")
        file["data/demo_2"] = h5py.SoftLink("/a")
    assert_refused(path, "too many links")


@pytest.mark.parametrize("chunks", [None, (1, 1 << 20), (1 << 10, 1 << 20)])
def test_arrays_that_are_larger_than_the_file_are_refused(path, chunks):
    """Such arrays have no data in the file, only a fill value."""
    with h5py.File(path, "a") as file:
        copy_of_first_episode(file)
        del file["data/demo_2/obs/position"]
        file.create_dataset(
            "data/demo_2/obs/position", (1 << 20, 1 << 20), np.float32, chunks=chunks
        )
        del file["data/demo_2/actions"]
        file.create_dataset("data/demo_2/actions", (1 << 20, 2), chunks=(1, 2))
    tracemalloc.start()
    assert read_everything(path) == 2
    assert tracemalloc.get_traced_memory()[1] < 300 << 20
    tracemalloc.stop()


def test_many_arrays_that_are_larger_than_the_file_are_refused(path):
    with h5py.File(path, "a") as file:
        copy_of_first_episode(file)
        del file["data/demo_2/obs/position"]
        for i in range(8):
            shape = (3, 1 << 24)
            file.create_dataset(
                f"data/demo_2/obs/{i}", shape, np.uint8, chunks=(1, 1 << 16)
            )
    assert_refused(path, "more than 256 MiB of arrays")


def test_many_episodes_that_are_larger_than_the_file_are_refused(path, monkeypatch):
    monkeypatch.setattr(limits, "ALWAYS_ALLOWED_BYTES", 8 << 20)
    with h5py.File(path, "a") as file:
        copy_of_first_episode(file)
        del file["data/demo_2/actions"]
        shape = (1 << 19, 1)
        file.create_dataset("data/demo_2/actions", shape, "u1", chunks=(9999, 1))
        for i in range(3, 60):
            file[f"data/demo_{i}"] = file["data/demo_2"]
    reader, unpacked = open_episodes(path), 0
    for name in reader.names():
        try:
            unpacked += reader.read_states(name, ["actions"])[0].size
        except BadEpisode as error:
            assert "more than 8 MiB of arrays" in str(error)  # noqa: PT017
    assert 0 < unpacked < 9 << 20
    assert len(reader.read("demo_1")["action"]) == 4
    reader.close()


def test_arrays_of_many_chunks_without_data_are_refused(path):
    """HDF5 takes microseconds per chunk, which is hours for 256 MiB of chunks."""
    with h5py.File(path, "a") as file:
        copy_of_first_episode(file)
        del file["data/demo_2/actions"]
        file.create_dataset("data/demo_2/actions", (1 << 24, 1), "u1", chunks=(9, 1))
    assert_refused(path, "MiB of chunks")


def write_compressed(file, data, filters, mask=0):
    """Store compressed data as the actions of an episode, in one chunk."""
    copy_of_first_episode(file)
    del file["data/demo_2/actions"]
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((3, 2))
    for number, values in filters:
        settings.set_filter(number, 0, values)
    space, kind = h5py.h5s.create_simple((3, 2)), h5py.h5t.IEEE_F32LE
    group = file["data/demo_2"].id
    array = h5py.h5d.create(group, b"actions", kind, space, settings)
    array.write_direct_chunk((0, 0), data, mask)


GZIP, SHUFFLE, LZF = (1, (9,)), (2, (4,)), (32000, (4, 261, 24))
LITERALS = bytes([23]) + bytes(24)
COMPRESSED = {
    "gzip": (zlib.compress(bytes(24)), [GZIP], True),
    "shuffled gzip": (zlib.compress(bytes(24)), [SHUFFLE, GZIP], True),
    "LZF": (LITERALS, [LZF], True),
    "LZF with a reference": (b"\0\0\xe0\x0e\0", [LZF], True),
    "large gzip": (zlib.compress(bytes(1 << 20), 9), [GZIP], False),
    "gzip twice": (zlib.compress(zlib.compress(bytes(24))), [GZIP, GZIP], False),
    "damaged gzip": (b"damaged", [GZIP], False),
    "large LZF": (LITERALS * 9 + b"\xe0\xff\0\x20\0" * 999, [LZF], False),
    "gzip of LZF": (zlib.compress(LITERALS), [LZF, GZIP], False),
    "shuffled later": (zlib.compress(bytes(24)), [GZIP, SHUFFLE], False),
    "N-bit": (bytes(24), [(5, (0,))], False),
}


@pytest.mark.parametrize("case", COMPRESSED)
def test_chunks_decompress_to_at_most_their_size(path, case):
    data, filters, is_accepted = COMPRESSED[case]
    with h5py.File(path, "a") as file:
        write_compressed(file, data, filters)
    reader = open_episodes(path)
    if is_accepted:
        assert reader.read("demo_2")["action"].shape == (4, 2)
    else:
        with pytest.raises(BadEpisode, match=r"more data in a chunk|compress"):
            reader.read("demo_2")
    reader.close()


def test_chunks_that_are_not_compressed_are_read(path):
    with h5py.File(path, "a") as file:
        write_compressed(file, bytes(24), [GZIP], mask=1)
        copied = file.create_dataset(
            "data/demo_1/obs/sum", (3, 1), "f4", compression=9, fletcher32=True
        )
        copied[:] = 1
    assert read_everything(path) == 3


STORED = {
    "gzip": {"compression": 9},
    "shuffled": {"compression": 4, "shuffle": True},
    "with checksum": {"compression": 1, "shuffle": True, "fletcher32": True},
    "LZF": {"compression": "lzf"},
    "not packed": {},
}


@pytest.mark.parametrize("kind", ["u1", "?", ">i4", "<f2", "f8"])
@pytest.mark.parametrize("how", STORED)
def test_packed_arrays_have_the_values_that_were_written(tmp_path, how, kind):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2 if kind == "?" else 100, (11, 5, 7)).astype(kind)
    path = tmp_path / "file.hdf5"
    with h5py.File(path, "w") as file:
        options = {"chunks": (4, 5, 3), "fillvalue": 1, **STORED[how]}
        file.create_dataset("x", data=values, **options)
        empty = file.create_dataset("empty", (11, 5, 7), kind, **options)
        empty[5:] = values[5:]  # the first parts are not stored
    file = Hdf5File(path)
    read = file.group("/")["x"]
    assert np.asarray(read).dtype == values.dtype
    np.testing.assert_array_equal(read, values)
    for rows in (slice(3, 9), slice(4, 5), slice(9, 2), slice(0, 11, 3)):
        np.testing.assert_array_equal(read[rows], values[rows])
    first = np.asarray(file.group("/")["empty"])
    assert (first[:4] == 1).all()
    np.testing.assert_array_equal(first[5:], values[5:])
    file.close()


def set_bounds(path, bounds):
    with h5py.File(path, "a") as file:
        file["data"].attrs["env_args"] = f'{{"action_bounds": {bounds}}}'


@pytest.mark.parametrize(
    "bounds", ["[NaN, 1]", '["x", 1]', "[1, -1]", "[[1, 2, 3], 4]"]
)
def test_bounds_that_are_no_intervals_are_refused(path, bounds):
    set_bounds(path, bounds)
    with pytest.raises(UserError, match="env_args"):
        read_everything(path)


def test_bounds_of_each_action_are_read(path):
    set_bounds(path, "[[-2], [2, 3]]")
    assert read_everything(path) == 2


OTHER_MEMBERS = {
    "a group as actions": ("actions", lambda group: group.create_group("actions/a")),
    "a group as rewards": ("rewards", lambda group: group.create_group("rewards/a")),
    "a number as actions": ("actions", lambda group: group.update({"actions": 3})),
    "text as actions": ("actions", lambda group: group.update({"actions": "text"})),
    "no numbers": ("rewards", lambda g: g.create_dataset("rewards", (3, 0))),
    "an empty dataset": (
        "rewards",
        lambda group: group.update({"rewards": h5py.Empty("f4")}),
    ),
    "records": (
        "actions",
        lambda group: group.update({"actions": np.zeros(3, [("a", "f4")])}),
    ),
    "an array as observations": ("obs", lambda g: g.update({"obs": np.zeros(3)})),
    "an array as next observations": (
        "dones",
        lambda g: g.update({"next_obs": np.zeros(3)}),
    ),
    "texts as observations": (
        "obs",
        lambda g: g.update({"obs/position": np.array([b"a", b"b", b"c"])}),
    ),
}


@pytest.mark.parametrize("case", OTHER_MEMBERS)
def test_an_episode_with_other_members_is_skipped(path, case):
    name, change = OTHER_MEMBERS[case]
    with h5py.File(path, "a") as file:
        copy_of_first_episode(file)
        del file[f"data/demo_2/{name}"]
        change(file["data/demo_2"])
    assert read_everything(path) >= 2


def test_text_that_is_not_unicode_is_no_traceback(path):
    with h5py.File(path, "a") as file:
        file["mask/bad"] = np.array([b"\xff\xfe"])
        file["data"].attrs["bad"] = np.bytes_(b"\xff\xfe")
        file["data"].attrs["large"] = np.zeros(5000)
    assert read_everything(path) == 2
    data = path.read_bytes()
    path.write_bytes(data.replace(b"demo_1", b"demo\xff1"))
    with pytest.raises(UserError, match="invalid name"):
        open_episodes(path)


def test_a_string_of_gigabytes_is_not_allocated(path):
    """The file declares the length of a string, which is set to 4 GB here."""
    data = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        place = file["mask/valid"].id.get_offset()
    assert data[place : place + 4] == b"\x06\x00\x00\x00"
    data[place : place + 4] = b"\x00\x00\x00\xf0"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(UserError, match="damaged"):
        open_episodes(path)
    assert time.process_time() - start < 5


def test_a_list_of_strings_without_an_end_is_refused(path):
    """HDF5 loops forever on an entry of size 0."""
    data = bytearray(path.read_bytes())
    place = data.rindex(b"GCOL") + 16
    data[place : place + 16] = bytes(16)
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        open_episodes(path)


def test_arrays_with_many_signatures_of_lists_are_read_in_time(path):
    heap = b"GCOL\x01\0\0\0" + (1 << 30).to_bytes(8, "little")
    with h5py.File(path, "a") as file:
        copy_of_first_episode(file)
        del file["data/demo_2/actions"]
        actions = np.frombuffer(heap * 30_000, np.uint8).reshape(-1, 16)
        file.create_dataset("data/demo_2/actions", data=actions, chunks=(1000, 16))
    start = time.process_time()
    read_everything(path)
    assert time.process_time() - start < 5


def test_many_names_of_one_group_are_refused(path, monkeypatch):
    """A group with many members and many paths is read once per path."""
    monkeypatch.setattr(hdf5_file, "EXTRA_NAME_BYTES", 1 << 12)
    with h5py.File(path, "a") as file:
        copy_of_first_episode(file)
        for i in range(40):
            file[f"data/demo_2/obs/{i}"] = file["data/demo_2/obs/position"]
        for i in range(3, 100):
            file[f"data/demo_{i}"] = file["data/demo_2"]
    reader = open_episodes(path)
    assert reader.rows("demo_2") == 4
    with pytest.raises(BadEpisode, match="names of members"):
        [reader.rows(name) for name in reader.names()]
    assert reader.rows("demo_2") == 4
    reader.close()


@pytest.mark.extended
def test_many_names_of_one_list_of_strings_are_refused(path):
    with h5py.File(path, "a") as file:
        names = np.zeros(300_000, "S1")
        file.create_dataset("mask/0", data=names, compression="gzip")
        for i in range(1, 10_000):
            file[f"mask/{i}"] = file["mask/0"]
    assert path.stat().st_size < 2_000_000
    with pytest.raises(UserError, match="MiB of strings"):
        open_episodes(path)


@pytest.mark.extended
def test_damaged_files_do_not_crash(path):
    errors = ["reverie.api:UserError", "reverie.datasets.episode_format:BadEpisode"]
    loaded, refused = fuzz_reader([path], f"{__name__}:read_everything", errors, 600)
    assert loaded > 40
    assert refused > 40
