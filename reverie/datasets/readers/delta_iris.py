"""Datasets of the original Δ-IRIS: a file per episode, below `hundreds/tens/units/`.

Each holds `observations` (T c h w), `actions`, `rewards` and `ends`. Reward and end of
step t came of action t, which was chosen in frame t; what was seen after the last
action was not kept. As in other such recordings the last frame is repeated, so that the
last reward and end are not lost; our Δ-IRIS never looks at that row, so it learns from
just what the original learnt from (with `--iris.ends terminal`: an episode may be cut
off without an end).

A path is one dataset (it has an `info.pt`), or the folder above `train` and `test`, as
in `checkpoints/dataset`: then those are the episodes to learn from and to set aside.
`info.pt` itself is not asked, as episodes may have come after it.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import numpy as np
from torch import Tensor

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode, from_steps
from reverie.datasets.readers import Reader, in_order, infer_spaces
from reverie.spaces import Space, Spaces
from reverie.storage.torch_file import read_torch_file

PARTS = {"train": "train", "test": "valid"}
"""Folders of a run, and what other readers call such a selection."""
KEYS = ("observations", "actions", "rewards", "ends")


class DeltaIrisReader(Reader):
    """The episodes of one or both datasets, named by their numbers."""

    def __init__(self, path: str):
        self.origin, folder = path, Path(path)
        alone = (folder / "info.pt").is_file()
        roots = {"": folder} if alone else {f"{p}_": folder / p for p in PARTS}
        self._paths = {
            f"{prefix}{file.stem}": file
            for prefix, root in roots.items()
            for file in root.glob("*/*/*/*.pt")
        }
        self._names = in_order(self._paths)
        self.masks = {
            mask: [name for name in self._names if name.startswith(f"{part}_")]
            for part, mask in PARTS.items()
            if not alone
        }

    def names(self) -> list[str]:
        return list(self._names)

    def rows(self, name: str) -> int:
        return _steps(self._load(name, ("ends",))["ends"]) + 1

    def read(self, name: str) -> Episode:
        found = self._load(name, KEYS)
        frames, steps = found["observations"], _steps(found["ends"])
        if frames.ndim != 4 or frames.dtype != np.uint8:
            raise BadEpisode(
                f"has observations of {frames.dtype} {frames.shape}, wanted uint8 "
                "(T, c, h, w)"
            )
        _check_actions(found["actions"])
        shortest = min(len(value) for value in found.values())
        if not 0 < steps <= shortest:
            raise BadEpisode(f"has {steps} steps, and {shortest} rows of some key")
        seen = np.concatenate([frames[:steps], frames[steps - 1 : steps]])
        return from_steps(
            {"image": np.ascontiguousarray(np.moveaxis(seen, 1, -1))},
            {"action": found["actions"][:steps]},
            found["rewards"][:steps],
            found["ends"][:steps] != 0,
        )

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        obs, act = infer_spaces(self.origin, self._names, self.read, ["action"])
        most = [int(act["action"].high) - 1]  # a few episodes may lack some action
        for name in self._names:
            with contextlib.suppress(BadEpisode):
                actions = self._load(name, ("actions",))["actions"]
                _check_actions(actions)
                most.append(int(actions.max(initial=0)))
        return obs, {"action": Space(np.int32, (), 0, max(most) + 1)}

    def _load(self, name: str, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
        try:
            data = read_torch_file(self._paths[name], keys)
        except UserError as error:
            raise BadEpisode(str(error).partition("\n")[0]) from error
        found = data if isinstance(data, dict) else {}
        for key in keys:
            if not isinstance(found.get(key), Tensor) or found[key].ndim < 1:
                raise BadEpisode(f"has no {key!r}")
        return {key: found[key].numpy() for key in keys}


def _check_actions(value: np.ndarray) -> None:
    if value.ndim != 1 or value.dtype.kind not in "iu":
        raise BadEpisode(
            f"has actions of {value.dtype} {value.shape}, wanted integers (T,)"
        )


def _steps(ends: np.ndarray) -> int:
    """Steps up to the first end, as the original cuts its episodes."""
    found = np.flatnonzero(ends)
    return int(found[0]) + 1 if len(found) else len(ends)
