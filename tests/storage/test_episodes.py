"""Episode files: round trip and detection of damage."""

from __future__ import annotations

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
