"""The one form of a recorded episode, and what can be wrong with one.

An episode is a dict of arrays that share their first axis; time is that of `api.py`:
row t holds what was seen on arrival (with the reward earned by arriving) and the action
chosen there, so the action of the last row is zero. Readers bring other people's
recordings into this form with `from_steps`; whoever relies on it asks `problems`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from reverie.spaces import FLAGS, Space, Spaces
from reverie.storage.array_file import Arrays

Episode = Arrays
LOG = "log/"


class BadEpisode(ValueError):
    """Why one episode cannot be used; the others may be fine."""


def from_steps(
    obs: Mapping[str, np.ndarray],
    action: Mapping[str, np.ndarray],
    reward: np.ndarray,
    terminal: np.ndarray,
) -> Episode:
    """Rows of ours from T steps.

    Observations have T + 1 rows. Action, reward and end of step t, T of each, are what
    was done in row t and what came of it in row t + 1.
    """
    steps = len(reward)
    for key, value in obs.items():
        if len(value) != steps + 1:
            raise BadEpisode(f"{key!r} has {len(value)} rows, wanted {steps + 1}")
    for key, value in {**action, "the end of the task": terminal}.items():
        if len(value) != steps:
            raise BadEpisode(f"{key!r} has {len(value)} rows, wanted {steps}")
    rows = steps + 1
    return {
        **{key: seen(value, key) for key, value in obs.items()},
        **{key: _then(done(value, key)) for key, value in action.items()},
        "reward": _after(np.asarray(reward, np.float32).reshape(steps)),
        "is_first": np.arange(rows) == 0,
        "is_last": np.arange(rows) == rows - 1,
        "is_terminal": _after(np.asarray(terminal).astype(bool).reshape(steps)),
    }


def to_steps(
    episode: Episode, act_space: Iterable[str]
) -> tuple[Arrays, Arrays, np.ndarray, np.ndarray]:
    """What `from_steps` was made of: observations, actions, rewards and ends."""
    keys = set(act_space)
    obs = {k: v for k, v in episode.items() if k not in {*FLAGS, *keys}}
    action = {key: episode[key][:-1] for key in keys}
    return obs, action, episode["reward"][1:], episode["is_terminal"][1:]


def with_flags(spaces: Spaces) -> Spaces:
    """Spaces of an environment that would show these keys."""
    flag = np.dtype(bool)
    return {
        **spaces,
        "reward": Space(np.dtype(np.float32)),
        **{key: Space(flag) for key in ("is_first", "is_last", "is_terminal")},
    }


def seen(value: Any, key: str) -> np.ndarray:
    """An observation: images stay bytes, every other number becomes float32."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise BadEpisode(f"{key!r} has dtype {array.dtype}, which is no number")
    is_image = array.dtype == np.uint8 and array.ndim == 4
    return array if is_image else array.astype(np.float32, copy=False)


def done(value: Any, key: str) -> np.ndarray:
    """An action: floats as float32, anything counted as int32."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise BadEpisode(f"{key!r} has dtype {array.dtype}, which is no number")
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int32, copy=False)


def problems(episode: Episode, obs_space: Spaces, act_space: Spaces) -> list[str]:
    """What is wrong with an episode as one of these spaces, in a few words each."""
    if missing := [key for key in FLAGS if key not in episode]:
        return [f"has no {', '.join(map(repr, missing))}"]
    rows, found = len(episode["reward"]), []
    if rows < 2:
        found.append(f"has {rows} rows, and a step takes two")
    for key, value in episode.items():
        if key.startswith(LOG):
            continue
        if value.shape[:1] != (rows,):
            found.append(f"{key!r} has {len(value)} rows, 'reward' has {rows}")
        elif value.dtype.kind == "f" and not np.isfinite(value).all():
            row = int(np.argwhere(~np.isfinite(value))[0][0])
            found.append(f"{key!r} has NaN or infinite entries (first in row {row})")
    for key, space in {**obs_space, **act_space}.items():
        if key in FLAGS or key.startswith(LOG):
            continue
        if key not in episode:
            found.append(f"has no {key!r}")
        elif why := _misfit(episode[key], space, is_action=key in act_space):
            found.append(f"{key!r} {why}")
    if rows and not (episode["is_first"][0] and not episode["is_first"][1:].any()):
        found.append("'is_first' is not true in the first row alone")
    return found


def _misfit(value: np.ndarray, space: Space, is_action: bool) -> str | None:
    if value.shape[1:] != space.shape:
        return f"has shape {value.shape[1:]}, the others have {space.shape}"
    if value.dtype != space.dtype:
        return f"has dtype {value.dtype}, the others have {space.dtype}"
    if is_action and space.is_discrete:
        chosen = value[:-1]  # nothing is chosen in the last row
        wrong = chosen[(chosen < space.low) | (chosen >= space.high)]
        if wrong.size:
            return f"holds {wrong[0]}, which is none of the {space.classes} there are"
    return None


def _then(value: np.ndarray) -> np.ndarray:
    """Something done in every row but the last."""
    return np.concatenate([value, np.zeros_like(value, shape=(1, *value.shape[1:]))])


def _after(value: np.ndarray) -> np.ndarray:
    """Something that came about in every row but the first."""
    return np.concatenate([np.zeros(1, value.dtype), value])
