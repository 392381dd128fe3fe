"""Hostile datasets: HDF5 files and replay chunks of the original DreamerV3."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

from chaos.hostile import mutate

KINDS = (
    "random",
    "mutated",
    "gzip",
    "gzip twice",
    "LZF",
    "sparse",
    "links",
    "external",
    "virtual",
    "bounds",
    "types",
)


def write_hdf5(path: Path, rng: random.Random) -> None:
    """Write a file in the layout of robomimic, damaged in a way of `KINDS`."""
    try:
        import h5py
    except ImportError:
        path.write_bytes(b"\x89HDF\r\n\x1a\n" + rng.randbytes(2000))
        return
    kind = rng.choice(KINDS)
    if kind == "random":
        start = b"\x89HDF\r\n\x1a\n" if rng.random() < 0.8 else b""
        path.write_bytes(start + rng.randbytes(2000))
        return
    with h5py.File(path, "w") as file:
        for index in range(2):
            _write_episode(file.create_group(f"data/demo_{index}"))
        _change(file, kind, rng)
    if kind == "mutated":
        path.write_bytes(mutate(path.read_bytes(), rng))


def _write_episode(group: Any, steps: int = 5) -> None:
    """Write a valid episode."""
    import numpy as np

    group["actions"] = np.zeros((steps, 2), np.float32)
    group["rewards"] = np.zeros(steps)
    group["dones"] = np.zeros(steps, np.int64)
    group["obs/vector"] = np.zeros((steps, 3), np.float32)


def _change(file: Any, kind: str, rng: random.Random) -> None:
    """Change the second episode of a file, or its attributes, in one way."""
    import h5py
    import numpy as np

    group = file["data/demo_1"]
    key = rng.choice(["actions", "rewards", "dones", "obs/vector"])
    if kind in ("gzip", "gzip twice", "LZF"):
        data = zlib.compress(bytes(rng.choice([20, 10**6, 2 * 10**8])), 9)
        if kind == "LZF":
            data = bytes(33) + b"\xe0\xff\x00" * rng.choice([1, 10**6])
        elif kind == "gzip twice":
            data = zlib.compress(data, 9)
        _write_packed(group, key, kind, data)
    elif kind == "sparse":
        shape = (5, rng.choice([1 << 20, 1 << 24, 1 << 40]))
        del group[key]
        group.create_dataset(key, shape, "u1", chunks=(1, 1000))
        for index in range(2, rng.choice([3, 50])):
            file[f"data/demo_{index}"] = group
    elif kind == "links":
        target = rng.choice(["/data/demo_1/loop", "/", "/data/demo_0", "x" * 9999])
        group["loop"] = h5py.SoftLink(target)
        group["obs/loop"] = h5py.SoftLink("../loop")
        file["data/demo_2"] = file["data"]
    elif kind == "external":
        del group[key]
        path = rng.choice(["/etc/passwd", "/dev/zero", "../outside/file"])
        if rng.random() < 0.5:
            group[key] = h5py.ExternalLink(path, "/data")
        else:
            group.create_dataset(key, (5, 1), "u1", external=[(path, 0, 5)])
    elif kind == "virtual":
        del group[key]
        layout = h5py.VirtualLayout((5, 1), "u1")
        layout[:] = h5py.VirtualSource(rng.choice([".", "/etc/passwd"]), key, (5, 1))
        group.create_virtual_dataset(key, layout)
    elif kind == "bounds":
        bounds = rng.choice(["[NaN, 1]", '["x", 1]', "[1, -1]", "[1e999]", "[" * 9999])
        file["data"].attrs["env_args"] = f'{{"action_bounds": {bounds}}}'
    elif kind == "types":
        del group[key]
        values = [1, "text", 1j, np.zeros(5, [("a", "f4")]), h5py.Empty("f4")]
        group[key] = rng.choice([*values, np.full((5, 2), np.nan), np.zeros((5, 0))])


def _write_packed(group: Any, key: str, kind: str, data: bytes) -> None:
    """Replace an array by one whose compressed chunk contains this data."""
    import h5py

    old = group[key]
    shape, dtype = old.shape, old.id.get_type()
    del group[key]
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk(shape)
    for _ in range(2 if kind == "gzip twice" else 1):
        # numbers of the filters in HDF5: 32000 is LZF, 1 is gzip
        settings.set_filter(32000 if kind == "LZF" else 1, 0, (9,))
    space = h5py.h5s.create_simple(shape)
    array = h5py.h5d.create(group.id, key.encode(), dtype, space, settings)
    array.write_direct_chunk((0,) * len(shape), data)


def write_chunks(folder: Path, rng: random.Random) -> None:
    """Write replay chunks of the original DreamerV3 with wrong names and arrays."""
    import numpy as np

    next_chunks = rng.choice([(1, 2, 3), (1, 2, 1), (0, 0, 0), (2, 2, 0)])
    for index, following in enumerate(next_chunks):
        arrays: dict[str, Any] = {
            "vector": np.zeros((4, 3), np.float32),
            "action": np.zeros((4, 2), np.float32),
            "reward": np.zeros(4, np.float32),
            "is_first": np.arange(4) == 0,
            "is_last": np.arange(4) == 3,
            "is_terminal": np.zeros(4, bool),
        }
        if rng.random() < 0.7:
            wrong = ["a", 1, np.array(["a"] * 4), np.zeros((4, 9)), np.full(4, 1 << 40)]
            arrays[rng.choice(sorted(arrays))] = rng.choice(wrong)
        np.savez(folder / f"20240101T12000{index}-{index}-{following}-4.npz", **arrays)
