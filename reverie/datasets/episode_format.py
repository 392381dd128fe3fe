"""The format of a recorded episode, and a check that an episode follows it.

An episode is a dict of arrays that share their first axis, in the time convention of
`api.py`: row t holds the observation and reward received on arrival and the action
chosen there, so the action of the last row is zero. Readers convert other layouts to
this format with `from_steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from reverie.spaces import STEP_KEYS, Arrays, Space, Spaces

Episode = Arrays
LOG = "log/"
"""Prefix of keys that agents do not use."""
STATE, MODEL = "log/state", "log/model"
"""Simulator states of all rows, and bytes of the simulator's model (XML)."""
INT32 = np.iinfo(np.int32)  # range of integer actions


class BadEpisode(ValueError):
    """One episode cannot be used. Other episodes of the dataset may be valid."""


def from_steps(
    obs: Mapping[str, np.ndarray],
    action: Mapping[str, np.ndarray],
    reward: np.ndarray,
    terminal: np.ndarray,
) -> Episode:
    """Return the T + 1 rows of an episode with T steps.

    Observations have T + 1 rows. Action, reward and terminal flag have T rows: the
    action of step t is taken in row t, its reward and flag belong to row t + 1.
    """
    steps = _rows(reward, "reward")
    for key, value in obs.items():
        if _rows(value, key) != steps + 1:
            raise BadEpisode(f"{key!r} has {len(value)} rows, expected {steps + 1}")
    for key, value in {**action, "terminal": terminal}.items():
        if _rows(value, key) != steps:
            raise BadEpisode(f"{key!r} has {len(value)} rows, expected {steps}")
    rows = steps + 1
    return {
        **{key: as_observation(value, key) for key, value in obs.items()},
        **{key: _pad_end(as_action(value, key)) for key, value in action.items()},
        "reward": _pad_start(_column(reward, "reward").astype(np.float32, copy=False)),
        "is_first": np.arange(rows) == 0,
        "is_last": np.arange(rows) == rows - 1,
        "is_terminal": _pad_start(_column(terminal, "terminal").astype(bool)),
    }


def to_steps(
    episode: Episode, act_space: Iterable[str]
) -> tuple[Arrays, Arrays, np.ndarray, np.ndarray]:
    """Return observations, actions, rewards and terminal flags: the inverse of
    `from_steps`."""
    keys = set(act_space)
    obs = {k: v for k, v in episode.items() if k not in {*STEP_KEYS, *keys}}
    action = {key: episode[key][:-1] for key in keys}
    return obs, action, episode["reward"][1:], episode["is_terminal"][1:]


def as_observation(value: Any, key: str) -> np.ndarray:
    """Return images (uint8, rank 4) unchanged and every other array as float32."""
    array = _numeric(value, key)
    return array if is_image(array) else array.astype(np.float32, copy=False)


def as_action(value: Any, key: str) -> np.ndarray:
    """Return float actions as float32 and integer actions as int32."""
    array = _numeric(value, key)
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    if array.size and (array.min() < INT32.min or array.max() > INT32.max):
        raise BadEpisode(f"{key!r} has values that do not fit in 32 bits")
    return array.astype(np.int32, copy=False)


def is_image(array: np.ndarray) -> bool:
    """True for an array of images `(T, h, w, c)`."""
    return array.dtype == np.uint8 and array.ndim == 4


def find_problems(episode: Episode, obs_space: Spaces, act_space: Spaces) -> list[str]:
    """Describe every way in which an episode does not match the spaces."""
    if missing := [key for key in STEP_KEYS if key not in episode]:
        return [f"has no {', '.join(map(repr, missing))}"]
    rows, problems = len(episode["reward"]), []
    if rows < 2:
        problems.append(f"has {rows} rows, at least 2 are needed for one step")
    for key, value in episode.items():
        if key.startswith(LOG):
            continue
        if value.shape[:1] != (rows,):
            problems.append(f"{key!r} has {len(value)} rows, 'reward' has {rows}")
        elif value.dtype.kind == "f" and not np.isfinite(value).all():
            row = int(np.argwhere(~np.isfinite(value))[0][0])
            problems.append(f"{key!r} has NaN or infinite entries (first in row {row})")
    for key, space in {**obs_space, **act_space}.items():
        if key in STEP_KEYS or key.startswith(LOG):
            continue
        if key not in episode:
            problems.append(f"has no {key!r}")
        elif why := _mismatch(episode[key], space, is_action=key in act_space):
            problems.append(f"{key!r} {why}")
    if rows and not (episode["is_first"][0] and not episode["is_first"][1:].any()):
        problems.append("'is_first' must be true in the first row only")
    return problems


def check_episode(episode: Episode, obs_space: Spaces, act_space: Spaces) -> Episode:
    """Return the episode, or raise `BadEpisode` with all of its problems."""
    if problems := find_problems(episode, obs_space, act_space):
        raise BadEpisode("; ".join(problems))
    return episode


def _mismatch(value: np.ndarray, space: Space, is_action: bool) -> str | None:
    """Describe how an array differs from its space; None if it matches."""
    if value.shape[1:] != space.shape:
        return f"has shape {value.shape[1:]}, expected {space.shape}"
    if value.dtype != space.dtype:
        return f"has dtype {value.dtype}, expected {space.dtype}"
    if is_action and space.is_discrete:
        actions = value[:-1]  # the last row has no action
        invalid = actions[(actions < space.low) | (actions >= space.high)]
        if invalid.size:
            low, high = int(space.low.min()), int(space.high.max()) - 1
            return f"has the value {invalid[0]}, expected {low} to {high}"
    return None


def _numeric(value: Any, key: str) -> np.ndarray:
    """Return a value as an array; raise `BadEpisode` if it has no numbers."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise BadEpisode(f"{key!r} has dtype {array.dtype}, which is not numeric")
    return array


def _rows(value: Any, key: str) -> int:
    """Return the number of rows; raise `BadEpisode` for a single value."""
    if not np.ndim(value):
        raise BadEpisode(f"{key!r} is a single value, not one per row")
    return len(value)


def _column(value: Any, key: str) -> np.ndarray:
    """Return one number per row."""
    array = _numeric(value, key)
    if array.size != len(array):
        raise BadEpisode(
            f"{key!r} has shape {array.shape}, expected one number per row"
        )
    return array.reshape(len(array))


def _pad_end(value: np.ndarray) -> np.ndarray:
    """Append a row of zeros, for values that the last row does not have."""
    return np.concatenate([value, np.zeros_like(value, shape=(1, *value.shape[1:]))])


def _pad_start(value: np.ndarray) -> np.ndarray:
    """Prepend a zero, for values that the first row does not have."""
    return np.concatenate([np.zeros(1, value.dtype), value])
