"""Readers of recorded episodes, one per format (see `datasets/episode_format.py`).

`READERS` lists the formats and how a path is recognized; a new format needs one module
in this folder and one entry in `READERS`. A reader lists the names and lengths of its
episodes without loading them and reads one episode at a time, so a dataset may be
larger than memory.
Use `datasets.episodes.open_episodes` to open a path.
"""

from __future__ import annotations

import functools
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import LOG, BadEpisode, Episode, check_episode
from reverie.datasets.readers.metadata import read_metadata
from reverie.spaces import STEP_KEYS, Space, Spaces
from reverie.storage.limits import quote

NUM_SAMPLED = 8
"""Number of episodes, evenly spaced, from which spaces are inferred."""

MAX_DIGITS = 1000
"""Digits of a number in a name that are used for sorting; Python limits the length of
strings that it converts to integers."""


class Reader(ABC):
    """Reads episodes by name. Methods may be called from several threads.

    A subclass sets `_names`, implements `rows` and `read`, and overrides `_spaces` if
    the spaces are known without reading episodes.
    """

    origin: str
    """Path or dataset id, for messages."""
    masks: dict[str, list[str]]
    """Named subsets of the episodes (robomimic's filter keys)."""
    bounds_entry: str = "them"
    """Where the dataset stores its action bounds, as the object of "correct or remove"
    in an error message."""
    _names: Sequence[str]

    @property
    def metadata(self) -> dict[str, str]:
        """Further information stored in the dataset, for `reverie data inspect`."""
        return {}

    @property
    def obs_space(self) -> Spaces:
        """Observation space in the stored order of keys, without the `STEP_KEYS`."""
        return self._spaces[0]

    @property
    def act_space(self) -> Spaces:
        return self._spaces[1]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the reader that change the episodes."""
        return {}

    def names(self) -> list[str]:
        return list(self._names)

    @abstractmethod
    def rows(self, name: str) -> int:
        """Return the number of rows of an episode, without loading it.

        Raises `BadEpisode` if it is unknown.
        """

    @abstractmethod
    def read(self, name: str) -> Episode:
        """Return one episode; raises `BadEpisode` if it cannot be read."""

    def read_valid(self, name: str) -> Episode:
        """Return one episode; raises `BadEpisode` if it does not match the spaces."""
        return check_episode(self.read(name), self.obs_space, self.act_space)

    def read_keys(self, name: str, keys: Collection[str]) -> Episode:
        """Return one episode with at least these observations.

        Formats with separate arrays do not load the other observations.
        """
        return self.read(name)

    def read_states(self, name: str, keys: Sequence[str]) -> tuple[np.ndarray, str]:
        """Return recorded simulator states `(T, d)` and model of one episode.

        Action t is taken in state t; the state after the last action may be missing.
        The arrays of several keys are concatenated. The model is XML, or empty.
        """
        raise UserError(
            f"{self.origin} has no simulator states, because it is not HDF5.\n"
            "  Fix: use a file in robomimic's layout with an array `states`."
        )

    def close(self) -> None:  # noqa: B027
        """Close open files."""

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        """Observation and action space."""
        obs, act = infer_spaces(self.origin, self.names(), self.read, ["action"])
        bounds, space = self._declared_bounds(), act["action"]
        if bounds is not None and space.dtype.kind == "f":
            act["action"] = self._with_bounds(space, *bounds)
        return obs, self._extend_discrete_bounds(act)

    def _with_bounds(self, space: Space, low: Any, high: Any) -> Space:
        """Return a space with bounds that were read from a file."""
        try:
            bounded = Space(space.dtype, space.shape, low, high)
            is_valid = bool((bounded.low <= bounded.high).all())
        except (TypeError, ValueError, OverflowError):
            is_valid = False
        if not is_valid:
            raise UserError(
                f"{self.origin} has invalid action bounds; expected two numbers or two "
                f"arrays of shape {space.shape}, the lower bound first.\n"
                f"  Fix: correct or remove {self.bounds_entry}."
            )
        return bounded

    def _declared_bounds(self) -> tuple[Any, Any] | None:
        """Return the lowest and highest continuous action, if the dataset has them."""
        return None

    def _extend_discrete_bounds(self, act_space: Spaces) -> Spaces:
        """Extend the bounds of discrete actions to the values in all episodes.

        The few episodes from which spaces are inferred may not contain every value.
        """
        bounded = dict(act_space)
        discrete = [key for key, space in bounded.items() if space.is_discrete]
        for name in self.names() if discrete else ():
            try:
                episode = self.read_keys(name, [])
            except BadEpisode:
                continue
            for key in discrete:
                space, value = bounded[key], episode.get(key)
                if value is None or value.dtype.kind not in "iu":
                    continue
                if value.shape[1:] == space.shape:
                    value = value.astype(np.int64)
                    low = np.minimum(space.low, value.min(0, initial=0))
                    high = np.maximum(space.high, value.max(0, initial=0) + 1)
                    bounded[key] = Space(space.dtype, space.shape, low, high)
        return bounded


class FolderReader(Reader):
    """Reads a folder with one file per episode, and its `dataset.json`, if any."""

    def __init__(self, path: str | Path):
        self.origin = str(path)
        self.folder = Path(path)
        self.paths = self._list_files()
        self._names = natural_sort(self.paths)
        metadata = read_metadata(self.folder)
        self.masks = metadata.masks if metadata else {}
        if metadata:
            self._spaces = metadata.obs_space, metadata.act_space

    @abstractmethod
    def _list_files(self) -> dict[str, Path]:
        """Return the file of each episode by the episode's name."""


class WrappedReader(Reader):
    """Base class of readers that change the episodes of another reader."""

    def __init__(self, reader: Reader):
        self.inner, self.origin, self.masks = reader, reader.origin, reader.masks
        self._names = reader.names()
        self._spaces = reader.obs_space, reader.act_space

    @property
    def metadata(self) -> dict[str, str]:
        return self.inner.metadata

    @property
    def options(self) -> dict[str, Any]:
        return self.inner.options

    def rows(self, name: str) -> int:
        return self.inner.rows(name)

    def read(self, name: str) -> Episode:
        return self.inner.read(name)

    def read_keys(self, name: str, keys: Collection[str]) -> Episode:
        return self.inner.read_keys(name, keys)

    def read_states(self, name: str, keys: Sequence[str]) -> tuple[np.ndarray, str]:
        return self.inner.read_states(name, keys)

    def close(self) -> None:
        self.inner.close()


class SelectedKeysReader(WrappedReader):
    """Reads the observations `keys` of another reader, in this order; all if empty."""

    def __init__(self, reader: Reader, keys: Sequence[str]):
        super().__init__(reader)
        obs_space = reader.obs_space
        if missing := [key for key in keys if key not in obs_space]:
            raise UserError(
                f"{reader.origin} has no {', '.join(missing)}.\n"
                f"  Fix: choose from {', '.join(obs_space)}."
            )
        self._spaces = {k: obs_space[k] for k in keys or obs_space}, reader.act_space

    def read(self, name: str) -> Episode:
        return self.inner.read_keys(name, list(self.obs_space))


@dataclass(frozen=True)
class ReaderType:
    """A format of recorded episodes."""

    description: str
    class_path: str
    """Reader class, or function that returns a reader, as `module:name`; called with
    the path and keyword options."""
    matches: Callable[[str], bool]
    """True if a path has this format."""
    options: tuple[str, ...] = ()
    """Keyword options of the reader class."""


def _folder_with(*patterns: str) -> Callable[[str], bool]:
    """Return a function that is True for folders with a file of one of the patterns."""

    def matches(path: str) -> bool:
        folder = Path(path)
        return folder.is_dir() and any(
            next(folder.glob(pattern), None) is not None for pattern in patterns
        )

    return matches


def _is_hdf5(path: str) -> bool:
    if Path(path).is_file():
        return Path(path).suffix in (".hdf5", ".h5", ".he5", ".hdf")
    return _folder_with("*.hdf5", "*.h5")(path)


def _is_lerobot(path: str) -> bool:
    return path.startswith("lerobot:") or (Path(path) / "meta" / "info.json").is_file()


def _has_dreamerv3_chunks(path: str) -> bool:
    from reverie.datasets.readers.dreamerv3_replay import find_chunks

    return bool(find_chunks(path))


# The formats in the order in which they are tried; the first that matches is used.
READERS: dict[str, ReaderType] = {
    "minari": ReaderType(
        "a Minari dataset, as minari:ID",
        "reverie.datasets.readers.minari:MinariReader",
        lambda path: path.startswith("minari:"),
    ),
    "lerobot": ReaderType(
        "a LeRobot dataset, as lerobot:ID or its folder",
        "reverie.datasets.readers.lerobot:LeRobotReader",
        _is_lerobot,
    ),
    "hdf5": ReaderType(
        "HDF5, a file or a folder of files, in robomimic's layout or with a key map",
        "reverie.datasets.readers.hdf5:Hdf5Reader",
        _is_hdf5,
        ("map",),
    ),
    "delta_iris": ReaderType(
        "a dataset of the original Δ-IRIS, or the folder of its `train` and `test`",
        "reverie.datasets.readers.delta_iris:DeltaIrisReader",
        _folder_with("info.pt", "train/info.pt"),
    ),
    "dreamerv3_replay": ReaderType(
        "a replay folder or run folder of danijar/dreamerv3",
        "reverie.datasets.readers.dreamerv3_replay:DreamerV3ReplayReader",
        _has_dreamerv3_chunks,
    ),
    "npz": ReaderType(
        "a folder of NPZ episodes, in the layout of dreamerv3-torch or with a key map",
        "reverie.datasets.readers.mapped_npz:open_npz",
        _folder_with("*.npz"),
        ("spaces", "incomplete", "map"),
    ),
    "replay": ReaderType(
        "a run folder of Reverie, to read the episodes in its replay buffer",
        "reverie.datasets.readers.replay:ReplayReader",
        _folder_with("replay/*.safetensors"),
    ),
    "safetensors": ReaderType(
        "a folder with one safetensors file per episode, as written by Reverie",
        "reverie.datasets.readers.safetensors:SafetensorsReader",
        _folder_with("*.safetensors"),
    ),
}


def find_reader_type(path: str | Path) -> tuple[str, ReaderType]:
    """Return the path as text, and its format."""
    text = str(path)
    if ":" not in text:
        text = str(Path(text).expanduser())
    for reader_type in READERS.values():
        if reader_type.matches(text):
            return text, reader_type
    if ":" not in text and not Path(text).exists():
        raise UserError(f"{text} does not exist.\n  Fix: check the path.")
    formats = "".join(f"\n    {entry.description}" for entry in READERS.values())
    raise UserError(
        f"{text} contains no episodes in a known format.\n"
        f"  Fix: use one of these:{formats}"
    )


def make_reader(path: str | Path, **options: Any) -> Reader:
    """Return a reader of a path; options that its format does not have are ignored.

    Use `datasets.episodes.open_episodes`, which also applies transforms.
    """
    text, reader_type = find_reader_type(path)
    module, _, name = reader_type.class_path.partition(":")
    known = {k: v for k, v in options.items() if k in reader_type.options}
    reader: Reader = getattr(importlib.import_module(module), name)(text, **known)
    return reader


@contextmanager
def as_bad_episode(package: str) -> Iterator[None]:
    """Raise every error of the block, which calls `package`, as `BadEpisode`."""
    try:
        yield
    except BadEpisode:
        raise
    except Exception as error:
        reason = quote(f"{type(error).__name__}: {error}")
        raise BadEpisode(f"cannot be read by {package} ({reason})") from error


def natural_sort(names: Iterable[str]) -> list[str]:
    """Sort with numbers compared as numbers: demo_2 comes before demo_10."""

    def parts(name: str) -> list[tuple[int, str]]:
        pieces = re.findall(r"\d+|\D+", name)
        return [(int(x[:MAX_DIGITS]), "") if x.isdecimal() else (-1, x) for x in pieces]

    return sorted(names, key=parts)


def evenly_spaced(names: Sequence[str], count: int = NUM_SAMPLED) -> list[str]:
    """Return up to `count` names, evenly spaced from the first to the last."""
    chosen = np.linspace(0, len(names) - 1, min(count, len(names))).round().astype(int)
    return [names[i] for i in dict.fromkeys(chosen.tolist())]


def infer_spaces(
    origin: str,
    names: Sequence[str],
    read: Callable[[str], Episode],
    actions: Sequence[str],
) -> tuple[Spaces, Spaces]:
    """Infer observation and action spaces from a few episodes.

    Arrays of uint8 have values from 0 to 255. Float actions within [-1, 1] get these
    bounds; other float actions have no bounds, because they are in the environment's
    own units. Integer actions are bounded by the values in these episodes.
    """
    reason = ""
    obs_space: Spaces = {}
    low: dict[str, np.ndarray] = {}
    high: dict[str, np.ndarray] = {}
    first: Episode = {}
    for name in evenly_spaced(names):
        try:
            episode = read(name)
        except BadEpisode as error:
            reason = reason or f"; {name} {error}"
            continue
        first = first or episode
        for key in actions:
            if key in episode and episode[key].shape[1:] == first[key].shape[1:]:
                value = episode[key]
                minimum, maximum = value.min(0, initial=0), value.max(0, initial=0)
                low[key] = np.asarray(np.minimum(low.get(key, minimum), minimum))
                high[key] = np.asarray(np.maximum(high.get(key, maximum), maximum))
    missing = [key for key in actions if key not in first]
    if not first or missing:
        what = f"has no {', '.join(missing)}" if first else "has no readable episode"
        raise UserError(
            f"{origin} {what}{reason}.\n  Fix: check how it was recorded, or use a "
            "key map (--map.action NAME)."
        )
    for key, value in first.items():
        if key in STEP_KEYS or key in actions or key.startswith(LOG):
            continue
        bounds = (0, 256) if value.dtype == np.uint8 else (None, None)
        obs_space[key] = Space(value.dtype, value.shape[1:], *bounds)
    if not obs_space:
        raise UserError(
            f"{origin} has no observations.\n  Fix: check how it was recorded."
        )
    act_space = {key: _action_space(first[key], low[key], high[key]) for key in actions}
    return obs_space, act_space


def _action_space(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> Space:
    """Return the space of actions such as `value`, which are from `low` to `high`."""
    if value.dtype.kind in "iu":
        return Space(value.dtype, value.shape[1:], low, high + 1)
    if low.min(initial=0) >= -1 and high.max(initial=0) <= 1:
        return Space(value.dtype, value.shape[1:], -1, 1)
    return Space(value.dtype, value.shape[1:])
