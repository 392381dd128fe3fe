"""Mean, deviation and range of every key over a dataset, in one pass over its files.

Images are measured pixel by pixel and channel by channel, as fractions of 255: that is
what they are standardised with. The deviation is that of the population. The action of
an episode's last row, which nobody took, does not count.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode, problems
from reverie.datasets.readers import Reader
from reverie.spaces import FLAGS
from reverie.storage.array_file import Arrays
from reverie.storage.atomic import atomic_write

SUFFIX = ".stats.npz"
"""Follows the name of what was measured; beside it, as it is no episode."""
_FIELDS = ("mean", "std", "min", "max")


@dataclass(frozen=True)
class Stat:
    """Of one key, in the shape of the key."""

    mean: np.ndarray
    std: np.ndarray
    min: np.ndarray
    max: np.ndarray
    count: int


Stats = dict[str, Stat]


def measure(
    reader: Reader,
    names: Iterable[str] | None = None,
    prepare: Callable[[Episode], Episode] | None = None,
) -> Stats:
    """Statistics over all usable episodes, or those named.

    `prepare` changes an episode before it is measured, such as a centre crop.
    """
    sums: dict[str, _Sums] = {}
    wanted = [*reader.obs_space, *reader.act_space, "reward"]
    for name in reader.names() if names is None else names:
        try:
            episode = reader.read(name)
            if wrong := problems(episode, reader.obs_space, reader.act_space):
                raise BadEpisode("; ".join(wrong))
        except BadEpisode as error:
            warnings.warn(
                f"{reader.origin}: {name} {error}; not measured",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        if prepare is not None:
            episode = prepare(episode)
        for key in wanted:
            value = episode[key]
            rows = value[:-1] if key in reader.act_space else value
            if value.dtype == np.uint8 and value.ndim == 4:
                rows = rows / np.float32(255)
            sums.setdefault(key, _Sums()).add(rows)
    if not sums:
        raise UserError(
            f"{reader.origin} has no usable episode to measure.\n"
            "  Fix: see what is wrong with `reverie data inspect`."
        )
    return {key: found.stat() for key, found in sums.items()}


def save(path: Path, stats: Stats) -> Path:
    """Write statistics as an NPZ file, whole or not at all."""
    arrays: Arrays = {}
    for key, stat in stats.items():
        for name in _FIELDS:
            arrays[f"{key}:{name}"] = getattr(stat, name)
        arrays[f"{key}:count"] = np.array([stat.count])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return path


def load(path: Path) -> Stats:
    """Read what `save` wrote."""
    try:
        with np.load(path, allow_pickle=False) as data:
            keys = dict.fromkeys(name.rpartition(":")[0] for name in data.files)
            return {
                key: Stat(
                    count=int(data[f"{key}:count"][0]),
                    **{name: data[f"{key}:{name}"] for name in _FIELDS},
                )
                for key in keys
            }
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise UserError(
            f"{path} holds no statistics ({error}).\n  Fix: reverie data stats PATH"
        ) from None


def table(stats: Stats) -> str:
    """A line per key, for a terminal; arrays are averaged over their entries."""
    lines = [f"{'key':<28}{'mean':>11}{'std':>11}{'min':>11}{'max':>11}{'rows':>10}"]
    for key, stat in stats.items():
        numbers = [stat.mean.mean(), stat.std.mean(), stat.min.min(), stat.max.max()]
        shown = "".join(f"{float(number):>11.4g}" for number in numbers)
        lines.append(f"{key:<28}{shown}{stat.count:>10}")
    return "\n".join(lines)


def as_json(stats: Stats) -> str:
    """Everything but images, for other programs."""
    small = {k: s for k, s in stats.items() if s.mean.ndim < 3 and k not in FLAGS[1:]}
    data = {
        key: {name: getattr(stat, name).tolist() for name in _FIELDS}
        for key, stat in small.items()
    }
    return json.dumps(data, indent=1)


class _Sums:
    """Sums of a key over rows; about the first row, so that nothing cancels."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        wide = rows.astype(np.float64)
        if not self.count:
            self.base = wide[0]
            self.sum, self.square = np.zeros_like(self.base), np.zeros_like(self.base)
            self.min, self.max = wide[0].copy(), wide[0].copy()
        away = wide - self.base
        self.count += len(rows)
        self.sum += away.sum(0)
        self.square += (away * away).sum(0)
        self.min = np.minimum(self.min, wide.min(0))
        self.max = np.maximum(self.max, wide.max(0))

    def stat(self) -> Stat:
        mean = self.sum / self.count
        variance = np.maximum(self.square / self.count - mean * mean, 0)
        values = (mean + self.base, np.sqrt(variance), self.min, self.max)
        arrays = {k: np.asarray(v) for k, v in zip(_FIELDS, values, strict=True)}
        return Stat(count=self.count, **arrays)
