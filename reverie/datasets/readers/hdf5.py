"""HDF5: robomimic's layout, and others by a key map.

robomimic keeps each demonstration as `data/demo_k` with T steps: `obs` and `next_obs`
(groups of arrays), `actions`, `rewards` and `dones`. Row 0 is `obs[0]` and row k is
`next_obs[k - 1]`, so T steps are T + 1 rows of ours:

    row          0           1              2
    seen         obs[0]      next_obs[0]    next_obs[1]
    reward       0           rewards[0]     rewards[1]
    action       actions[0]  actions[1]     0

Where only `obs` was kept, the observation after the last action is unknown: it is
repeated (so that the last reward and end are not lost), or the last action is dropped.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import (
    LOG,
    BadEpisode,
    Episode,
    from_steps,
    to_steps,
)
from reverie.datasets.readers import Reader, in_order
from reverie.spaces import FLAGS, Spaces
from reverie.storage.atomic import atomic_write


@dataclass(frozen=True)
class KeyMap:
    """Where things lie in an HDF5 file; the defaults are robomimic's."""

    episodes: str = "data"
    """The group whose children are episodes; `.` for the root. A file without such
    children is one episode itself."""
    obs: str = "obs"
    """The group of observations in an episode."""
    next_obs: str = "next_obs"
    """The group of observations after each action, if it was kept."""
    keys: tuple[str, ...] = ()
    """Observations as `ours=theirs`, where no group holds them all
    (`image=observations/images/top`); none for all in `obs`."""
    action: str = "actions"
    reward: str = "rewards"
    """Zero in every step where there is none."""
    terminal: str = "dones"
    """Whether a step ended the task; never where there is none."""
    breaks: tuple[str, ...] = ()
    """Arrays that mark the last step of an episode, where a file holds all steps in a
    row (`terminals timeouts`)."""
    alignment: Literal["chosen", "led"] = "chosen"
    """Whether action t was chosen in row t of the file, or led to it."""
    final: Literal["repeat", "drop"] = "repeat"
    """What to do about the missing last observation where there is no `next_obs`:
    repeat the one before, or drop the last action."""
    ends: Literal["dones", "success", "never"] = "dones"
    """Which steps end the task: those the file says, of these only paid ones, or none.
    Demonstrations that say `done` at their last step, failed or not, want `success`."""

    def __post_init__(self) -> None:
        if wrong := [pair for pair in self.keys if not all(pair.partition("="))]:
            raise ValueError(f"keys are pairs like image=obs/camera, not {wrong[0]!r}")


class DamagedFile(UserError):
    """A file that HDF5 cannot open."""

    def __init__(self, path: Path, error: Exception):
        self.reason = str(error)
        super().__init__(
            f"{path} is no HDF5 file, or a damaged one ({error}).\n"
            "  Fix: copy or download it again."
        )


class Hdf5Reader(Reader):
    """One file, or a folder of files, as episodes."""

    def __init__(self, path: str | Path, map: KeyMap | None = None):
        self.origin = str(path)
        self.map = map or KeyMap()
        files = [Path(path)]
        if files[0].is_dir():
            found = (files[0].glob(pattern) for pattern in ("*.hdf5", "*.h5"))
            files = [Path(p) for p in in_order(str(p) for some in found for p in some)]
        self._where: dict[str, tuple[Path, str]] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._lengths: dict[str, int] = {}
        self._open: dict[Path, Any] = {}
        self._lock = threading.RLock()  # HDF5 reads one thing at a time anyway
        self.masks: dict[str, list[str]] = {}
        self._others: list[str] = []  # in groups that would be episodes with actions
        self._damaged: dict[str, str] = {}  # files of a folder that cannot be read
        stems = Counter(file.stem for file in files)
        for file in files:
            own = file.stem if stems[file.stem] == 1 else file.name
            try:
                self._list(file, prefix=f"{own}_" if len(files) > 1 else "")
            except DamagedFile as error:
                if len(files) == 1:
                    raise
                self._where[own] = (file, "/")
                self._damaged[own] = error.reason
        if self._damaged and not self._sound():
            own, reason = next(iter(self._damaged.items()))
            raise DamagedFile(self._where[own][0], Exception(reason))
        if not self._where and self._others:
            raise UserError(
                f"{path} has no {self.map.action!r} in {self.map.episodes!r}, but "
                f"{', '.join(self._others[:12])}.\n  Fix: say which are the actions, "
                "--map.action NAME, or where episodes are, --map.episodes GROUP."
            )
        if not self._where:
            raise UserError(
                f"{path} has no episodes in {self.map.episodes!r}.\n  Fix: say which "
                "group holds them, --map.episodes GROUP (`.` for the root)."
            )

    def names(self) -> list[str]:
        return list(self._where)

    def rows(self, name: str) -> int:
        if name not in self._lengths:
            self._check(name)
            with self._lock, _readable():
                group = self._group(name)
                steps = len(_get(group, self.map.action))
                obs = _obs_of(group, self.map)
                pairs = bool(_next_of(group, self.map, obs))
                self._lengths[name] = _rows(steps, _length(obs), pairs, self.map)
        return self._lengths[name]

    def read(self, name: str) -> Episode:
        return self._read(name, None)

    def read_some(self, name: str, keys: Collection[str]) -> Episode:
        return self._read(name, keys)

    def _read(self, name: str, keys: Collection[str] | None) -> Episode:
        self._check(name)
        with self._lock, _readable():
            group = self._group(name)
            obs = _obs_of(group, self.map, keys)
            then = _next_of(group, self.map, obs)
            # all but the first row is in `next_obs`, where there is one
            before = {k: np.asarray(v[:1] if then else v) for k, v in obs.items()}
            after = {key: np.asarray(value) for key, value in then.items()}
            action = np.asarray(_get(group, self.map.action))
            reward = _optional(group, self.map.reward, len(action))
            terminal = _optional(group, self.map.terminal, len(action))
        return _assemble(before, after, action, reward, terminal, self.map)

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self.map)

    @property
    def remarks(self) -> dict[str, str]:
        found = {key: str(value) for key, value in self.attributes().items()}
        with self._lock, _readable():
            seen = self._group(next(iter(self._sound()))).get(self.map.obs)
            inside = {} if seen is None or self.map.keys else seen
            rest = [k for k in inside if not _is_group(seen[k])]
            rest = [k for k in rest if not _is_seen(k, seen[k])]
        return found | ({"left out": ", ".join(rest)} if rest else {})

    def attributes(self, name: str = "") -> dict[str, Any]:
        """What is noted on an episode, or on the group of all (`env_args`, ...)."""
        first = name or next(iter(self._sound()))
        with self._lock, _readable():
            group = self._group(first)
            return dict(group.attrs if name else group.parent.attrs)

    def _sound(self) -> list[str]:
        """The episodes, without files that are damaged."""
        return [name for name in self._where if name not in self._damaged]

    def _check(self, name: str) -> None:
        if name in self._damaged:
            raise BadEpisode(f"is a damaged file ({self._damaged[name]})")

    def close(self) -> None:
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()

    def _list(self, path: Path, prefix: str) -> None:
        file = self._file(path)
        place = self.map.episodes
        try:
            root = file if place in (".", "", "/") else file.get(place)
            inside = [] if root is None else [k for k in root if _is_group(root[k])]
            if not any(self.map.action in root[k] for k in inside):
                self._others = sorted({k for g in inside for k in root[g]})
                inside = []  # whatever these groups are, they are no episodes
            if self.map.breaks:
                self._list_stretches(path, prefix)
                return
            if not inside and self.map.action in file:
                self._where[prefix.rstrip("_") or path.stem] = (path, "/")
            for name in in_order(inside):
                self._where[prefix + name] = (path, f"{root.name}/{name}")
            for name, members in file["mask"].items() if "mask" in file else ():
                chosen = [prefix + _text(member) for member in np.asarray(members)]
                self.masks.setdefault(name, []).extend(chosen)
        except (OSError, RuntimeError, KeyError) as error:
            raise DamagedFile(path, error) from None

    def _list_stretches(self, path: Path, prefix: str) -> None:
        file = self._file(path)
        if self.map.action not in file or not getattr(
            file[self.map.action], "shape", ()
        ):
            raise UserError(
                f"{path} has no array {self.map.action!r}, but "
                f"{', '.join(sorted(file))}.\n  Fix: say which are the actions, "
                "--map.action NAME."
            )
        steps = len(file[self.map.action])
        last = np.zeros(steps, bool)
        for key in self.map.breaks:
            if key not in file or file[key].shape[:1] != (steps,):
                raise UserError(
                    f"{path} has no array {key!r} of {steps} steps, but "
                    f"{', '.join(sorted(file))}.\n  Fix: name those that mark the "
                    "last step of an episode with --map.breaks."
                )
            last |= np.asarray(file[key]).reshape(steps, -1)[:, 0] != 0
        stops = [*(np.flatnonzero(last) + 1).tolist(), steps]
        start = 0
        for stop in dict.fromkeys(stops):
            if stop > start:
                name = f"{prefix}episode_{len(self._where)}"
                self._where[name], self._spans[name] = (path, "/"), (start, stop)
            start = stop

    def _group(self, name: str) -> Any:
        path, place = self._where[name]
        group = self._file(path)[place]
        return _Stretch(group, *self._spans[name]) if name in self._spans else group

    def _file(self, path: Path) -> Any:
        with self._lock:
            if path not in self._open:
                try:
                    self._open[path] = _h5py().File(path, "r")
                except OSError as error:
                    raise DamagedFile(path, error) from None
            return self._open[path]


class _Stretch:
    """Some steps of a file in which episodes follow each other, like a group."""

    def __init__(self, group: Any, start: int, stop: int):
        self.group, self.start, self.stop = group, start, stop

    def __contains__(self, key: str) -> bool:
        return key in self.group

    def __iter__(self) -> Iterator[str]:
        return iter(self.group)

    def __getitem__(self, key: str) -> Any:
        found = self.group[key]
        if _is_group(found):
            return _Stretch(found, self.start, self.stop)
        return found[self.start : self.stop]

    @property
    def attrs(self) -> Any:
        return self.group.attrs

    @property
    def parent(self) -> Any:
        return self.group.parent

    def get(self, key: str) -> Any:
        return None if self.group.get(key) is None else self[key]

    def keys(self) -> Any:
        return self.group.keys()


def write_robomimic(
    path: Path,
    episodes: Iterable[tuple[str, Episode]],
    act_space: Spaces,
    *,
    masks: Mapping[str, list[str]] | None = None,
    env_args: Mapping[str, Any] | None = None,
) -> int:
    """Write episodes of ours as a file that robomimic reads; whole or not at all.

    `dones` are the ends of the task. Keys under `log/` stay behind. Returns how many
    there are.
    """
    (action_key,) = act_space  # the layout has one
    h5py = _h5py()
    path.parent.mkdir(parents=True, exist_ok=True)
    count = total = 0
    with atomic_write(path) as temporary, h5py.File(temporary, "w") as file:
        data = file.create_group("data")
        for name, episode in episodes:
            obs, action, reward, terminal = to_steps(episode, act_space)
            group = data.create_group(name)
            group.attrs["num_samples"] = steps = len(reward)
            group["actions"] = action[action_key]
            group["rewards"] = reward
            group["dones"] = terminal.astype(np.int64)
            for key, value in obs.items():
                if key.startswith(LOG):
                    continue
                packed: dict[str, Any] = {}
                if value.dtype == np.uint8:
                    chunk = (1, *value.shape[1:])
                    packed = {"compression": "gzip", "chunks": chunk}
                for part, rows in (("obs", value[:-1]), ("next_obs", value[1:])):
                    group.create_dataset(f"{part}/{key}", data=rows, **packed)
            count, total = count + 1, total + steps
        data.attrs["total"] = total
        data.attrs["env_args"] = json.dumps(dict(env_args or {}))
        for name, members in (masks or {}).items():
            file[f"mask/{name}"] = np.array(members, dtype="S")
    return count


def _assemble(
    before: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
    action: np.ndarray,
    reward: np.ndarray,
    terminal: np.ndarray,
    map: KeyMap,
) -> Episode:
    if action.ndim == 0 or not len(action):
        raise BadEpisode("is empty")
    ends = terminal != 0
    if map.ends == "success":
        ends = ends & (reward > 0)
    elif map.ends == "never":
        ends = np.zeros_like(ends)
    seen = before
    if after:
        seen = {k: np.concatenate([v[:1], after[k]]) for k, v in before.items()}
    elif map.alignment == "led":
        action, reward, ends = action[1:], reward[1:], ends[1:]
    elif _length(before) == len(action):
        if map.final == "repeat":
            seen = {k: np.concatenate([v, v[-1:]]) for k, v in before.items()}
        else:
            action, reward, ends = action[:-1], reward[:-1], ends[:-1]
    return from_steps(seen, {"action": action}, reward, ends)


def _rows(steps: int, seen: int, pairs: bool, map: KeyMap) -> int:
    if map.alignment == "led" and not pairs:
        return steps
    dropped = not pairs and seen == steps and map.final == "drop"
    return steps if dropped else steps + 1


def _obs_of(
    group: Any, map: KeyMap, wanted: Collection[str] | None = None
) -> dict[str, Any]:
    if map.keys:
        pairs = [pair.partition("=")[::2] for pair in map.keys]
        found = {ours: _get(group, theirs) for ours, theirs in pairs}
    else:
        inner = group.get(map.obs)
        if inner is None or not _is_group(inner):
            inside = ", ".join(sorted(group)) or "nothing"
            raise BadEpisode(f"has no group {map.obs!r}, only {inside}")
        found = {key: inner[key] for key in inner if _is_seen(key, inner[key])}
    if not found:
        raise BadEpisode(f"has no observations in {map.obs!r}")
    if wanted is not None:
        if missing := [key for key in wanted if key not in found]:
            raise BadEpisode(f"has no {', '.join(repr(key) for key in missing)}")
        found = {key: found[key] for key in wanted}
    if single := [key for key, value in found.items() if not value.shape]:
        raise BadEpisode(f"{single[0]!r} is a single number, not one for every row")
    lengths = {key: len(value) for key, value in found.items()}
    if len(set(lengths.values())) > 1:
        raise BadEpisode(f"has observations of several lengths, {lengths}")
    return found


def _next_of(group: Any, map: KeyMap, obs: dict[str, Any]) -> dict[str, Any]:
    found = None if map.keys or map.alignment == "led" else group.get(map.next_obs)
    if found is None:
        return {}
    if missing := [key for key in obs if key not in found]:
        raise BadEpisode(f"has no {', '.join(missing)} in {map.next_obs!r}")
    for key, value in obs.items():
        if value.shape != found[key].shape:
            raise BadEpisode(
                f"{key!r} has shape {value.shape} in {map.obs!r} and "
                f"{found[key].shape} in {map.next_obs!r}"
            )
    return {key: found[key] for key in obs}


def _get(group: Any, key: str) -> Any:
    if key not in group:
        raise BadEpisode(
            f"has no {key!r}, only {', '.join(sorted(group)) or 'nothing'}"
        )
    return group[key]


def _optional(group: Any, key: str, rows: int) -> np.ndarray:
    if key not in group:
        return np.zeros(rows, np.float32)
    value = np.asarray(group[key])
    if value.shape[:1] != (rows,):
        there = len(value) if value.ndim else "no"
        raise BadEpisode(f"{key!r} has {there} rows, the actions have {rows}")
    return value.reshape(rows, -1)[:, 0] if rows else value.ravel()


def _length(obs: Mapping[str, Any]) -> int:
    return min((len(value) for value in obs.values()), default=0)


def _is_group(thing: Any) -> bool:
    return hasattr(thing, "keys")


def _is_seen(key: str, thing: Any) -> bool:
    """Whether an observation lies there: numbers, at least one a row, and under a name
    that stands for nothing else in an episode of ours.
    """
    if _is_group(thing) or key in (*FLAGS, "action"):
        return False
    return thing.dtype.kind in "biuf" and 0 not in thing.shape[1:]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@contextmanager
def _readable() -> Iterator[None]:
    """What h5py raises about a damaged file, as a word about this episode."""
    try:
        yield
    except (OSError, RuntimeError, KeyError) as error:
        raise BadEpisode(f"cannot be read ({error})") from error


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise UserError(
            "HDF5 files need the package 'h5py', which is not installed.\n"
            "  Fix: pip install 'reverie[hdf5]'"
        ) from None
    return h5py
