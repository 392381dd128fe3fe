"""Fans: from one context a world goes on many times, as it thinks things may go.

From every few rows of an episode the world is shown the rows before, and goes on again
and again with the recorded actions, each time by its own chance. Of every entry of a
vector (every joint of an arm) three numbers by horizon say how far to trust it: how far
the mean of its threads is from what came (`rmse`), how far threads are from each other
(`spread`), and how often what came lies between the outermost two (`coverage`). Threads
as good as the truth would enclose it in (n - 1) of (n + 1) cases, for n of them. They
are what a world expects to see, without the noise of a sensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from reverie.api import Metrics
from reverie.capabilities import WorldModelEnv
from reverie.evaluation.open_loop import dream_on
from reverie.render.ensemble import EnsembleLines, draw_ensembles
from reverie.spaces import Spaces
from reverie.storage.array_file import Arrays

AT_ONCE = 256
"""Threads that are dreamt side by side."""


@dataclass(frozen=True)
class FanConfig:
    """How often and how far a world goes on from the same rows."""

    samples: int = 19
    """Threads of a fan; 0 for none."""
    every: int = 10
    """Rows from one fan to the next."""
    horizon: int = 15
    """Steps ahead."""
    episodes: int = 2
    """Episodes to look at."""
    keys: tuple[str, ...] = ()
    """Vectors to look at; none for all that are foreseen."""

    def __post_init__(self) -> None:
        if self.samples < 0 or self.samples == 1:
            raise ValueError("samples must be at least 2, or 0 for no fans")
        if min(self.every, self.horizon, self.episodes) < 1:
            raise ValueError("every, horizon and episodes must be at least 1")


class Fans(NamedTuple):
    """All fans of one key; NaN beyond the end of an episode."""

    truth: Float[np.ndarray, "N H d"]
    threads: Float[np.ndarray, "N S H d"]
    seen: Float[np.ndarray, "N d"]
    """The last row before each."""


class Spread(NamedTuple):
    """What fans say of each horizon and entry; NaN where there is none."""

    rmse: Float[np.ndarray, "H d"]
    spread: Float[np.ndarray, "H d"]
    coverage: Float[np.ndarray, "H d"]
    copy_rmse: Float[np.ndarray, "H d"]
    """As `rmse`, of whoever copies the last row seen."""


def open_fans(
    dreams: WorldModelEnv, episodes: Iterable[Arrays], config: FanConfig, context: int
) -> tuple[dict[str, Fans], Metrics]:
    """The fans of every key, and a picture of those of the first episode.

    `episodes` are rows `(T, ...)`; the world sees `context` of them before each fan.
    """
    keys = vectors(dreams, config.keys)
    found: dict[str, list[Fans]] = {key: [] for key in keys}
    pictures: Metrics = {}
    for episode in islice(episodes, config.episodes if keys else 0):
        rows = len(episode["is_first"])
        shown = min(context, rows - 1)
        starts = list(range(shown - 1, rows - 1, config.every))
        opened = _open(dreams, episode, starts, config, shown, keys)
        for key, fans in opened.items():
            found[key].append(fans)
            if f"fan/{key}" not in pictures:
                pictures[f"fan/{key}"] = _picture(key, episode, starts, fans)
    joined = {
        key: Fans(*(np.concatenate(x) for x in zip(*some, strict=True)))
        for key, some in found.items()
        if some
    }
    return joined, pictures


def vectors(dreams: WorldModelEnv, wanted: tuple[str, ...] = ()) -> list[str]:
    """The keys that fans can be opened for: real numbers that a world foresees."""
    spaces: Spaces = dreams.obs_space
    known = [key for key in dreams.predicted_keys if spaces[key].dtype.kind == "f"]
    return [key for key in known if key in wanted or not wanted]


def spread_of(fans: Fans) -> Spread:
    """Errors, spread and coverage over all fans."""
    truth, threads = fans.truth, fans.threads
    inside = (threads.min(1) <= truth) & (truth <= threads.max(1))
    there = np.where(np.isnan(truth), np.nan, 1.0)
    return Spread(
        rmse=np.sqrt(_mean(np.square(threads.mean(1) - truth))),
        spread=np.sqrt(_mean(threads.var(1, ddof=1) * there)),
        coverage=_mean(inside * there),
        copy_rmse=np.sqrt(_mean(np.square(fans.seen[:, None] - truth))),
    )


def expected_coverage(samples: int) -> float:
    """How often threads that are as good as the truth enclose it."""
    return (samples - 1) / (samples + 1)


def fan_metrics(found: dict[str, Fans]) -> Metrics:
    """One number each, over all horizons and entries."""
    metrics: Metrics = {}
    for key, fans in found.items():
        for name, value in spread_of(fans)._asdict().items():
            metrics[f"fan/{key}/{name}"] = float(np.nanmean(value))
    return metrics


def fan_table(found: dict[str, Fans]) -> dict[str, Any]:
    """By key, horizon and entry, as JSON has it; None where there is none."""
    table: dict[str, Any] = {}
    for key, fans in found.items():
        samples = fans.threads.shape[1]
        numbers = {name: _rows(x) for name, x in spread_of(fans)._asdict().items()}
        table[key] = {
            "fans": len(fans.truth),
            "samples": samples,
            "expected_coverage": expected_coverage(samples),
            **numbers,
        }
    return table


def _open(
    dreams: WorldModelEnv,
    episode: Arrays,
    starts: list[int],
    config: FanConfig,
    context: int,
    keys: list[str],
) -> dict[str, Fans]:
    """The fans of one episode, some at a time."""
    rows = len(episode["is_first"])
    at_once = max(1, AT_ONCE // config.samples)
    parts: dict[str, list[Fans]] = {key: [] for key in keys}
    for first in range(0, len(starts), at_once):
        some = np.array(starts[first : first + at_once])
        window = some[:, None] + np.arange(1 - context, config.horizon + 1)
        inside = np.minimum(window, rows - 1)
        batch = {
            key: value[inside].repeat(config.samples, 0)
            for key, value in episode.items()
        }
        drawn = dream_on(dreams, batch, context, config.horizon)
        gone = (window[:, context:] >= rows)[..., None]
        for key in keys:
            flat = episode[key].reshape(rows, -1).astype(np.float64)
            truth = np.where(gone, np.nan, flat[inside[:, context:]])
            shape = (len(some), config.samples, config.horizon, -1)
            threads = drawn[key].astype(np.float64).reshape(shape)
            parts[key].append(Fans(truth, threads, flat[some]))
    return {
        key: Fans(*(np.concatenate(x) for x in zip(*fans, strict=True)))
        for key, fans in parts.items()
    }


def _picture(key: str, episode: Arrays, starts: list[int], fans: Fans) -> np.ndarray:
    rows = len(episode["is_first"])
    flat = episode[key].reshape(rows, -1).astype(np.float64)
    shown = [
        EnsembleLines(start, threads[:, : rows - 1 - start])
        for start, threads in zip(starts, fans.threads, strict=True)
    ]
    samples = fans.threads.shape[1]
    return draw_ensembles(flat, shown, f"{key}: {samples} ways to go on")


def _mean(values: np.ndarray) -> np.ndarray:
    """Over fans; NaN where none is that long."""
    there = ~np.isnan(values)
    count = there.sum(0)
    total = np.where(there, values, 0).sum(0)
    return np.where(count, total / np.maximum(count, 1), np.nan)


def _rows(values: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(x) else float(x) for x in row] for row in values]
