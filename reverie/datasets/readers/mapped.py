"""Build episodes from HDF5 and NPZ files whose layout is described by a key map.

A group is a mapping from names to arrays and groups, as in h5py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode, from_steps
from reverie.datasets.readers.key_map import NO_ARRAY, KeyMap
from reverie.spaces import STEP_KEYS
from reverie.storage.limits import InvalidFile

MAX_LISTED = 12
"""Number of arrays that an error message lists."""


class MappedArrays(NamedTuple):
    """The arrays of an episode."""

    before: dict[str, np.ndarray]
    """Observations before each action; only the first one if `after` has the others."""
    after: dict[str, np.ndarray]
    """Observations after each action; empty if they are not stored."""
    action: np.ndarray
    reward: np.ndarray
    terminal: np.ndarray


def load_arrays(
    group: Any, map: KeyMap, keys: Collection[str] | None = None
) -> MappedArrays:
    """Load the arrays of an episode; `keys` selects some observations."""
    obs = find_observations(group, map, keys)
    next_obs = find_next_observations(group, map, obs)
    # rows after the first are in `next_obs`, if it exists
    before = {k: np.asarray(v[:1] if next_obs else v) for k, v in obs.items()}
    after = {key: np.asarray(value) for key, value in next_obs.items()}
    action = np.asarray(get_array(group, map.action))
    reward = optional_array(group, map.reward, len(action))
    terminal = optional_array(group, map.terminal, len(action))
    return MappedArrays(before, after, action, reward, terminal)


def count_rows(group: Any, map: KeyMap) -> int:
    """Return the number of rows that `build_episode` returns, without loading it."""
    steps = len(get_array(group, map.action))
    obs = find_observations(group, map)
    has_next = bool(find_next_observations(group, map, obs))
    if map.alignment == "before_obs" and not has_next:
        return steps  # the first action is dropped
    is_dropped = not has_next and map.last_obs == "drop"
    return steps if is_dropped and shortest_length(obs) == steps else steps + 1


def build_episode(arrays: MappedArrays, map: KeyMap) -> Episode:
    """Build the episode, with rows in the time convention of `api.py`."""
    before, after, action, reward, terminal = arrays
    if action.ndim == 0 or not len(action):
        raise BadEpisode("is empty")
    is_terminal = terminal != 0
    if map.terminate_on == "success":
        is_terminal = is_terminal & (reward > 0)
    elif map.terminate_on == "never":
        is_terminal = np.zeros_like(is_terminal)
    obs = before
    if after:
        obs = {k: np.concatenate([v[:1], after[k]]) for k, v in before.items()}
    elif map.alignment == "before_obs":
        # The first action is dropped: the observation before it is not stored.
        action, reward, is_terminal = action[1:], reward[1:], is_terminal[1:]
    elif shortest_length(before) == len(action):  # none after the last action
        if map.last_obs == "repeat":
            obs = {k: np.concatenate([v, v[-1:]]) for k, v in before.items()}
        elif reward[-1] or is_terminal[-1]:
            raise UserError(
                "`last_obs drop` would lose the reward or the terminal flag of the "
                "last action.\n  Fix: repeat the last observation with --map.last_obs "
                "repeat (--offline.read.map.last_obs repeat in training)."
            )
        else:
            action, reward, is_terminal = action[:-1], reward[:-1], is_terminal[:-1]
    return from_steps(obs, {"action": action}, reward, is_terminal)


def check_optional_names(
    origin: str, map: KeyMap, names: Iterable[str], open_group: Callable[[str], Any]
) -> None:
    """Raise `UserError` if no episode has an array that the key map names explicitly.

    Episodes that cannot be read are ignored.
    """
    missing = map.optional_names()
    members: set[str] = set()
    for name in names if missing else ():
        try:
            group = open_group(name)
            members.update(group)
            missing = {f: key for f, key in missing.items() if key not in group}
        except (BadEpisode, InvalidFile):
            continue
        if not missing:
            return
    if not missing or not members:
        return
    field, key = next(iter(missing.items()))
    listed = sorted(members)[:MAX_LISTED]
    more = ", ..." if len(members) > MAX_LISTED else ""
    raise UserError(
        f"{origin} has no {key!r} in any episode, only {', '.join(listed)}{more}.\n"
        f"  Fix: set --map.{field} (--offline.read.map.{field} in training) to one of "
        f"these, or to `{NO_ARRAY}` if there is none."
    )


def find_observations(
    group: Any, map: KeyMap, keys: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the observations of an episode, or those in `keys`, without loading."""
    if map.keys:
        pairs = [pair.partition("=")[::2] for pair in map.keys]
        arrays = {name: get_array(group, path) for name, path in pairs}
    else:
        obs = group.get(map.obs)
        if obs is None or not is_group(obs):
            members = ", ".join(sorted(group)) or "nothing"
            raise BadEpisode(f"has no group {map.obs!r}, only {members}")
        arrays = {key: obs[key] for key in obs if is_observation(key, obs[key])}
    if not arrays:
        raise BadEpisode(f"has no observations in {map.obs!r}")
    if keys is not None:
        if missing := [key for key in keys if key not in arrays]:
            raise BadEpisode(f"has no {', '.join(repr(key) for key in missing)}")
        arrays = {key: arrays[key] for key in keys}
    if scalars := [key for key, value in arrays.items() if not value.shape]:
        raise BadEpisode(f"{scalars[0]!r} is a single number, not one per row")
    lengths = {key: len(value) for key, value in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise BadEpisode(f"has observations of different lengths, {lengths}")
    return arrays


def find_next_observations(
    group: Any, map: KeyMap, obs: dict[str, Any]
) -> dict[str, Any]:
    """Return the observations after each action, without loading; empty if none."""
    unused = map.keys or map.alignment == "before_obs"
    arrays = None if unused else group.get(map.next_obs)
    if arrays is None or not is_group(arrays):
        return {}
    if missing := [key for key in obs if key not in arrays]:
        raise BadEpisode(f"has no {', '.join(missing)} in {map.next_obs!r}")
    for key, value in obs.items():
        shape = getattr(arrays[key], "shape", None)
        if value.shape != shape:
            raise BadEpisode(
                f"{key!r} has shape {value.shape} in {map.obs!r} and {shape} in "
                f"{map.next_obs!r}"
            )
    return {key: arrays[key] for key in obs}


def get_array(group: Any, key: str) -> Any:
    """Return an array of a group without loading; raise `BadEpisode` if missing."""
    if key not in group:
        members = ", ".join(sorted(group)) or "nothing"
        raise BadEpisode(f"has no {key!r}, only {members}")
    member = group[key]
    if is_group(member) or not member.shape:
        raise BadEpisode(f"has {key!r}, which is not an array")
    return member


def optional_array(group: Any, key: str, rows: int) -> np.ndarray:
    """Load an array with one number per row; zeros if it does not exist."""
    if key not in group:
        return np.zeros(rows, np.float32)
    value = np.asarray(get_array(group, key))
    if value.shape[:1] != (rows,):
        raise BadEpisode(f"{key!r} has {len(value)} rows, the actions have {rows}")
    return first_column(value, key)


def first_column(value: np.ndarray, key: str) -> np.ndarray:
    """Return the first entry of every row."""
    if 0 in value.shape[1:]:
        raise BadEpisode(f"has {key!r} without entries")
    return value.reshape(len(value), -1)[:, 0] if len(value) else value.ravel()


def shortest_length(obs: Mapping[str, Any]) -> int:
    """Return the smallest number of rows of all observations; 0 without any."""
    return min((len(value) for value in obs.values()), default=0)


def is_group(member: Any) -> bool:
    """True for a group; arrays have no method `keys`."""
    return hasattr(member, "keys")


def is_observation(key: str, member: Any) -> bool:
    """True for a numeric, non-empty array whose name is not reserved."""
    if is_group(member) or key in (*STEP_KEYS, "action"):
        return False
    return member.dtype.kind in "biuf" and 0 not in member.shape[1:]
