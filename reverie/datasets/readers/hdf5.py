"""Reader of HDF5 files in robomimic's layout, or in a layout described by a key map.

robomimic stores each demonstration as `data/demo_k` with T steps: `obs` and `next_obs`
(groups of arrays), `actions`, `rewards` and `dones`. They become T + 1 rows:

    row          0           1              2
    observation  obs[0]      next_obs[0]    next_obs[1]
    reward       0           rewards[0]     rewards[1]
    action       actions[0]  actions[1]     0

If there is no `next_obs`, the observation after the last action is unknown. Either the
last observation is repeated, which keeps the last reward and terminal flag, or the last
action is dropped (`KeyMap.last_obs`), which is refused if it has a reward or is
terminal.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.readers import Reader, natural_sort
from reverie.datasets.readers.hdf5_file import Hdf5File
from reverie.datasets.readers.key_map import KeyMap
from reverie.datasets.readers.mapped import (
    build_episode,
    check_optional_names,
    count_rows,
    first_column,
    get_array,
    is_group,
    is_observation,
    load_arrays,
)
from reverie.storage.limits import InvalidFile, parse_json


class DamagedFile(UserError):
    """A file that HDF5 cannot open."""

    def __init__(self, path: Path, error: Exception):
        self.reason = str(error)
        super().__init__(
            f"{path} is not an HDF5 file, or it is damaged ({error}).\n"
            "  Fix: copy or download it again."
        )


class Hdf5Reader(Reader):
    """Reads the episodes of one file or of all files in a folder.

    A damaged file in a folder is listed as one episode that cannot be read.
    """

    bounds_entry = "`action_bounds` in its attribute `env_args`"

    def __init__(self, path: str | Path, map: KeyMap | None = None):
        self.origin = str(path)
        self.map = map or KeyMap()
        files = [Path(path)]
        if files[0].is_dir():
            found = [*files[0].glob("*.hdf5"), *files[0].glob("*.h5")]
            files = [Path(p) for p in natural_sort(str(p) for p in found)]
        self._groups: dict[str, tuple[Path, str]] = {}  # file and group of an episode
        self._step_ranges: dict[str, tuple[int, int]] = {}  # of concatenated episodes
        self._lengths: dict[str, int] = {}
        self._open: dict[Path, Hdf5File] = {}
        self._lock = threading.RLock()  # HDF5 does not read concurrently
        self.masks: dict[str, list[str]] = {}
        self._other_arrays: list[str] = []  # in groups that have no actions
        self._damaged: dict[str, str] = {}
        stems = Counter(file.stem for file in files)
        for file in files:
            name = file.stem if stems[file.stem] == 1 else file.name
            try:
                self._list_file(file, prefix=f"{name}_" if len(files) > 1 else "")
            except DamagedFile as error:
                if len(files) == 1:
                    raise
                self._groups[name] = (file, "/")
                self._damaged[name] = error.reason
        if self._damaged and not self._readable_names():
            name, reason = next(iter(self._damaged.items()))
            raise DamagedFile(self._groups[name][0], Exception(reason))
        if not self._groups and self._other_arrays:
            raise UserError(
                f"{path} has no {self.map.action!r} in {self.map.episodes!r}, only "
                f"{', '.join(self._other_arrays[:12])}.\n  Fix: set --map.action to "
                "the array of actions, or --map.episodes to the group of episodes."
            )
        if not self._groups:
            raise UserError(
                f"{path} has no episodes in {self.map.episodes!r}.\n  Fix: set "
                "--map.episodes to the group of episodes (`.` for the root)."
            )
        self._names = list(self._groups)
        readable = self._readable_names()
        check_optional_names(self.origin, self.map, readable, self._open_group)

    def rows(self, name: str) -> int:
        if name not in self._lengths:
            self._check_readable(name)
            with self._lock, _as_bad_episode():
                group = self._open_group(name)
                self._lengths[name] = count_rows(group, self.map)
        return self._lengths[name]

    def read(self, name: str) -> Episode:
        return self.read_keys(name)

    def read_keys(self, name: str, keys: Collection[str] | None = None) -> Episode:
        self._check_readable(name)
        with self._lock, _as_bad_episode():
            arrays = load_arrays(self._open_group(name), self.map, keys)
        return build_episode(arrays, self.map)

    def read_states(self, name: str, keys: Sequence[str]) -> tuple[np.ndarray, str]:
        self._check_readable(name)
        with self._lock, _as_bad_episode():
            group = self._open_group(name)
            arrays = [np.asarray(get_array(group, key), np.float64) for key in keys]
            model = str(group.attributes().get("model_file", ""))
        flat = [array.reshape(len(array), -1) for array in arrays]
        if len({len(array) for array in flat}) > 1:
            raise BadEpisode(f"has different numbers of rows in {', '.join(keys)}")
        return np.concatenate(flat, 1), model

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self.map)

    @property
    def metadata(self) -> dict[str, str]:
        texts = {key: str(value) for key, value in self.attributes().items()}
        with self._lock, _as_bad_episode():
            obs = self._open_group(self._readable_names()[0]).get(self.map.obs)
            keys = [] if self.map.keys or not is_group(obs) else list(obs)
            arrays = [k for k in keys if not is_group(obs[k])]
            ignored = [k for k in arrays if not is_observation(k, obs[k])]
        return texts | ({"ignored": ", ".join(ignored)} if ignored else {})

    def attributes(self, name: str = "") -> dict[str, Any]:
        """Return the HDF5 attributes of an episode, or of the group of all episodes,
        which has `env_args`."""
        episode = name or self._readable_names()[0]
        with self._lock, _as_bad_episode():
            group = self._open_group(episode)
            attributes: dict[str, Any] = (
                group if name else group.parent()
            ).attributes()
            return attributes

    def _declared_bounds(self) -> tuple[Any, Any] | None:
        """Return the action bounds in `env_args`: those that Reverie has written, or
        [-1, 1] if the controllers of robosuite have these input limits."""
        try:
            settings = parse_json(self.attributes().get("env_args", "{}"))
            if "action_bounds" in settings:
                low, high = settings["action_bounds"]
                return low, high
            controllers = settings["env_kwargs"]["controller_configs"]
        except (BadEpisode, ValueError, KeyError, TypeError):
            return None
        text = json.dumps(controllers)
        limits = re.findall(r'"input_(?:min|max)": (-?[\d.]+)', text)
        are_all_one = limits and all(abs(float(limit)) == 1 for limit in limits)
        return (-1, 1) if are_all_one else None

    def _readable_names(self) -> list[str]:
        return [name for name in self._groups if name not in self._damaged]

    def _check_readable(self, name: str) -> None:
        if name in self._damaged:
            raise BadEpisode(f"is a damaged file ({self._damaged[name]})")

    def close(self) -> None:
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()

    def _list_file(self, path: Path, prefix: str) -> None:
        """Find the episodes and masks of a file."""
        parent = self.map.episodes
        try:
            file = self._open_file(path).group("/")
            root = file if parent in (".", "", "/") else file.get(parent)
            groups = []
            for name in root if is_group(root) else ():
                try:
                    if is_group(root[name]):
                        groups.append(name)
                except InvalidFile as error:
                    self._groups[prefix + name] = (path, "/")
                    self._damaged[prefix + name] = str(error)
            if not any(self.map.action in root[k] for k in groups):
                self._other_arrays = sorted({k for g in groups for k in root[g]})
                groups = []  # groups without actions are not episodes
            if self.map.episode_ends:
                self._list_concatenated(path, prefix)
                return
            if not groups and self.map.action in file:
                self._groups[prefix.rstrip("_") or path.stem] = (path, "/")
            for name in natural_sort(groups):
                self._groups[prefix + name] = (path, f"{root.name}/{name}")
            masks = file.get("mask")
            for name in masks if is_group(masks) else ():
                if not is_group(masks[name]):
                    selected = [prefix + member for member in masks[name].texts()]
                    self.masks.setdefault(name, []).extend(selected)
        except (BadEpisode, InvalidFile) as error:
            raise DamagedFile(path, error) from None

    def _list_concatenated(self, path: Path, prefix: str) -> None:
        """Find the episodes of a file that concatenates the steps of all episodes."""
        file = self._open_file(path).group("/")
        if not getattr(file.get(self.map.action), "shape", ()):
            raise UserError(
                f"{path} has no array {self.map.action!r}, only "
                f"{', '.join(sorted(file))}.\n  Fix: set --map.action to "
                "the array of actions."
            )
        steps = len(file[self.map.action])
        is_last = np.zeros(steps, bool)
        for key in self.map.episode_ends:
            if getattr(file.get(key), "shape", ())[:1] != (steps,):
                raise UserError(
                    f"{path} has no array {key!r} of {steps} steps, only "
                    f"{', '.join(sorted(file))}.\n  Fix: set --map.episode_ends to the "
                    "arrays that mark the last step of each episode."
                )
            is_last |= first_column(np.asarray(file[key]), key) != 0
        stops = [*(np.flatnonzero(is_last) + 1).tolist(), steps]
        start = 0
        for stop in dict.fromkeys(stops):
            if stop > start:
                name = f"{prefix}episode_{len(self._groups)}"
                self._groups[name] = (path, "/")
                self._step_ranges[name] = (start, stop)
            start = stop

    def _open_group(self, name: str) -> Any:
        """Return the group of an episode, limited to its steps if concatenated."""
        path, group_path = self._groups[name]
        group = self._open_file(path).group(group_path)
        if name in self._step_ranges:
            return _GroupSlice(group, *self._step_ranges[name])
        return group

    def _open_file(self, path: Path) -> Hdf5File:
        with self._lock:
            if path not in self._open:
                self._open[path] = Hdf5File(path)
            return self._open[path]


class _GroupSlice:
    """A group whose arrays are limited to a range of steps."""

    def __init__(self, group: Any, start: int, stop: int):
        self.group, self.start, self.stop = group, start, stop

    def __contains__(self, key: str) -> bool:
        return key in self.group

    def __iter__(self) -> Iterator[str]:
        return iter(self.group)

    def __getitem__(self, key: str) -> Any:
        member = self.group[key]
        if is_group(member):
            return _GroupSlice(member, self.start, self.stop)
        return member[self.start : self.stop]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def get(self, key: str) -> Any:
        return None if self.group.get(key) is None else self[key]


@contextmanager
def _as_bad_episode() -> Iterator[None]:
    """Raise `InvalidFile` as `BadEpisode`."""
    try:
        yield
    except InvalidFile as error:
        raise BadEpisode(str(error)) from error
