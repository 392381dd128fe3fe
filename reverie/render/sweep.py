"""A sweep as a picture: how values improved, and how they hang on each setting.

The first panel has a dot for every trial and a line for the best so far; each of the
others has one setting from left to right. Trials that were ended early are hollow, the
best one stands out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8

from reverie.render.axes import (
    AXIS,
    COLOURS,
    FAINT,
    GRID,
    INK,
    PAPER,
    SCALE,
    axis,
    font,
    label,
    ticks,
)

WIDTH, HEIGHT, ACROSS = 440, 320, 3
LEFT, RIGHT, TOP, BOTTOM, HEAD = 72, 20, 34, 44, 44
LABELS = 8
"""Choices that are named below an axis; of more than these not every one is."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels of the drawing."""


class Panel(NamedTuple):
    """What is drawn from left to right: numbers, or words in the order they come."""

    name: str
    places: Sequence[float | str]
    log: bool = False


def draw_sweep(
    values: Sequence[float],
    whole: Sequence[bool],
    panels: Sequence[Panel],
    goal: Literal["min", "max"],
    title: str = "",
) -> UInt8[np.ndarray, "h w 3"]:
    """One value per trial, in every panel; the first one has the best so far as well.

    `whole` says which trials were not ended early.
    """
    from PIL import Image, ImageDraw

    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    size = across * WIDTH * SCALE, (down * HEIGHT + HEAD) * SCALE
    image = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(image, "RGBA")
    draw.text((LEFT * SCALE, 16 * SCALE), title, INK, font(16), anchor="lt")
    best = _best_so_far(values, whole, goal)
    champion = list(values).index(best[-1]) if best and _real(best[-1]) else -1
    for index, panel in enumerate(panels):
        left = (index % across) * WIDTH * SCALE
        top = (index // across * HEIGHT + HEAD) * SCALE
        box = (
            left + LEFT * SCALE,
            top + TOP * SCALE,
            left + (WIDTH - RIGHT) * SCALE,
            top + (HEIGHT - BOTTOM) * SCALE,
        )
        line = best if index == 0 else []
        _draw_panel(draw, box, panel, values, whole, line, champion)
    small = image.resize((size[0] // SCALE, size[1] // SCALE), Image.Resampling.LANCZOS)
    return np.asarray(small, np.uint8)


def _best_so_far(
    values: Sequence[float], whole: Sequence[bool], goal: str
) -> list[float]:
    sign = 1 if goal == "min" else -1
    costs = [sign * v if w else math.inf for v, w in zip(values, whole, strict=True)]
    return [sign * cost for cost in np.minimum.accumulate(costs)] if costs else []


def _draw_panel(
    draw: Any,
    box: Box,
    panel: Panel,
    values: Sequence[float],
    whole: Sequence[bool],
    best: Sequence[float],
    champion: int,
) -> None:
    left, top, right, bottom = box
    low, high = (min(values), max(values)) if len(values) else (0.0, 1.0)
    margin = 0.08 * (high - low) or max(abs(high), 1.0) * 0.1
    to_y = axis(low - margin, high + margin, bottom, top)
    for tick in ticks(low - margin, high + margin, 5):
        draw.line((left, to_y(tick), right, to_y(tick)), fill=GRID, width=2)
        draw.text((left - 12, to_y(tick)), label(tick), FAINT, font(11), anchor="rm")
    draw.line((left, bottom, right, bottom), fill=AXIS, width=3)
    name = panel.name if len(panel.name) < 44 else "..." + panel.name[-41:]
    draw.text((left, top - 14), name, INK, font(12), anchor="lb")
    places = _draw_places(draw, box, panel)
    reached = [(x, to_y(b)) for x, b in zip(places, best, strict=False) if _real(b)]
    if len(reached) > 1:
        draw.line(_stairs(reached), fill=COLOURS[1], width=4)
    for index, (x, value) in enumerate(zip(places, values, strict=True)):
        chosen = index == champion
        radius = 10 if chosen else 8
        spot = (x - radius, to_y(value) - radius, x + radius, to_y(value) + radius)
        colour = COLOURS[1] if chosen else COLOURS[0]
        fill = (*colour, 190) if whole[index] else PAPER
        draw.ellipse(spot, fill=fill, outline=colour, width=3)


def _draw_places(draw: Any, box: Box, panel: Panel) -> list[float]:
    """Draw the ticks of a panel; where its dots stand from left to right."""
    left, _, right, bottom = box
    numbers = [x for x in panel.places if not isinstance(x, str)]
    marks: list[tuple[float, str]]
    if len(numbers) < len(panel.places) or not numbers:
        words = list(dict.fromkeys(str(place) for place in panel.places))
        to_x = axis(-0.5, len(words) - 0.5, left, right)
        every = math.ceil(len(words) / LABELS) if words else 1
        marks = [(to_x(i), w[:14]) for i, w in enumerate(words) if i % every == 0]
        places = [to_x(words.index(str(place))) for place in panel.places]
    else:
        scaled = [math.log10(x) for x in numbers] if panel.log else numbers
        low, high = min(scaled), max(scaled)
        margin = 0.06 * (high - low) or 0.5
        to_x = axis(low - margin, high + margin, left, right)
        if panel.log:
            found = _powers(low - margin, high + margin)
            marks = [(to_x(math.log10(x)), f"{x:g}") for x in found]
        else:
            found = ticks(low - margin, high + margin, 4)
            counted = all(x == int(x) for x in numbers)
            marks = [(to_x(x), label(x)) for x in found if x == int(x) or not counted]
        places = [to_x(x) for x in scaled]
    for x, text in marks:
        draw.line((x, bottom, x, bottom + 8), fill=AXIS, width=2)
        draw.text((x, bottom + 14), text, FAINT, font(11), anchor="mt")
    return places


def _powers(low: float, high: float) -> list[float]:
    """Round numbers with logarithms between the ends; at most a handful."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{d}e{e}") for e in exponents for d in digits]
        found = [x for x in found if low <= math.log10(x) <= high]
        if len(found) <= 5:
            return found
    return found[:: math.ceil(len(found) / 5)]


def _stairs(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same points, with level ground between them."""
    found = points[:1]
    for (_, before), (x, y) in pairwise(points):
        found += [(x, before), (x, y)]
    return found


def _real(value: float) -> bool:
    return math.isfinite(value)
