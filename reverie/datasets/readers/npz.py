"""Folders with one NPZ file per episode, in the layout of dreamerv3-torch.

There `action[t]` *led to* row t, so ours is theirs one row later:

    row            0     1     2
    their action   0     a0    a1
    our action     a0    a1    0

Discrete actions are one-hot there and indices here. `discount` is zero at the last row
and one before; `is_last` is not stored and follows from the length. Files that say
otherwise keep their own values (here under `log/`, which no agent sees), so that a
round trip gives back what came in. Pickled objects are refused, never loaded.
"""

from __future__ import annotations

import functools
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode
from reverie.datasets.readers import Reader, in_order, some
from reverie.datasets.readers import infer_spaces as infer
from reverie.datasets.readers.metadata import read_about
from reverie.spaces import FLAGS, Space, Spaces
from reverie.storage.array_file import Arrays
from reverie.storage.atomic import atomic_write

Episode = Arrays

_OURS = ("action", "discount", "logprob", *FLAGS)


class NpzReader(Reader):
    """Such a folder as a `Reader`.

    A file name ends in `-<rows>`; where it does not, the head of the file tells. What
    `dataset.json` says of spaces holds; otherwise they are inferred, and actions that
    are one-hot in every step are taken for discrete ones.
    """

    def __init__(self, path: str | Path):
        self.origin = str(path)
        self.folder = Path(path)
        self._paths: dict[str, Path] = {}
        for file in self.folder.glob("*.npz"):
            name, _, rows = file.stem.rpartition("-")
            alone = name if name and rows.isdigit() else file.stem
            self._paths[file.stem if alone in self._paths else alone] = file
        self._names = in_order(self._paths)
        self._about = read_about(self.folder)
        self.masks = self._about.masks if self._about else {}

    def names(self) -> list[str]:
        return list(self._names)

    def path(self, name: str) -> Path:
        return self._paths[name]

    def rows(self, name: str) -> int:
        path = self._paths[name]
        rows = path.stem.rpartition("-")[2]
        if path.stem != name and rows.isdigit():
            return int(rows)
        heads = peek(path)
        if "reward" not in heads:
            raise BadEpisode("has no 'reward', by which rows are counted")
        return heads["reward"][0][0]

    def read(self, name: str) -> Episode:
        theirs = self._load(name)
        episode = _checked(theirs, *self._spaces)
        rows = self._paths[name].stem.rpartition("-")[2]
        if self._paths[name].stem != name and int(rows) != len(episode["reward"]):
            raise BadEpisode(f"has {len(episode['reward'])} rows, its name says {rows}")
        return episode

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        if self._about:
            return self._about.obs_space, self._about.act_space
        obs_space, act_space = infer(
            self.origin, self._names, self._as_it_is, ["action"]
        )
        action = act_space["action"]
        if len(action.shape) == 1 and action.shape[0] > 1 and self._one_hot():
            act_space["action"] = Space(np.int32, (), 0, action.shape[0])
        return obs_space, act_space

    def _as_it_is(self, name: str) -> Episode:
        theirs = self._load(name)
        return _checked(theirs, *_spaces_of(theirs))

    def _one_hot(self) -> bool:
        for name in some(self._names):
            try:
                action = self._as_it_is(name)["action"][:-1]
            except BadEpisode:
                continue
            if not (
                ((action == 0) | (action == 1)).all() and (action.sum(1) == 1).all()
            ):
                return False
        return True

    def _load(self, name: str) -> Arrays:
        try:
            return load(self._paths[name])
        except ValueError as error:
            raise BadEpisode(str(error)) from error


def peek(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every array in a file, without unpacking them."""
    found = {}
    try:
        with zipfile.ZipFile(path) as file:
            for key in file.namelist():
                with file.open(key) as member:
                    version = np.lib.format.read_magic(member)
                    head = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = head(member)
                    found[key.removesuffix(".npy")] = (shape, dtype)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise BadEpisode(f"cannot be read ({error})") from error
    return found


def _checked(theirs: Arrays, obs_space: Spaces, act_space: Spaces) -> Episode:
    try:
        return to_ours(theirs, obs_space, act_space)
    except ValueError as error:
        raise BadEpisode(str(error)) from error


def read_folder(
    directory: Path,
    obs_space: Spaces,
    act_space: Spaces,
    *,
    limit: int | None = None,
    newest_first: bool = False,
) -> Iterator[tuple[str, Episode]]:
    """Every readable episode by name, as ours; others are named and skipped.

    Stops with the episode that reaches `limit` environment steps.
    """
    paths = sorted(directory.glob("*.npz"), reverse=newest_first)
    if not paths:
        raise UserError(
            f"{directory} holds no episodes (*.npz).\n  Fix: check the path."
        )
    steps, skipped = 0, []
    for path in paths:
        try:
            episode = to_ours(load(path), obs_space, act_space)
        except ValueError as error:
            skipped.append(f"{path}: {error}")
            warnings.warn(f"{path}: {error}; skipped", RuntimeWarning, stacklevel=2)
            continue
        yield path.stem.rpartition("-")[0] or path.stem, episode
        steps += len(episode["reward"]) - 1
        if limit is not None and steps >= limit:
            return
    if len(skipped) == len(paths):
        raise UserError(
            f"None of the {len(paths)} episodes in {directory} can be used "
            f"({skipped[0]}).\n  Fix: check that they were recorded in this task."
        )


def load(path: Path) -> Arrays:
    """The arrays of one file as they are; ValueError says why it cannot be read."""
    if path.is_file() and not zipfile.is_zipfile(path):
        raise ValueError("cannot be read (it is no NPZ file, or was cut short)")
    try:
        with np.load(path, allow_pickle=False) as data:
            found = {key: data[key] for key in data.files}
    except ValueError as error:
        if "pickle" in str(error).lower() or "object" in str(error).lower():
            raise ValueError("holds pickled objects, which are never loaded") from error
        raise ValueError(f"cannot be read ({error})") from error
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"cannot be read ({error})") from error
    # a member that is no array comes back as bytes
    return {k: value for k, value in found.items() if isinstance(value, np.ndarray)}


def write_folder_file(
    directory: Path, name: str, episode: Episode, act_space: Spaces
) -> Path:
    """Write one of our episodes as `<name>-<rows>.npz`, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    theirs = to_theirs(episode, act_space)
    path = directory / f"{name}-{len(theirs['reward'])}.npz"
    save(path, theirs)
    return path


def save(path: Path, arrays: Arrays) -> None:
    """Write a file, whole or not at all; one that was there stays until then."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def to_ours(theirs: Arrays, obs_space: Spaces, act_space: Spaces) -> Episode:
    """Shift, decode and complete an episode; ValueError says what does not fit."""
    for key in ("reward", "is_first", "is_terminal"):
        if key not in theirs:
            raise ValueError(f"has no {key!r}")
    rows = len(theirs["reward"])
    if rows < 1:
        raise ValueError("is empty")
    for key, value in theirs.items():
        if value.shape[:1] != (rows,) and not key.startswith("log_"):
            raise ValueError(f"{key!r} has shape {value.shape}, wanted {rows} rows")
    ours: Episode = {
        "reward": theirs["reward"].astype(np.float32),
        "is_first": theirs["is_first"].astype(bool),
        "is_last": _ends(rows),
        "is_terminal": theirs["is_terminal"].astype(bool),
    }
    if "is_last" in theirs:
        ours["is_last"] = theirs["is_last"].astype(bool)
        ours["log/is_last"] = ours["is_last"]
    for key, space in obs_space.items():
        if key in FLAGS or key.startswith("log/"):
            continue
        if key not in theirs:
            raise ValueError(f"has no {key!r}")
        if theirs[key].shape[1:] != space.shape:
            raise ValueError(
                f"{key!r} has shape {theirs[key].shape[1:]}, wanted {space.shape}"
            )
        ours[key] = theirs[key].astype(space.dtype)
    for key, space in act_space.items():
        if key not in theirs:
            raise ValueError(f"has no {key!r}")
        ours[key] = _decode(theirs[key], key, space)
        ours[key] = np.concatenate([ours[key][1:], space.zeros(1)])
    for key, value in theirs.items():
        if key.startswith("log_"):
            ours[f"log/{key.removeprefix('log_')}"] = value
    if "logprob" in theirs and "logprob" not in obs_space:
        ours["log/logprob"] = theirs["logprob"]
    if "discount" in theirs and not np.array_equal(
        theirs["discount"], 1.0 - ours["is_last"]
    ):
        ours["log/discount"] = theirs["discount"]
    return ours


def to_theirs(ours: Episode, act_space: Spaces) -> Arrays:
    """The same episode with actions shifted and one-hot, and with `discount`."""
    rows = len(ours["reward"])
    theirs: Arrays = {}
    for key, value in ours.items():
        if key in act_space:
            coded = _encode(value, act_space[key])
            theirs[key] = np.concatenate([np.zeros_like(coded[:1]), coded[:-1]])
        elif key in ("log/logprob", "log/discount", "log/is_last"):
            theirs[key.removeprefix("log/")] = value
        elif key.startswith("log/"):
            theirs[f"log_{key.removeprefix('log/')}"] = value
        elif key != "is_last":
            theirs[key] = value
    if not np.array_equal(ours["is_last"], _ends(rows)):
        theirs["is_last"] = ours["is_last"]
    theirs.setdefault("discount", (1.0 - ours["is_last"]).astype(np.float32))
    return theirs


def infer_spaces(path: Path) -> tuple[Spaces, Spaces]:
    """Observation and action space from one file: bytes are images, the rest floats."""
    obs_space, act_space = _spaces_of(load(path))
    if not act_space or not obs_space:
        missing = "observations" if act_space else "an 'action'"
        raise UserError(f"{path} has no {missing}.\n  Fix: check what recorded it.")
    return obs_space, act_space


def _spaces_of(theirs: Arrays) -> tuple[Spaces, Spaces]:
    obs_space: Spaces = {}
    act_space: Spaces = {}
    for key, value in sorted(theirs.items()):
        if key == "action":
            act_space[key] = Space(np.dtype(np.float32), value.shape[1:])
        elif key not in _OURS and not key.startswith("log_"):
            is_image = value.dtype == np.uint8 and value.ndim == 4
            dtype = np.uint8 if is_image else np.float32
            obs_space[key] = Space(np.dtype(dtype), value.shape[1:])
    return obs_space, act_space


def _ends(rows: int) -> np.ndarray:
    return np.arange(rows) == rows - 1


def _encode(value: np.ndarray, space: Space) -> np.ndarray:
    """Discrete entries as one-hot vectors, several of them side by side."""
    if not space.is_discrete:
        return value.astype(np.float32)
    classes = np.arange(space.classes) + space.low[..., None]
    return (value[..., None] == classes).astype(np.float32).reshape(len(value), -1)


def _decode(value: np.ndarray, key: str, space: Space) -> np.ndarray:
    if not space.is_discrete:
        if value.shape[1:] != space.shape:
            raise ValueError(
                f"{key!r} has shape {value.shape[1:]}, wanted {space.shape}"
            )
        return value.astype(space.dtype)
    width = int(np.prod(space.shape, dtype=np.int64)) * space.classes
    if value.shape[1:] != (width,):
        raise ValueError(
            f"{key!r} has shape {value.shape[1:]}, wanted one-hot vectors of {width}"
        )
    parts = value.reshape(len(value), *space.shape, space.classes)
    index = parts.argmax(-1)
    sure = np.isclose(parts, np.eye(space.classes)[index], atol=1e-3)
    if not sure[1:].all():  # nothing led to the first row
        row = 1 + int(np.argwhere(~sure[1:])[0][0])
        raise ValueError(f"{key!r} is not one-hot in row {row}")
    return (index + space.low).astype(space.dtype)
