"""Reader of Minari datasets, as `minari:ID`, from Minari's own data folder.

Minari stores T + 1 observations and T actions, rewards, terminations and truncations.
Action t is taken in row t, as in Reverie; the last row gets an action of zeros.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import Episode, from_steps, is_image
from reverie.datasets.readers import Reader, as_bad_episode, infer_spaces
from reverie.plugins import import_optional
from reverie.spaces import Space, Spaces


class MinariReader(Reader):
    """Reads the episodes of one dataset, named by their ids."""

    def __init__(self, path: str):
        self.origin = str(path)
        self.masks: dict[str, list[str]] = {}  # Minari has no named subsets
        self._data = _load(str(path).removeprefix("minari:"))
        self._names = [f"episode_{int(i)}" for i in self._data.episode_indices]

    def rows(self, name: str) -> int:
        number = int(name.removeprefix("episode_"))
        with as_bad_episode("Minari"):
            (metadata,) = self._data.storage.get_episode_metadata([number])
            return int(metadata["total_steps"]) + 1

    def read(self, name: str) -> Episode:
        number = int(name.removeprefix("episode_"))
        with as_bad_episode("Minari"):
            (data,) = self._data.iterate_episodes([number])
            obs, action = _observations(data.observations), _actions(data.actions)
            return from_steps(obs, action, data.rewards, data.terminations)

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        first = self.read(self._names[0]) if self._names else {}
        keys = [k for k in first if k == "action" or k.startswith("action/")]
        obs, act = infer_spaces(
            self.origin, self.names(), self.read, keys or ["action"]
        )
        declared = _declared_spaces(self._data.action_space, "action")
        others = {key: space for key, space in act.items() if key not in declared}
        return obs, act | self._extend_discrete_bounds(others) | declared


def _observations(value: Any) -> dict[str, np.ndarray]:
    """Flatten observations; the key is the last part of the path, or the full path if
    two paths have the same last part.

    A single observation is named `image` or `vector`.
    """
    arrays = _flatten(value)
    if list(arrays) == [""]:
        array = arrays[""]
        return {"image" if is_image(array) else "vector": array}
    short = {path: path.rpartition("/")[2] for path in arrays}
    count = Counter(short.values())
    return {
        short[path] if count[short[path]] == 1 else path: array
        for path, array in arrays.items()
    }


def _actions(value: Any) -> dict[str, np.ndarray]:
    """Flatten actions to `action` or `action/PATH`."""
    return {f"action/{p}" if p else "action": x for p, x in _flatten(value).items()}


def _flatten(value: Any, path: str = "") -> dict[str, np.ndarray]:
    """Return the arrays of nested dicts and tuples by path ('' for a lone array)."""
    arrays: dict[str, np.ndarray] = {}
    if not isinstance(value, dict | tuple):
        return {path: np.asarray(value)}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        arrays |= _flatten(inner, f"{path}/{key}" if path else str(key))
    return arrays


def _declared_spaces(space: Any, name: str) -> Spaces:
    """Return the discrete and continuous action spaces that the dataset declares.

    They are preferred to inferred ones, because episodes may not contain every action.
    """
    inner = getattr(space, "spaces", None)
    if inner is not None:
        pairs = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
        parts = [_declared_spaces(part, f"{name}/{key}") for key, part in pairs]
        return {key: found for part in parts for key, found in part.items()}
    if hasattr(space, "n") and hasattr(space, "start"):
        start = int(space.start)
        return {name: Space(np.int32, (), start, start + int(space.n))}
    if hasattr(space, "low") and np.asarray(space.low).dtype.kind == "f":
        return {name: Space(np.float32, space.shape, space.low, space.high)}
    return {}


def _load(name: str) -> Any:
    """Open a downloaded dataset with Minari, as `MinariDataset`."""
    minari = import_optional("minari", "minari", f"The dataset {name!r}")
    try:
        return minari.load_dataset(name)
    except Exception as error:  # Minari may raise any error for damaged files
        raise UserError(
            f"Minari has no local dataset {name!r} ({error}).\n"
            f"  Fix: minari download {name}"
        ) from None
