"""Reader and writer of folders with one NPZ file per episode, as in dreamerv3-torch.

In these files `action[t]` led to row t, so the action of a row in Reverie is that of
the next row in the file:

    row               0     1     2
    action in file    0     a0    a1
    action here       a0    a1    0

Discrete actions are one-hot in the file and indices here. The bounds of continuous
actions are those of `dataset.json`, if it exists, or of the spaces that the caller
gives, unless actions in a few files exceed them: such actions have no bounds. Without
either, bounds are inferred from the actions in a few files. If all are within
[-1, 1], they are assumed to be scaled to these bounds, as in dreamerv3-torch. If not,
they are in the environment's own units and have no bounds.
`discount` is 0 in the last row and 1 before; `is_last` is not stored and follows from
the length. If a file has other values for them, they are kept under `log/`, which
agents do not use, so that writing the episode again gives the same file. Files with
pickled objects are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from reverie.datasets.episode_format import BadEpisode, Episode, is_image
from reverie.datasets.readers import FolderReader, evenly_spaced, infer_spaces
from reverie.spaces import STEP_KEYS, Arrays, Space, Spaces
from reverie.storage.atomic import atomic_write, make_folder
from reverie.storage.limits import InvalidFile, check_name
from reverie.storage.npz_file import read_npz, read_npz_headers

_NOT_OBSERVATIONS = ("action", "discount", "logprob", *STEP_KEYS)
"""Arrays that are not observations. `STEP_KEYS` are `reward`, `is_first`, `is_last` and
`is_terminal`."""


class NpzReader(FolderReader):
    """Reads a folder of NPZ files.

    The length is the number at the end of the file name (`-<rows>`), or else is read
    from the file header. Spaces are read from `dataset.json`, or else taken from
    `spaces`, or else inferred; inferred actions are discrete if all are one-hot. With
    `incomplete`, files may lack actions, rewards and flags: the episode then has no
    `action` and `reward`, and flags follow from the length.
    """

    def __init__(
        self,
        path: str | Path,
        spaces: tuple[Spaces, Spaces] | None = None,
        incomplete: bool = False,
    ):
        super().__init__(path)
        self.incomplete = incomplete
        self._expected = spaces

    def _list_files(self) -> dict[str, Path]:
        paths: dict[str, Path] = {}
        for file in self.folder.glob("*.npz"):
            name, _, rows = file.stem.rpartition("-")
            name = name if name and rows.isdecimal() else file.stem
            # Of two files with the same name, one is listed with its full file name.
            paths[file.stem if name in paths else name] = file
        return paths

    def rows(self, name: str) -> int:
        path = self.paths[name]
        rows = path.stem.rpartition("-")[2]
        if path.stem != name and rows.isdecimal():
            return int(rows)
        headers = read_headers(path)
        if "reward" not in headers or not headers["reward"][0]:
            raise BadEpisode("has no array 'reward', from which rows are counted")
        return headers["reward"][0][0]

    def read(self, name: str) -> Episode:
        episode = self._convert(load_arrays(self.paths[name]), *self._spaces)
        rows = self.paths[name].stem.rpartition("-")[2]
        if self.paths[name].stem != name and int(rows) != len(episode["is_first"]):
            raise BadEpisode(
                f"has {len(episode['is_first'])} rows, its file name has {rows}"
            )
        return episode

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        if self._expected is not None:
            obs_space, act_space = self._expected
            unbounded = [k for k in act_space if not self._is_bounded(k, act_space[k])]
            return obs_space, {
                key: Space(space.dtype, space.shape) if key in unbounded else space
                for key, space in act_space.items()
            }
        actions = ["action"] if self._has_actions() else []
        obs_space, act_space = infer_spaces(
            self.origin, self._names, self._read_raw, actions
        )
        for key, space in act_space.items():
            if is_one_hot(space, self._names, self._read_raw):
                act_space[key] = Space(np.int32, (), 0, space.shape[0])
            elif np.isfinite(space.high).all():
                act_space[key] = scaled_space_of_unknown_bounds(space)
        return obs_space, act_space

    def _is_bounded(self, key: str, space: Space) -> bool:
        """False if a sampled file has continuous actions outside of the bounds."""
        for name in () if space.is_discrete else evenly_spaced(self._names):
            try:
                action = load_arrays(self.paths[name]).get(key)
            except BadEpisode:
                continue
            if action is None or action.shape[1:] != space.shape:
                continue
            if (action < space.low).any() or (action > space.high).any():
                return False
        return True

    def _has_actions(self) -> bool:
        """False if files may lack actions and no sampled file has any."""
        if not self.incomplete:
            return True
        for name in evenly_spaced(self._names):
            try:
                if "action" in read_headers(self.paths[name]):
                    return True
            except BadEpisode:
                continue
        return False

    def _read_raw(self, name: str) -> Episode:
        """Read an episode with spaces inferred from its file alone.

        One-hot actions are not decoded.
        """
        arrays = load_arrays(self.paths[name])
        return self._convert(arrays, *_infer_file_spaces(arrays))

    def _convert(self, arrays: Arrays, obs_space: Spaces, act_space: Spaces) -> Episode:
        """Convert the arrays of a file to an episode."""
        convert = _from_incomplete if self.incomplete else from_npz
        return convert(arrays, obs_space, act_space)


def read_headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of every array in a file without decompressing them."""
    try:
        return read_npz_headers(path)
    except (OSError, InvalidFile) as error:
        raise BadEpisode(f"cannot be read ({error})") from error


def load_arrays(path: Path, selects: Callable[[str], bool] | None = None) -> Arrays:
    """Return the arrays of a file, or those whose keys are selected.

    Raises `BadEpisode` if it cannot be read.
    """
    try:
        return read_npz(path, selects)
    except (OSError, InvalidFile) as error:
        raise BadEpisode(f"cannot be read ({error})") from error


def write_npz_episode(
    folder: Path, name: str, episode: Episode, act_space: Spaces
) -> Path:
    """Write an episode atomically as `<name>-<rows>.npz`."""
    make_folder(folder, parents=True)
    check_name(name)
    arrays = to_npz(episode, act_space)
    path = folder / f"{name}-{len(arrays['reward'])}.npz"
    save_arrays(path, arrays)
    return path


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write or replace an NPZ file atomically."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def from_npz(arrays: Arrays, obs_space: Spaces, act_space: Spaces) -> Episode:
    """Convert the arrays of a file to an episode; raise `BadEpisode` if invalid."""
    for key in ("reward", "is_first", "is_terminal"):
        if key not in arrays:
            raise BadEpisode(f"has no {key!r}")
    rows = len(arrays["reward"]) if arrays["reward"].ndim else 0
    if rows < 1:
        raise BadEpisode("is empty")
    for key in {*STEP_KEYS, *obs_space, *act_space} & arrays.keys():
        if arrays[key].dtype.kind not in "biuf":
            raise BadEpisode(f"{key!r} is {arrays[key].dtype}, expected numbers")
    for key, value in arrays.items():
        if value.shape[:1] != (rows,) and not key.startswith("log_"):
            raise BadEpisode(f"{key!r} has shape {value.shape}, expected {rows} rows")
    episode: Episode = {
        "reward": arrays["reward"].astype(np.float32),
        "is_first": arrays["is_first"].astype(bool),
        "is_last": _last_row(rows),
        "is_terminal": arrays["is_terminal"].astype(bool),
    }
    if "is_last" in arrays:
        episode["is_last"] = arrays["is_last"].astype(bool)
        episode["log/is_last"] = episode["is_last"]
    for key, space in obs_space.items():
        if key in STEP_KEYS or key.startswith("log/"):
            continue
        if key not in arrays:
            raise BadEpisode(f"has no {key!r}")
        if arrays[key].shape[1:] != space.shape:
            raise BadEpisode(
                f"{key!r} has shape {arrays[key].shape[1:]}, expected {space.shape}"
            )
        episode[key] = arrays[key].astype(space.dtype)
    for key, space in act_space.items():
        if key not in arrays:
            raise BadEpisode(f"has no {key!r}")
        action = _decode(arrays[key][1:], key, space)  # no action led to the first row
        episode[key] = np.concatenate([action, space.zeros(1)])
    for key, value in arrays.items():
        if key.startswith("log_"):
            episode[f"log/{key.removeprefix('log_')}"] = value
    if "logprob" in arrays and "logprob" not in obs_space:
        episode["log/logprob"] = arrays["logprob"]
    if "discount" in arrays and not np.array_equal(
        arrays["discount"], 1.0 - episode["is_last"]
    ):
        episode["log/discount"] = arrays["discount"]
    return episode


def _from_incomplete(arrays: Arrays, obs_space: Spaces, act_space: Spaces) -> Episode:
    """Convert a file that may lack rewards, flags and actions."""
    if not arrays:
        raise BadEpisode("has no arrays")
    images = [value for value in arrays.values() if is_image(value)]
    lengths = [len(value) for value in images or arrays.values() if value.ndim]
    rows = max(lengths, default=0)
    # an action may be a vector; `STEP_KEYS` (with the reward) have one number per row
    for key in arrays.keys() & {"action", *STEP_KEYS}:
        value = arrays[key]
        is_scalar = key in STEP_KEYS
        if (
            value.shape[:1] != (rows,)
            or value.dtype.kind not in "biuf"
            or (is_scalar and value.size != rows)
        ):
            raise BadEpisode(
                f"{key!r} is {value.dtype} {value.shape}, expected numbers in {rows} "
                "rows"
            )
    defaults = {
        "reward": np.zeros(rows, np.float32),
        "is_first": np.arange(rows) == 0,
        "is_terminal": np.zeros(rows, bool),
    }
    flat = {key: arrays[key].reshape(rows) for key in arrays.keys() & set(STEP_KEYS)}
    episode = from_npz({**defaults, **arrays, **flat}, obs_space, act_space)
    if "reward" not in arrays:
        del episode["reward"]
    return episode


def to_npz(episode: Episode, act_space: Spaces) -> Arrays:
    """Return the arrays of the file: actions shifted and one-hot, and `discount`."""
    rows = len(episode["reward"])
    arrays: Arrays = {}
    for key, value in episode.items():
        if key in act_space:
            encoded = _encode(value, act_space[key])
            arrays[key] = np.concatenate([np.zeros_like(encoded[:1]), encoded[:-1]])
        elif key in ("log/logprob", "log/discount", "log/is_last"):
            arrays[key.removeprefix("log/")] = value
        elif key.startswith("log/"):
            arrays[f"log_{key.removeprefix('log/')}"] = value
        elif key != "is_last":
            arrays[key] = value
    if not np.array_equal(episode["is_last"], _last_row(rows)):
        arrays["is_last"] = episode["is_last"]
    arrays.setdefault("discount", (1.0 - episode["is_last"]).astype(np.float32))
    return arrays


def _infer_file_spaces(arrays: Arrays) -> tuple[Spaces, Spaces]:
    """Return the spaces of one file: images are uint8, other arrays float32."""
    obs_space: Spaces = {}
    act_space: Spaces = {}
    for key, value in sorted(arrays.items()):
        if key == "action":
            act_space[key] = Space(np.dtype(np.float32), value.shape[1:])
        elif key not in _NOT_OBSERVATIONS and not key.startswith("log_"):
            dtype = np.uint8 if is_image(value) else np.float32
            obs_space[key] = Space(np.dtype(dtype), value.shape[1:])
    return obs_space, act_space


def _last_row(rows: int) -> np.ndarray:
    """Return a mask that is True in the last row only."""
    return np.arange(rows) == rows - 1


def _encode(value: np.ndarray, space: Space) -> np.ndarray:
    """Encode discrete entries as one-hot vectors, concatenated over entries."""
    if not space.is_discrete:
        return value.astype(np.float32)
    classes = np.arange(space.classes) + space.low[..., None]
    return (value[..., None] == classes).astype(np.float32).reshape(len(value), -1)


def _decode(value: np.ndarray, key: str, space: Space) -> np.ndarray:
    """Decode one-hot vectors to integers: the inverse of `_encode`."""
    if space.is_discrete:
        return decode_one_hot(value, key, space)
    if value.shape[1:] != space.shape:
        raise BadEpisode(f"{key!r} has shape {value.shape[1:]}, expected {space.shape}")
    return value.astype(space.dtype)


def is_one_hot(
    space: Space, names: Sequence[str], read: Callable[[str], Episode]
) -> bool:
    """True if the actions of a few episodes are one-hot vectors."""
    if len(space.shape) != 1 or space.shape[0] < 2:
        return False
    for name in evenly_spaced(names):
        try:
            action = read(name)["action"][:-1]
        except (BadEpisode, KeyError):
            continue
        is_binary = ((action == 0) | (action == 1)).all()
        if not (is_binary and (action.sum(1) == 1).all()):
            return False
    return True


def scaled_space_of_unknown_bounds(space: Space) -> Space:
    """Return the space of actions scaled to [-1, 1] from bounds that are not stored.

    The bounds in the environment's own units (`Space.native`, the last argument) are
    infinite, because they are unknown.
    """
    return Space(space.dtype, space.shape, -1, 1, (-np.inf, np.inf))


def decode_one_hot(value: np.ndarray, key: str, space: Space) -> np.ndarray:
    """Convert one-hot vectors to integers; raise `BadEpisode` for other vectors."""
    width = int(np.prod(space.shape, dtype=np.int64)) * space.classes
    if value.shape[1:] != (width,):
        raise BadEpisode(
            f"{key!r} has shape {value.shape[1:]}, expected one-hot vectors of {width}"
        )
    vectors = value.reshape(len(value), *space.shape, space.classes)
    index = vectors.argmax(-1)
    matches = np.isclose(vectors, np.eye(space.classes)[index], atol=1e-3)
    if not matches.all():
        step = int(np.argwhere(~matches)[0][0])
        raise BadEpisode(f"{key!r} is not one-hot in step {step}")
    return (index + space.low).astype(space.dtype)
