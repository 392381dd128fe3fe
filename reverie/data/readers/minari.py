"""Minari datasets, as `minari:ID`, from where Minari keeps them.

Minari stores T + 1 observations and T actions, rewards, terminations and truncations:
action t is chosen in row t, so only the last row needs an action of zeros.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from reverie.api import Spaces, UserError
from reverie.data.form import BadEpisode, Episode, from_steps
from reverie.data.readers import Reader, infer_spaces


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
        obs = _flatten(found.observations, "vector")
        action = _flatten(found.actions, "action")
        try:
            return from_steps(obs, action, found.rewards, found.terminations)
        except TypeError as error:
            raise BadEpisode(f"has values that are no arrays ({error})") from error

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        first = self.read(self.names()[0]) if self._ids else {}
        keys = [k for k in first if k == "action" or k.startswith("action/")]
        return infer_spaces(self.origin, self.names(), self.read, keys or ["action"])


def _flatten(value: Any, name: str) -> dict[str, np.ndarray]:
    """A nest of dicts and tuples as arrays by path; one array goes by `name`.

    A single observation that is an image is called `image`.
    """
    if isinstance(value, dict):
        found: dict[str, np.ndarray] = {}
        for key, inner in value.items():
            found |= _flatten(inner, f"{name}/{key}" if name == "action" else str(key))
        return found
    if isinstance(value, tuple):
        return _flatten({str(i): part for i, part in enumerate(value)}, name)
    array = np.asarray(value)
    if name == "vector" and array.dtype == np.uint8 and array.ndim == 4:
        name = "image"
    return {name: array}


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
