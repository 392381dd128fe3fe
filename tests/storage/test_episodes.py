"""Episode files: round trip and detection of damage."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

from reverie.storage.episodes import read_episode, write_episode


def make_episode(seed):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (7, 8, 8, 3)).astype(np.uint8),
        "action": rng.normal(size=(7, 4)).astype(np.float32),
        "reward": rng.normal(size=7).astype(np.float32),
        "is_first": np.arange(7) == 0,
    }


def test_episode_files_are_read_as_written_and_damage_is_detected(tmp_path):
    episodes = {f"ep{i}": make_episode(seed=i) for i in range(3)}
    for name, episode in episodes.items():
        write_episode(tmp_path, name, episode)
    paths = sorted(tmp_path.iterdir())
    assert [path.stem.rsplit("-", 2)[0] for path in paths] == list(episodes)
    for path, episode in zip(paths, episodes.values(), strict=True):
        loaded = read_episode(path)
        assert loaded.keys() == episode.keys()
        for key, value in episode.items():
            np.testing.assert_array_equal(loaded[key], value, strict=True)
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    with pytest.raises(ValueError, match="wrong checksum"):
        read_episode(paths[1])


HEADERS = {
    "another type": [],
    "no fields": {"reward": {}},
    "an unknown type": {"reward": ("F128", [1], 0)},
    "a size behind the end": {"reward": ("F32", [1 << 60], 0)},
    "a size that overflows": {"reward": ("F32", [1 << 32, 1 << 32], 0)},
    "a negative size": {"reward": ("F32", [-1, -1], 0)},
    "a fraction": {"reward": ("F32", [1.5], 0)},
    "a negative offset": {"reward": ("F32", [1], -400)},
    "an offset behind the end": {"reward": ("F32", [1], 1 << 62)},
    "text as shape": {"reward": ("F32", "11", 0)},
}


@pytest.mark.parametrize("case", HEADERS)
def test_wrong_headers_with_a_right_checksum_are_errors(tmp_path, case):
    table = HEADERS[case]
    if isinstance(table, dict):
        table = {
            key: {"dtype": x[0], "shape": x[1], "data_offsets": [x[2], x[2] + 4]}
            if x
            else {}
            for key, x in table.items()
        }
    check_refused(tmp_path, json.dumps(table).encode())


@pytest.mark.parametrize(
    "header", [b"", b"{", b"[" * 100_000, b"\xff", b'{"a": ' * 50_000]
)
def test_damaged_headers_are_errors(tmp_path, header):
    check_refused(tmp_path, header)
    check_refused(tmp_path, header, length=1 << 60)


def check_refused(folder, header: bytes, length: int | None = None) -> None:
    size = len(header) if length is None else length
    data = size.to_bytes(8, "little") + header + bytes(4)
    path = folder / f"name-1-{zlib.crc32(data):08x}.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not a complete episode"):
        read_episode(path)
