"""Reader of datasets of the original Δ-IRIS: one file per episode in nested folders.

Each file has `observations` (T c h w), `actions`, `rewards` and `ends`. Reward and end
of step t result from action t, which was taken in frame t. The observation after the
last action is not stored, so the last frame is repeated, which keeps the last reward
and end. The Δ-IRIS agent does not use the observation of that row, so it trains on the
same data as the original. Train with `--iris.ends terminal`; with `last`, the default,
the world model would also predict an end for truncated episodes.

A path is one dataset (with `info.pt`), or the folder that contains `train` and `test`,
such as `checkpoints/dataset`; these are then the masks for training and evaluation.
`info.pt` itself is not read, because episodes may have been added after it was written.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import numpy as np
from torch import Tensor

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode, as_action, from_steps
from reverie.datasets.readers import Reader, infer_spaces, natural_sort
from reverie.spaces import Space, Spaces
from reverie.storage.torch_file import read_torch_file

MASKS = {"train": "train", "test": "valid"}
"""Subfolders and the names of their masks."""
KEYS = ("observations", "actions", "rewards", "ends")


class DeltaIrisReader(Reader):
    """Reads the episodes of one or both datasets, named by their numbers."""

    def __init__(self, path: str):
        self.origin, folder = path, Path(path)
        is_single = (folder / "info.pt").is_file()
        roots = {"": folder} if is_single else {f"{p}_": folder / p for p in MASKS}
        self._paths = {
            f"{prefix}{file.stem}": file
            for prefix, root in roots.items()
            for file in root.glob("*/*/*/*.pt")
        }
        self._names = natural_sort(self._paths)
        self.masks = {
            mask: [name for name in self._names if name.startswith(f"{subfolder}_")]
            for subfolder, mask in MASKS.items()
            if not is_single
        }

    def rows(self, name: str) -> int:
        return _count_steps(self._load(name, ("ends",))["ends"]) + 1

    def read(self, name: str) -> Episode:
        data = self._load(name, KEYS)
        frames, steps = data["observations"], _count_steps(data["ends"])
        if frames.ndim != 4 or frames.dtype != np.uint8:
            raise BadEpisode(
                f"has observations of {frames.dtype} {frames.shape}, expected uint8 "
                "(T, c, h, w)"
            )
        _check_actions(data["actions"])
        shortest = min(len(value) for value in data.values())
        if not 0 < steps <= shortest:
            raise BadEpisode(f"has {steps} steps, but an array of {shortest} rows")
        frames = np.concatenate([frames[:steps], frames[steps - 1 : steps]])
        return from_steps(
            {"image": np.ascontiguousarray(np.moveaxis(frames, 1, -1))},
            {"action": data["actions"][:steps]},
            data["rewards"][:steps],
            data["ends"][:steps] != 0,
        )

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        obs, act = infer_spaces(self.origin, self._names, self.read, ["action"])
        # The few episodes from which spaces are inferred may lack some actions.
        highest = [int(act["action"].high) - 1]
        for name in self._names:
            with contextlib.suppress(BadEpisode):
                actions = self._load(name, ("actions",))["actions"]
                _check_actions(actions)
                highest.append(int(actions.max(initial=0)))
        return obs, {"action": Space(np.int32, (), 0, max(highest) + 1)}

    def _load(self, name: str, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Load some arrays of an episode; raise `BadEpisode` if one is missing."""
        try:
            data = read_torch_file(self._paths[name], keys)
        except UserError as error:
            raise BadEpisode(str(error).partition("\n")[0]) from error
        entries = data if isinstance(data, dict) else {}
        for key in keys:
            if not isinstance(entries.get(key), Tensor) or entries[key].ndim < 1:
                raise BadEpisode(f"has no {key!r}")
        try:
            return {key: entries[key].numpy() for key in keys}
        except TypeError as error:  # for example bfloat16
            raise BadEpisode(
                f"has a type that NumPy does not have ({error})"
            ) from error


def _check_actions(value: np.ndarray) -> None:
    """Raise `BadEpisode` unless actions are one 32-bit integer per step."""
    if value.ndim != 1 or value.dtype.kind not in "iu":
        raise BadEpisode(
            f"has actions of {value.dtype} {value.shape}, expected integers (T,)"
        )
    as_action(value, "actions")


def _count_steps(ends: np.ndarray) -> int:
    """Count the steps up to the first end, where the original ends an episode too."""
    end_steps = np.flatnonzero(ends)
    return int(end_steps[0]) + 1 if len(end_steps) else len(ends)
