"""Recordings of any origin, one episode at a time (see `datasets/episode_format.py`).

`open_reader` finds out what a path is by the table below; a new kind is one file here
and one row there. A reader knows the names and lengths of its episodes without loading
them, and reads one when asked, so a folder may be larger than memory.
"""

from __future__ import annotations

import functools
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import LOG, BadEpisode, Episode
from reverie.spaces import FLAGS, Space, Spaces

LOOK = 8
"""Episodes that spaces are inferred from, spread over all."""


class Reader(ABC):
    """Episodes by name. Threads may read side by side.

    A kind of its own says `names`, `rows` and `read`, and finds its `_spaces`.
    """

    origin: str
    """Where they come from, as shown to people."""
    masks: dict[str, list[str]]
    """Named selections of episodes that came with them (robomimic's filter keys)."""

    @property
    def remarks(self) -> dict[str, str]:
        """What else was noted down with them, for people."""
        return {}

    @property
    def obs_space(self) -> Spaces:
        """Keys in the order that is stored with them; without the `FLAGS`."""
        return self._spaces[0]

    @property
    def act_space(self) -> Spaces:
        return self._spaces[1]

    @property
    def settings(self) -> dict[str, Any]:
        """What it was told about how to read them."""
        return {}

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def rows(self, name: str) -> int:
        """Length of an episode, without loading it; `BadEpisode` if it has none."""

    @abstractmethod
    def read(self, name: str) -> Episode:
        """One episode; `BadEpisode` says why it cannot be had."""

    def read_some(self, name: str, keys: Collection[str]) -> Episode:
        """One episode, of whose observations these are wanted.

        A reader that can leave the others unread does.
        """
        return self.read(name)

    def close(self) -> None:  # noqa: B027
        """Let go of open files, for those that keep any."""

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        obs, act = infer_spaces(self.origin, self.names(), self.read, ["action"])
        return obs, self._counted(act)

    def _counted(self, act_space: Spaces) -> Spaces:
        """Discrete actions with bounds from every episode, as a few may lack some."""
        found = dict(act_space)
        discrete = [key for key, space in found.items() if space.is_discrete]
        for name in self.names() if discrete else ():
            try:
                episode = self.read_some(name, [])
            except BadEpisode:
                continue
            for key in discrete:
                space, value = found[key], episode.get(key)
                if value is None or value.dtype.kind not in "iu":
                    continue
                if value.shape[1:] == space.shape:
                    value = value.astype(np.int64)
                    low = np.minimum(space.low, value.min(0, initial=0))
                    high = np.maximum(space.high, value.max(0, initial=0) + 1)
                    found[key] = Space(space.dtype, space.shape, low, high)
        return found


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    about: str
    place: str
    """Its class, as `module:Class`; called with the path and keyword options."""
    claims: Callable[[str], bool]
    """Whether a path looks like one of these."""


def _holds(*patterns: str) -> Callable[[str], bool]:
    def claims(path: str) -> bool:
        folder = Path(path)
        return folder.is_dir() and any(
            next(folder.glob(pattern), None) is not None for pattern in patterns
        )

    return claims


def _is_hdf5(path: str) -> bool:
    if Path(path).is_file():
        return Path(path).suffix in (".hdf5", ".h5", ".he5", ".hdf")
    return _holds("*.hdf5", "*.h5")(path)


def _is_lerobot(path: str) -> bool:
    return path.startswith("lerobot:") or (Path(path) / "meta" / "info.json").is_file()


READERS: dict[str, Kind] = {
    "minari": Kind(
        "a Minari dataset, as minari:ID",
        "reverie.datasets.readers.minari:MinariReader",
        lambda path: path.startswith("minari:"),
    ),
    "lerobot": Kind(
        "a LeRobot dataset, as lerobot:ID or its folder",
        "reverie.datasets.readers.lerobot:LeRobotReader",
        _is_lerobot,
    ),
    "hdf5": Kind(
        "HDF5, a file or a folder of them, in robomimic's layout or by a key map",
        "reverie.datasets.readers.hdf5:Hdf5Reader",
        _is_hdf5,
    ),
    "delta_iris": Kind(
        "a dataset of the original Δ-IRIS, or the folder above its train and test",
        "reverie.datasets.readers.delta_iris:DeltaIrisReader",
        _holds("info.pt", "train/info.pt"),
    ),
    "npz": Kind(
        "a folder with one NPZ file per episode, as dreamerv3-torch writes them",
        "reverie.datasets.readers.npz:NpzReader",
        _holds("*.npz"),
    ),
    "replay": Kind(
        "the replay of a run, by its folder",
        "reverie.datasets.readers.replay:ReplayReader",
        _holds("replay/*.safetensors"),
    ),
    "store": Kind(
        "a folder with one safetensors file of ours per episode",
        "reverie.datasets.readers.safetensors:StoreReader",
        _holds("*.safetensors"),
    ),
}


def open_reader(path: str | Path, **options: Any) -> Reader:
    """The reader for a path; `options` are those of its class."""
    text = str(path)
    if ":" not in text:
        text = str(Path(text).expanduser())
    for kind in READERS.values():
        if kind.claims(text):
            module, _, name = kind.place.partition(":")
            reader: Reader = getattr(importlib.import_module(module), name)(
                text, **options
            )
            return reader
    if ":" not in text and not Path(text).exists():
        raise UserError(f"There is nothing at {text}.\n  Fix: check the path.")
    kinds = "".join(f"\n    {kind.about}" for kind in READERS.values())
    raise UserError(
        f"{text} holds no episodes that can be read.\n  Fix: give one of{kinds}"
    )


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted with numbers as numbers: demo_2 comes before demo_10."""

    def parts(name: str) -> list[tuple[int, str]]:
        found = re.findall(r"\d+|\D+", name)
        return [(int(x), "") if x.isdigit() else (-1, x) for x in found]

    return sorted(names, key=parts)


def some(names: Sequence[str], count: int = LOOK) -> list[str]:
    """A few names, from the first to the last."""
    chosen = np.linspace(0, len(names) - 1, min(count, len(names))).round().astype(int)
    return [names[i] for i in dict.fromkeys(chosen.tolist())]


def infer_spaces(
    origin: str,
    names: Sequence[str],
    read: Callable[[str], Episode],
    actions: Sequence[str],
) -> tuple[Spaces, Spaces]:
    """Observation and action spaces from a few episodes.

    Bytes of rank three are images. Actions within [-1, 1] get these bounds, others
    none; integers count to the largest one seen in these.
    """
    why = ""
    obs_space: Spaces = {}
    low: dict[str, np.ndarray] = {}
    high: dict[str, np.ndarray] = {}
    shown: Episode = {}
    for name in some(names):
        try:
            episode = read(name)
        except BadEpisode as error:
            why = why or f"; {name} {error}"
            continue
        shown = shown or episode
        for key in actions:
            if key in episode and episode[key].shape[1:] == shown[key].shape[1:]:
                value = episode[key]
                least, most = value.min(0, initial=0), value.max(0, initial=0)
                low[key] = np.asarray(np.minimum(low.get(key, least), least))
                high[key] = np.asarray(np.maximum(high.get(key, most), most))
    missing = [key for key in actions if key not in shown]
    if not shown or missing:
        what = f"has no {', '.join(missing)}" if shown else "has no readable episode"
        raise UserError(
            f"{origin} {what}{why}.\n  Fix: check what recorded it, or give a "
            "key map (--map.action NAME)."
        )
    for key, value in shown.items():
        if key in FLAGS or key in actions or key.startswith(LOG):
            continue
        bounds = (0, 256) if value.dtype == np.uint8 else (None, None)
        obs_space[key] = Space(value.dtype, value.shape[1:], *bounds)
    if not obs_space:
        raise UserError(
            f"{origin} has no observations.\n  Fix: check what recorded it."
        )
    act_space = {key: _action_space(shown[key], low[key], high[key]) for key in actions}
    return obs_space, act_space


def _action_space(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> Space:
    if value.dtype.kind in "iu":
        return Space(value.dtype, value.shape[1:], low, high + 1)
    if low.min(initial=0) >= -1 and high.max(initial=0) <= 1:
        return Space(value.dtype, value.shape[1:], -1, 1)
    return Space(value.dtype, value.shape[1:])
