"""Minari datasets, as `minari:ID`, from where Minari keeps them.

Minari stores T + 1 observations and T actions, rewards, terminations and truncations:
action t is chosen in row t, so only the last row needs an action of zeros.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode, from_steps
from reverie.datasets.readers import Reader, infer_spaces
from reverie.spaces import Space, Spaces


class MinariReader(Reader):
    """The episodes of one dataset, named by their ids."""

    def __init__(self, path: str):
        self.origin = str(path)
        self.masks: dict[str, list[str]] = {}
        self._data = _load(str(path).removeprefix("minari:"))
        self._ids = [int(i) for i in self._data.episode_indices]

    def names(self) -> list[str]:
        return [f"episode_{i}" for i in self._ids]

    def rows(self, name: str) -> int:
        number = int(name.removeprefix("episode_"))
        (known,) = self._data.storage.get_episode_metadata([number])
        return int(known["total_steps"]) + 1

    def read(self, name: str) -> Episode:
        number = int(name.removeprefix("episode_"))
        (found,) = self._data.iterate_episodes([number])
        obs, action = _seen(found.observations), _done(found.actions)
        try:
            return from_steps(obs, action, found.rewards, found.terminations)
        except TypeError as error:
            raise BadEpisode(f"has values that are no arrays ({error})") from error

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        first = self.read(self.names()[0]) if self._ids else {}
        keys = [k for k in first if k == "action" or k.startswith("action/")]
        obs, act = infer_spaces(
            self.origin, self.names(), self.read, keys or ["action"]
        )
        known = _known(self._data.action_space, "action")
        rest = {key: space for key, space in act.items() if key not in known}
        return obs, act | self._counted(rest) | known


def _seen(value: Any) -> dict[str, np.ndarray]:
    """Observations by their last name, or by the whole path where two share it.

    A single one is called `image` if it is one, and `vector` otherwise.
    """
    found = _flatten(value)
    if list(found) == [""]:
        array = found[""]
        is_image = array.dtype == np.uint8 and array.ndim == 4
        return {"image" if is_image else "vector": array}
    last = Counter(path.rpartition("/")[2] for path in found)
    short = {path: path.rpartition("/")[2] for path in found}
    return {
        short[path] if last[short[path]] == 1 else path: array
        for path, array in found.items()
    }


def _done(value: Any) -> dict[str, np.ndarray]:
    """Actions, as `action` or `action/PATH`."""
    return {f"action/{p}" if p else "action": x for p, x in _flatten(value).items()}


def _flatten(value: Any, path: str = "") -> dict[str, np.ndarray]:
    """A nest of dicts and tuples as arrays by path; one array has none."""
    found: dict[str, np.ndarray] = {}
    if not isinstance(value, dict | tuple):
        return {path: np.asarray(value)}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        found |= _flatten(inner, f"{path}/{key}" if path else str(key))
    return found


def _known(space: Any, name: str) -> Spaces:
    """The discrete actions of an environment, of which recordings may lack some."""
    inner = getattr(space, "spaces", None)
    if inner is not None:
        pairs = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
        parts = [_known(part, f"{name}/{key}") for key, part in pairs]
        return {key: found for part in parts for key, found in part.items()}
    if hasattr(space, "n") and hasattr(space, "start"):
        start = int(space.start)
        return {name: Space(np.int32, (), start, start + int(space.n))}
    return {}


def _load(name: str) -> Any:
    try:
        import minari
    except ImportError:
        raise UserError(
            f"The dataset {name!r} needs the package 'minari', which is not installed."
            "\n  Fix: pip install 'reverie[minari]'"
        ) from None
    try:
        return minari.load_dataset(name)
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise UserError(
            f"Minari has no dataset {name!r} here ({error}).\n"
            f"  Fix: minari download {name}"
        ) from None
