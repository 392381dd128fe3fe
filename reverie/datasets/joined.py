"""Several datasets read as one (`reverie data merge`, several `--offline.data`)."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.action_units import ConvertedActionsReader, check_same_actions
from reverie.datasets.episode_format import Episode
from reverie.datasets.readers import Reader
from reverie.spaces import Space, Spaces


def join_readers(readers: Sequence[Reader]) -> Reader:
    """Return one reader for the episodes of all readers, in their order."""
    return readers[0] if len(readers) == 1 else JoinedReader(readers)


class JoinedReader(Reader):
    """The episodes of several datasets with the same observations and actions.

    Actions are converted to the units of the first dataset. If two datasets have
    episodes of the same name, all names get the name of their dataset as a prefix. A
    mask is kept only if every dataset has it; otherwise it would exclude whole
    datasets.
    """

    def __init__(self, readers: Sequence[Reader]):
        self.origin = ", ".join(reader.origin for reader in readers)
        first = readers[0]
        _check_joinable(readers)
        act_space = _common_actions(readers)
        self._spaces = first.obs_space, act_space
        self.readers: list[Reader] = []
        for reader in readers:
            converted = ConvertedActionsReader(reader, act_space, first.origin)
            if converted.unit_warning:
                warnings.warn(converted.unit_warning, RuntimeWarning, stacklevel=2)
            self.readers.append(converted)
        prefixes = _choose_prefixes(readers)
        self._sources = {
            prefix + name: (reader, name)
            for prefix, reader in zip(prefixes, self.readers, strict=True)
            for name in reader.names()
        }
        self._names = list(self._sources)
        common = set.intersection(*(set(reader.masks) for reader in readers))
        self.masks = {
            mask: [
                prefix + name
                for prefix, reader in zip(prefixes, readers, strict=True)
                for name in reader.masks[mask]
            ]
            for mask in first.masks
            if mask in common
        }

    @property
    def options(self) -> dict[str, Any]:
        return {reader.origin: reader.options for reader in self.readers}

    def rows(self, name: str) -> int:
        reader, inner_name = self._sources[name]
        return reader.rows(inner_name)

    def read(self, name: str) -> Episode:
        reader, inner_name = self._sources[name]
        return reader.read(inner_name)

    def read_keys(self, name: str, keys: Collection[str]) -> Episode:
        reader, inner_name = self._sources[name]
        return reader.read_keys(inner_name, keys)

    def read_states(self, name: str, keys: Sequence[str]) -> tuple[np.ndarray, str]:
        reader, inner_name = self._sources[name]
        return reader.read_states(inner_name, keys)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


def _check_joinable(readers: Sequence[Reader]) -> None:
    """Raise if a dataset is repeated, or if observations or actions differ."""
    origins = Counter(reader.origin for reader in readers)
    if repeated := [origin for origin, count in origins.items() if count > 1]:
        raise UserError(
            f"{repeated[0]} is given {origins[repeated[0]]} times.\n"
            "  Fix: list every dataset once."
        )
    first = readers[0]
    for other in readers[1:]:
        differences = _describe_obs_differences(first, other)
        if differences:
            raise UserError(
                f"{first.origin} and {other.origin} have different observations:\n"
                + "\n".join(f"    {line}" for line in differences)
                + "\n  Fix: select the observations that both have, with --vectors and "
                "--images in `reverie data merge` or --offline.keys in training."
            )
        pair = (first.origin, first.act_space, other.origin, other.act_space)
        check_same_actions(*pair, check_range=False)


def _describe_obs_differences(first: Reader, other: Reader) -> list[str]:
    """Describe the observations in which two datasets differ, one per line."""
    lines = []
    for key in dict.fromkeys((*first.obs_space, *other.obs_space)):
        descriptions = [
            f"{reader.origin} has {space.dtype} {space.shape}"
            if (space := reader.obs_space.get(key))
            else f"{reader.origin} does not have it"
            for reader in (first, other)
        ]
        a, b = first.obs_space.get(key), other.obs_space.get(key)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{key}: {', '.join(descriptions)}")
    return lines


def _common_actions(readers: Sequence[Reader]) -> Spaces:
    """Return the actions of the first dataset; discrete bounds cover all datasets."""
    spaces = dict(readers[0].act_space)
    for key, space in spaces.items():
        if space.is_discrete:
            others = [reader.act_space[key] for reader in readers]
            low = np.minimum.reduce([other.low for other in others])
            high = np.maximum.reduce([other.high for other in others])
            spaces[key] = Space(space.dtype, space.shape, low, high)
    return spaces


def _choose_prefixes(readers: Sequence[Reader]) -> list[str]:
    """Return a prefix for the episodes of each dataset; empty if all names differ."""
    names = Counter(name for reader in readers for name in reader.names())
    if max(names.values(), default=1) == 1:
        return [""] * len(readers)
    stems = [Path(re.split(r"[:/]", r.origin.rstrip("/"))[-1]).stem for r in readers]
    repeated = Counter(stems)
    return [
        f"{stem}_" if repeated[stem] == 1 else f"{stem}{number}_"
        for number, stem in enumerate(stems, 1)
    ]
