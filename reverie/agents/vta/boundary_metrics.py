"""Metrics of predicted boundaries against ground-truth events, and simple baselines.

An event and a boundary can be matched if they are at most `tolerance` frames apart;
the largest one-to-one matching is used. Recall is the fraction of matched events,
precision the fraction of matched boundaries. Counts are summed over all sequences
before they are divided. Without events, scores are NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from reverie.api import Metrics

FrameMask = Bool[np.ndarray, "N T"]
"""True for the frames with an event or a boundary."""

PERIODS = range(2, 11)
"""Periods of the periodic baseline, in frames."""
BINS = 10
"""Bins of the calibration error."""


class MatchCounts(NamedTuple):
    """Number of events, boundaries and matches in all sequences."""

    events: int
    boundaries: int
    matched: int
    """Pairs of an event and a boundary."""

    @property
    def recall(self) -> float:
        return self.matched / self.events if self.events else np.nan

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


def match(events: FrameMask, boundaries: FrameMask, tolerance: int = 0) -> MatchCounts:
    """Match events and boundaries of the same sequences one to one; return counts.

    All events have the same tolerance, so matching each event, in order, with the
    earliest boundary that is still free gives the largest number of pairs.
    """
    free = boundaries.copy()
    matched = 0
    for frame in np.flatnonzero(events.any(0)):
        first = max(0, frame - tolerance)
        near = free[:, first : frame + tolerance + 1]
        rows = np.flatnonzero(events[:, frame] & near.any(1))
        free[rows, first + near[rows].argmax(1)] = False
        matched += len(rows)
    return MatchCounts(int(events.sum()), int(boundaries.sum()), matched)


def scores(events: FrameMask, boundaries: FrameMask) -> Metrics:
    """Return precision, recall and F1: exact, and with a tolerance of one frame."""
    metrics: Metrics = {}
    for name, tolerance in (("exact", 0), ("near", 1)):
        counts = match(events, boundaries, tolerance)
        metrics |= {
            f"{name}/precision": counts.precision,
            f"{name}/recall": counts.recall,
            f"{name}/f1": _f1_or_zero(counts),
        }
    return metrics


def _f1_or_zero(counts: MatchCounts) -> float:
    """Return F1, with 0 instead of NaN if there are events but no matches."""
    return 0.0 if counts.events and not counts.matched else counts.f1


def cohens_kappa(first: FrameMask, second: FrameMask) -> float:
    """Return Cohen's kappa of two detectors: 1 for agreement, 0 for chance agreement.

    No events are needed. The result is 0 if both detectors mark all frames, or none.
    """
    agreement = float((first == second).mean())
    rate1, rate2 = first.mean(), second.mean()
    chance = float(rate1 * rate2 + (1 - rate1) * (1 - rate2))
    return (agreement - chance) / (1 - chance) if chance < 1 else 0.0


def segment_statistics(boundaries: FrameMask) -> Metrics:
    """Return the number and length of segments per sequence, and the boundary rate.

    The first frame always begins a segment. Lengths do not include the last segment of
    a sequence, whose end is unknown.
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


def calibration(events: FrameMask, probs: Float[np.ndarray, "N T"]) -> Metrics:
    """Return Brier score, expected calibration error and ROC AUC of probabilities.

    The expected calibration error (`error`) is the mean absolute difference between
    probability and frequency over ten bins, weighted by the size of the bins. All
    values are NaN if a probability is NaN.
    """
    if np.isnan(probs).any():
        return dict.fromkeys(("brier", "error", "auc"), np.nan)
    bins = np.clip((probs * BINS).astype(int), 0, BINS - 1).ravel()
    count = np.bincount(bins, minlength=BINS)
    predicted = np.bincount(bins, probs.ravel(), BINS)
    observed = np.bincount(bins, events.ravel().astype(float), BINS)
    return {
        "brier": float(((probs - events) ** 2).mean()),
        "error": float(np.abs(predicted - observed).sum() / count.sum()),
        "auc": roc_auc(events, probs),
    }


def mean_losses(
    events: FrameMask, boundaries: FrameMask, loss: Float[np.ndarray, "N T"]
) -> Metrics:
    """Return the mean loss at boundaries, at missed events, and at other frames.

    If the loss at missed events (`event`) is hardly higher than at other frames
    (`other`), the model gains nothing from a boundary there.
    """
    groups = {
        "event": events & ~boundaries,
        "other": ~events & ~boundaries,
        "boundary": boundaries,
    }
    return {
        name: float(loss[group].mean()) if group.any() else float(np.nan)
        for name, group in groups.items()
    }


def roc_auc(labels: Bool[np.ndarray, "*b"], values: Float[np.ndarray, "*b"]) -> float:
    """Return the area under the ROC curve; NaN if a class or a value is missing."""
    labels, values = labels.ravel(), values.ravel()
    positive, negative = int(labels.sum()), int((~labels).sum())
    if not positive or not negative or np.isnan(values).any():
        return float(np.nan)
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(count)
    rank = (last_rank - (count - 1) / 2)[inverse.ravel()]  # ties share their mean rank
    # Mann-Whitney U: number of pairs in which the positive has the higher value
    wins = rank[labels].sum() - positive * (positive + 1) / 2
    return float(wins / (positive * negative))


# Baselines


def baselines(
    events: FrameMask,
    change: Float[np.ndarray, "N T"],
    rate: float,
    threshold: float | None = None,
) -> Metrics:
    """Return F1 of trivial detectors, and of a threshold on pixel changes.

    `periodic` is the best of all periods up to ten frames and all their phases;
    `same_rate` is periodic with the boundary rate of the evaluated model, `rate`.
    """
    count, steps = events.shape
    results = {
        "all": scores(events, np.ones_like(events)),
        "none": scores(events, np.zeros_like(events)),
        "same_rate": scores(events, _periodic_with_rate(count, steps, rate)),
    }
    periodic = [
        scores(events, _periodic(count, steps, period, phase))
        for period in PERIODS
        for phase in range(period)
    ]
    results["periodic"] = max(periodic, key=lambda each: float(each["exact/f1"]))
    if threshold is not None:
        results["pixels"] = scores(events, change >= threshold)
    keys = ("exact/f1", "near/f1")
    return {f"{name}/{key}": x[key] for name, x in results.items() for key in keys}


def _periodic(count: int, steps: int, period: int, phase: int = 0) -> FrameMask:
    """Return boundaries at every `period`-th frame from `phase`, for all sequences."""
    marks = np.zeros((count, steps), bool)
    marks[:, phase::period] = True
    return marks


def _periodic_with_rate(count: int, steps: int, rate: float) -> FrameMask:
    """Return periodic boundaries with about this rate; none if the rate is 0."""
    period = min(steps, max(1, round(1 / rate))) if rate > 0 else steps
    return _periodic(count, steps, period) & (rate > 0)


def frame_change(frames: np.ndarray) -> Float[np.ndarray, "*b T"]:
    """Return the mean absolute pixel difference to the previous frame, from 0 to 255.

    It is zero for the first frame.
    """
    frames = frames.astype(np.float32)
    change = np.zeros(frames.shape[:-3], np.float32)
    change[..., 1:] = np.abs(np.diff(frames, axis=-4)).mean((-3, -2, -1))
    return change


def best_threshold(events: FrameMask, change: Float[np.ndarray, "N T"]) -> float:
    """Return the threshold on pixel changes with the best exact F1."""
    quantiles = np.linspace(0.02, 0.98, 49)
    thresholds = np.unique(np.quantile(change, quantiles))
    f1 = [_f1_or_zero(match(events, change >= x)) for x in thresholds]
    return float(thresholds[int(np.argmax(f1))])
