"""Mean, standard deviation and range of every key over a dataset, in one pass.

Images are scaled to [0, 1], and their statistics are per pixel and channel. Standard
deviations are population standard deviations. The action of an episode's last row,
which is never taken, is not counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.capabilities import KeyStatistics, Statistics
from reverie.datasets.episode_format import BadEpisode, Episode, is_image
from reverie.datasets.readers import Reader
from reverie.datasets.readers.npz import load_arrays, save_arrays
from reverie.spaces import Arrays
from reverie.storage.atomic import make_parent

SUFFIX = ".stats.npz"
"""Appended to the name of the dataset; the file is written next to it."""


def compute_statistics(
    reader: Reader,
    names: Iterable[str] | None = None,
    prepare: Callable[[Episode], Episode] | None = None,
) -> Statistics:
    """Return the statistics of all valid episodes, or only of those in `names`.

    `prepare` is applied to each episode first, for example a center crop.
    """
    sums: dict[str, _RunningSums] = {}
    keys = [*reader.obs_space, *reader.act_space, "reward"]
    for name in reader.names() if names is None else names:
        try:
            episode = reader.read_valid(name)
        except BadEpisode as error:
            warnings.warn(
                f"{reader.origin}: {name} {error}; not counted",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        if prepare is not None:
            episode = prepare(episode)
        for key in keys:
            value = episode[key]
            rows = value[:-1] if key in reader.act_space else value
            if is_image(value):
                rows = rows / np.float32(255)
            sums.setdefault(key, _RunningSums()).add(rows)
    if not sums:
        raise UserError(
            f"{reader.origin} has no usable episode.\n"
            "  Fix: `reverie data inspect` lists what is wrong."
        )
    return {key: running.result() for key, running in sums.items()}


def save_statistics(path: Path, statistics: Statistics) -> Path:
    """Write statistics atomically as an NPZ file."""
    arrays: Arrays = {
        f"{key}:{field}": np.asarray(value)
        for key, moments in statistics.items()
        for field, value in moments._asdict().items()
    }
    make_parent(path)
    save_arrays(path, arrays)
    return path


def load_statistics(
    path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Statistics:
    """Read a file that was written by `save_statistics`.

    `shapes` are the keys that it must contain, and their shapes.
    """
    try:
        arrays = load_arrays(path)
        keys = dict.fromkeys(name.rpartition(":")[0] for name in arrays)
        fields: dict[str, Any] = {
            key: {name: arrays[f"{key}:{name}"] for name in KeyStatistics._fields}
            for key in keys
        }
    except (BadEpisode, KeyError) as error:
        raise UserError(
            f"{path} has no statistics of a dataset ({error}).\n"
            f"  Fix: reverie data stats PATH --out {path}"
        ) from None
    statistics = {key: KeyStatistics(**values) for key, values in fields.items()}
    for key, shape in (shapes or {}).items():
        found = statistics[key].mean.shape if key in statistics else "no statistics"
        if found != shape:
            raise UserError(
                f"{path} has {found} for {key!r}, expected statistics of the shape "
                f"{shape}.\n  Fix: reverie data stats PATH --out {path}, with the "
                "observations of the task."
            )
    return statistics


def format_table(statistics: Statistics) -> str:
    """Return one line per key for the terminal; arrays are averaged over entries."""
    lines = [f"{'key':<28}{'mean':>11}{'std':>11}{'min':>11}{'max':>11}{'rows':>10}"]
    for key, (mean, std, low, high, rows) in statistics.items():
        values = (mean.mean(), std.mean(), low.min(), high.max())
        columns = "".join(f"{float(value):>11.4g}" for value in values)
        lines.append(f"{key:<28}{columns}{rows:>10}")
    return "\n".join(lines)


class _RunningSums:
    """Sums of values and of their squares over rows.

    Values are relative to the first row (`base`), for numerical accuracy.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        values = rows.astype(np.float64)
        if not self.count:
            self.base = values[0]
            self.sum, self.square = np.zeros_like(self.base), np.zeros_like(self.base)
            self.min, self.max = values[0].copy(), values[0].copy()
        difference = values - self.base
        self.count += len(rows)
        self.sum += difference.sum(0)
        self.square += (difference * difference).sum(0)
        self.min = np.minimum(self.min, values.min(0))
        self.max = np.maximum(self.max, values.max(0))

    def result(self) -> KeyStatistics:
        """Return the statistics of all rows so far."""
        mean = self.sum / self.count
        variance = np.maximum(self.square / self.count - mean * mean, 0)
        arrays = (mean + self.base, np.sqrt(variance), self.min, self.max)
        mean, std, low, high = (np.asarray(array) for array in arrays)
        return KeyStatistics(mean, std, low, high, self.count)
