"""Plots of a hyperparameter sweep: progress, and the effect of each parameter.

The first panel has a dot for every trial and a line for the best value so far; each of
the others has one parameter on the x axis. Trials that were stopped early are hollow,
and the best trial is highlighted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8

from reverie.render.figure import (
    BLACK,
    COLORS,
    WHITE,
    Box,
    Figure,
    PanelGrid,
    Point,
    format_tick,
    linear_axis,
    round_ticks,
    tick_labels,
    with_margin,
)

PANELS = PanelGrid(columns=3, width=440, height=320, margins=(72, 34, 20, 44))
MAX_LABELS = 8
"""Maximum number of labels of an axis with categories."""


class SweepAxis(NamedTuple):
    """x axis of a panel: a parameter (or trial number) and its value in each trial."""

    name: str
    values: Sequence[float | str]
    log: bool = False


def draw_sweep(
    results: Sequence[float],
    finished: Sequence[bool],
    panels: Sequence[SweepAxis],
    goal: Literal["min", "max"],
    title: str = "",
) -> UInt8[np.ndarray, "h w 3"]:
    """Plot the result of each trial over the trial number and each parameter.

    `finished` is False for trials that were stopped early. `panels[0]` has the trial
    number and also shows the best result so far; the other panels have parameters.
    """
    figure, boxes = PANELS.figure(len(panels), title)
    best = _best_so_far(results, finished, goal)
    best_trial = -1
    if best and math.isfinite(best[-1]):
        best_trial = list(results).index(best[-1])
    for number, (panel, box) in enumerate(zip(panels, boxes, strict=True)):
        line = best if number == 0 else []
        _draw_panel(figure, box, panel, results, finished, line, best_trial)
    return figure.to_array()


def _best_so_far(
    results: Sequence[float], finished: Sequence[bool], goal: str
) -> list[float]:
    """Return the best result of the finished trials up to each trial."""
    sign = 1 if goal == "min" else -1
    pairs = zip(results, finished, strict=True)
    costs = [sign * value if done else math.inf for value, done in pairs]
    return [sign * cost for cost in np.minimum.accumulate(costs)] if costs else []


def _draw_panel(
    figure: Figure,
    box: Box,
    panel: SweepAxis,
    results: Sequence[float],
    finished: Sequence[bool],
    best: Sequence[float],
    best_trial: int,
) -> None:
    """Draw a dot for each trial, and `best` as a line; `best_trial` is highlighted."""
    low, high = (min(results), max(results)) if len(results) else (0.0, 1.0)
    low, high = with_margin(low, high, 0.08)
    to_y = linear_axis(low, high, box.bottom, box.top)
    xs, x_ticks = _x_axis(box, panel)
    figure.axes(box, x_ticks, tick_labels(round_ticks(low, high, 5), to_y))
    name = panel.name if len(panel.name) < 44 else "..." + panel.name[-41:]
    figure.text((box.left, box.top - 14), name, 12, BLACK, "lb")
    points = [(x, to_y(b)) for x, b in zip(xs, best, strict=False) if math.isfinite(b)]
    if len(points) > 1:
        figure.line(_staircase(points), COLORS[1], 4)
    for trial, (x, result) in enumerate(zip(xs, results, strict=True)):
        is_best = trial == best_trial
        radius, y = 10 if is_best else 8, to_y(result)
        color = COLORS[1] if is_best else COLORS[0]
        fill = (*color, 190) if finished[trial] else WHITE
        dot = (x - radius, y - radius, x + radius, y + radius)
        figure.draw.ellipse(dot, fill=fill, outline=color, width=3)


def _x_axis(box: Box, panel: SweepAxis) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the x coordinate of each trial, and the ticks."""
    numbers = [x for x in panel.values if not isinstance(x, str)]
    if len(numbers) < len(panel.values) or not numbers:
        names = list(dict.fromkeys(str(value) for value in panel.values))
        to_x = linear_axis(-0.5, len(names) - 0.5, box.left, box.right)
        stride = math.ceil(len(names) / MAX_LABELS) if names else 1
        ticks = [(to_x(i), n[:14]) for i, n in enumerate(names) if i % stride == 0]
        return [to_x(names.index(str(value))) for value in panel.values], ticks
    scaled = [math.log10(x) for x in numbers] if panel.log else numbers
    low, high = min(scaled), max(scaled)
    margin = 0.06 * (high - low) or 0.5
    low, high = low - margin, high + margin
    to_x = linear_axis(low, high, box.left, box.right)
    if panel.log:
        ticks = [(to_x(math.log10(x)), f"{x:g}") for x in _log_ticks(low, high)]
    else:
        all_integers = all(x == int(x) for x in numbers)
        values = round_ticks(low, high, 4)
        ticks = [
            (to_x(x), format_tick(x)) for x in values if x == int(x) or not all_integers
        ]
    return [to_x(x) for x in scaled], ticks


def _log_ticks(low: float, high: float) -> list[float]:
    """Return at most five round numbers between 10**low and 10**high."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{d}e{e}") for e in exponents for d in digits]
        ticks = [x for x in ticks if low <= math.log10(x) <= high]
        if len(ticks) <= 5:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 5)]


def _staircase(points: list[Point]) -> list[Point]:
    """Connect points with horizontal and vertical lines."""
    result = points[:1]
    for (_, previous_y), (x, y) in pairwise(points):
        result += [(x, previous_y), (x, y)]
    return result
