"""Episodes whose observations depend on the actions, to detect misalignment.

`position[t + 1] = position[t] + 0.1 * action[t]`, so a shift by one row is detected.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from reverie.datasets.episode_format import find_problems
from reverie.datasets.readers import Reader, npz
from reverie.spaces import Space

ACTION = {"action": Space(np.float32, (2,), -1, 1)}
SCALED = {"action": Space(np.float32, (2,), -1, 1, (-np.inf, np.inf))}
"""Actions that were scaled to [-1, 1] from bounds that are not recorded."""


def make_episode(steps: int, seed: int = 0, size: int = 8, ends: bool = True) -> dict:
    """Return an episode with an image, two vectors, and a reward at its end."""
    rng = np.random.default_rng(seed)
    rows = steps + 1
    action = rng.uniform(-1, 1, (rows, 2)).astype(np.float32)
    action[-1] = 0
    position = np.zeros((rows, 2), np.float32)
    position[1:] = np.cumsum(0.1 * action[:-1], 0)
    reward = np.zeros(rows, np.float32)
    reward[-1] = 1
    return {
        "image": rng.integers(0, 256, (rows, size, size, 3), np.uint8),
        "position": position,
        "speed": rng.normal(size=(rows, 3)).astype(np.float32),
        "action": action,
        "reward": reward,
        "is_first": np.arange(rows) == 0,
        "is_last": np.arange(rows) == rows - 1,
        "is_terminal": (np.arange(rows) == rows - 1) & ends,
    }


def alignment_error(episode: dict) -> float:
    """Largest difference between movement and action; 0 if they are aligned."""
    moved = np.diff(episode["position"], axis=0)
    return float(np.abs(moved - 0.1 * episode["action"][:-1]).max())


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype == other[key].dtype, key
        np.testing.assert_array_equal(value, other[key], err_msg=key)


def write_npz(folder: Path, lengths=(5, 9, 12), **settings) -> dict[str, dict]:
    episodes = {
        f"demo_{i}": make_episode(steps, seed=i, **settings)
        for i, steps in enumerate(lengths)
    }
    for name, episode in episodes.items():
        npz.write_npz_episode(folder, name, episode, ACTION)
    return episodes


def write_hdf5(path: Path, lengths=(5, 9, 12), **settings) -> dict[str, dict]:
    """Write episodes in robomimic's layout."""
    pytest.importorskip("h5py")
    from reverie.datasets.robomimic import write_robomimic

    episodes = {f"demo_{i}": make_episode(n, seed=i) for i, n in enumerate(lengths)}
    write_robomimic(path, episodes.items(), ACTION, **settings)
    return episodes


def check_reader(reader: Reader, episodes: dict, act_space=ACTION) -> None:
    """Check names, lengths, episodes and spaces of a reader."""
    assert isinstance(reader, Reader)
    assert reader.names() == list(episodes)
    for name, episode in episodes.items():
        assert reader.rows(name) == len(episode["reward"])
        found = reader.read(name)
        assert_same({key: found[key] for key in episode}, episode)
        assert alignment_error(found) < 1e-5
        assert not find_problems(found, reader.obs_space, reader.act_space)
    assert set(reader.obs_space) == {"image", "position", "speed"}
    assert reader.obs_space["image"].is_image
    assert reader.act_space == act_space


def install_stub(monkeypatch, name: str, **contents) -> None:
    """Install a module with these contents for the duration of a test."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:i]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, value in contents.items():
        setattr(module, key, value)
