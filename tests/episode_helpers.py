"""Episodes whose observations depend on the actions, to detect misalignment.

`position[t + 1] = position[t] + 0.1 * action[t]`, so a shift by one row is detected.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np

from reverie.datasets.readers import npz
from reverie.spaces import Space

ACTION = {"action": Space(np.float32, (2,), -1, 1)}


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


def install_stub(monkeypatch, name: str, **contents) -> None:
    """Install a module with these contents for the duration of a test."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:i]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, value in contents.items():
        setattr(module, key, value)
