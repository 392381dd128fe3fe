"""Are the boundaries right? Found ones against true events, beside simple baselines.

An event is *detected* if a boundary lies within `window` steps of it; the first such
boundary of the sequence is then *matched*. Recall is the share of events detected, and
precision the share of boundaries matched, so with a window one boundary may detect two
events but counts once. With window 0 both are the usual ones. Counts are added up over
sequences before they are divided. Where there are no events nothing can be said (NaN).

Only numbers go in: which world, and which data, they come from does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from reverie.api import Metrics

Marks = Bool[np.ndarray, "N T"]

PERIODS = range(2, 11)
BINS = 10


class Match(NamedTuple):
    """Counts over all sequences."""

    events: int
    boundaries: int
    detected: int
    matched: int

    @property
    def recall(self) -> float:
        return self.detected / self.events if self.events else np.nan

    @property
    def precision(self) -> float:
        if not self.events:
            return np.nan
        return self.matched / self.boundaries if self.boundaries else 0.0

    @property
    def f1(self) -> float:
        recall, precision = self.recall, self.precision
        total = recall + precision
        return 2 * recall * precision / total if total > 0 else np.nan


def match(events: Marks, boundaries: Marks, window: int = 0) -> Match:
    """Compare marks of the same frames."""
    steps = events.shape[1]
    padded = np.pad(boundaries, [(0, 0), (window, window)])
    near = np.lib.stride_tricks.sliding_window_view(padded, 2 * window + 1, axis=1)
    detected = events & near.any(-1)
    first = np.arange(steps) + near.argmax(-1) - window
    rows, columns = np.nonzero(detected)
    matched = np.zeros_like(boundaries)
    matched[rows, first[rows, columns]] = True
    return Match(
        int(events.sum()),
        int(boundaries.sum()),
        int(detected.sum()),
        int(matched.sum()),
    )


def scores(events: Marks, boundaries: Marks) -> Metrics:
    """Precision, recall and F1, exact and within one frame."""
    found: Metrics = {}
    for name, window in (("exact", 0), ("near", 1)):
        counts = match(events, boundaries, window)
        found |= {
            f"{name}/precision": counts.precision,
            f"{name}/recall": counts.recall,
            f"{name}/f1": _or_zero(counts),
        }
    return found


def _or_zero(counts: Match) -> float:
    """F1 of a detector that is never right is zero, as long as there are events."""
    return 0.0 if counts.events and not counts.matched else counts.f1


def agreement(one: Marks, other: Marks) -> float:
    """Cohen's kappa of two detectors: 1 if they always agree, 0 if as by chance.

    It takes no events. Detectors that find a boundary always, or never, have nothing
    to agree about (0).
    """
    same, (a, b) = float((one == other).mean()), (one.mean(), other.mean())
    chance = float(a * b + (1 - a) * (1 - b))
    return (same - chance) / (1 - chance) if chance < 1 else 0.0


def segment_statistics(boundaries: Marks) -> Metrics:
    """How many segments a sequence has, and how long they are.

    The first frame begins one, whether it is marked or not. Only segments that end
    within their sequence have a length.
    """
    starts = boundaries.copy()
    starts[:, 0] = True
    counts = starts.sum(1)
    gaps = np.concatenate([np.diff(np.flatnonzero(row)) for row in starts])
    lengths = {"length": np.nan, "length_p5": np.nan, "length_p95": np.nan}
    if len(gaps):
        low, high = np.percentile(gaps, [5, 95])
        lengths = {"length": gaps.mean(), "length_p5": low, "length_p95": high}
    return {
        "count": counts.mean(),
        "rate": boundaries[:, 1:].mean(),
        **{key: float(value) for key, value in lengths.items()},
    }


def calibration(events: Marks, chance: Float[np.ndarray, "N T"]) -> Metrics:
    """Does a boundary of chance p happen p of the time?

    The Brier score is the mean squared error of the chances, and the calibration error
    the mean gap between chance and frequency over ten bins, weighed by their share. Of
    chances that are not numbers nothing can be said (NaN).
    """
    if np.isnan(chance).any():
        return dict.fromkeys(("brier", "error", "auc"), np.nan)
    bins = np.clip((chance * BINS).astype(int), 0, BINS - 1).ravel()
    count = np.bincount(bins, minlength=BINS)
    said = np.bincount(bins, chance.ravel(), BINS)
    happened = np.bincount(bins, events.ravel().astype(float), BINS)
    return {
        "brier": float(((chance - events) ** 2).mean()),
        "error": float(np.abs(said - happened).sum() / count.sum()),
        "auc": area(events, chance),
    }


def costs(events: Marks, boundaries: Marks, cost: Float[np.ndarray, "N T"]) -> Metrics:
    """Why are there boundaries, or none? What a frame costs, by what happens at it.

    Where `event` is hardly above `other`, the world gains nothing by a boundary there;
    `boundary` says what one costs.
    """
    groups = {
        "event": events & ~boundaries,
        "other": ~events & ~boundaries,
        "boundary": boundaries,
    }
    return {
        name: float(cost[group].mean()) if group.any() else float(np.nan)
        for name, group in groups.items()
    }


# Baselines


def baselines(
    events: Marks,
    change: Float[np.ndarray, "N T"],
    rate: float,
    threshold: float | None = None,
) -> Metrics:
    """F1 of detectors that know nothing, and of one that only looks at pixels.

    `periodic` is the best of all phases and of the periods up to ten; `rate` is that
    of the boundaries they are compared with, which `same_rate` imitates.
    """
    count, steps = events.shape
    found = {
        "all": scores(events, np.ones_like(events)),
        "none": scores(events, np.zeros_like(events)),
        "same_rate": scores(events, _at_rate(count, steps, rate)),
    }
    every = [
        scores(events, _every(count, steps, period, phase))
        for period in PERIODS
        for phase in range(period)
    ]
    found["periodic"] = max(every, key=lambda each: float(each["exact/f1"]))
    if threshold is not None:
        found["pixels"] = scores(events, change >= threshold)
    kept = ("exact/f1", "near/f1")
    return {f"{name}/{key}": each[key] for name, each in found.items() for key in kept}


def _every(count: int, steps: int, period: int, phase: int = 0) -> Marks:
    marks = np.zeros((count, steps), bool)
    marks[:, phase::period] = True
    return marks


def _at_rate(count: int, steps: int, rate: float) -> Marks:
    period = min(steps, max(1, round(1 / rate))) if rate > 0 else steps
    return _every(count, steps, period) & (rate > 0)


def frame_change(
    frames: np.ndarray,
) -> Float[np.ndarray, "*b T"]:
    """Mean absolute difference to the frame before, on a scale of 255; first zero."""
    frames = frames.astype(np.float32)
    change = np.zeros(frames.shape[:-3], np.float32)
    change[..., 1:] = np.abs(np.diff(frames, axis=-4)).mean((-3, -2, -1))
    return change


def peaks(change: Float[np.ndarray, "*b"], deviations: float) -> Bool[np.ndarray, "*b"]:
    """Where the picture changes by so many deviations more than it usually does."""
    found: np.ndarray = change >= change.mean() + deviations * change.std()
    return found


def best_threshold(events: Marks, change: Float[np.ndarray, "N T"]) -> float:
    """The threshold on pixels with the best exact F1 on these (training) sequences."""
    options = np.unique(np.quantile(change, np.linspace(0.02, 0.98, 49)))
    f1 = [_or_zero(match(events, change >= option)) for option in options]
    return float(options[int(np.argmax(f1))])


# One sequence against what might have happened by chance


def area(labels: Bool[np.ndarray, "*b"], values: Float[np.ndarray, "*b"]) -> float:
    """The chance that an event has the larger value (area under the ROC curve)."""
    labels, values = labels.ravel(), values.ravel()
    yes, no = int(labels.sum()), int((~labels).sum())
    if not yes or not no or np.isnan(values).any():
        return float(np.nan)
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    rank = (last - (count - 1) / 2)[inverse.ravel()]  # ties share their mean
    return float((rank[labels].sum() - yes * (yes + 1) / 2) / (yes * no))


def effect_size(
    values: Float[np.ndarray, " T"], boundaries: Bool[np.ndarray, " T"]
) -> float:
    """Cohen's d of a value at boundaries against elsewhere."""
    here, there = values[boundaries], values[~boundaries]
    if min(len(here), len(there)) < 2:
        return float(np.nan)
    spread = np.sqrt((here.var(ddof=1) + there.var(ddof=1)) / 2)
    return float((here.mean() - there.mean()) / spread) if spread else float(np.nan)


def event_rate(
    events: Bool[np.ndarray, " T"], boundaries: Bool[np.ndarray, " T"]
) -> float:
    """The share of boundaries at which there is an event."""
    return float(events[boundaries].mean()) if boundaries.any() else float(np.nan)


def periodic_rate(
    events: Bool[np.ndarray, " T"], boundaries: Bool[np.ndarray, " T"]
) -> float:
    """The same for as many boundaries at equal distances."""
    steps, count = len(events), int(boundaries.sum())
    if not count:
        return float(np.nan)
    places = np.arange(0, steps, max(1, round(steps / count)))[:count]
    return float(events[places].mean())


def permutation_test(
    events: Bool[np.ndarray, " T"],
    boundaries: Bool[np.ndarray, " T"],
    rng: np.random.Generator,
    draws: int = 200,
) -> tuple[float, float]:
    """The event rate at boundaries, and how often chance would do as well."""
    observed = event_rate(events, boundaries)
    count = int(boundaries.sum())
    if not count:
        return observed, float(np.nan)
    as_good = 0
    for _ in range(draws):
        places = rng.choice(len(events), count, replace=False)
        as_good += events[places].mean() >= observed
    return observed, (as_good + 1) / (draws + 1)
