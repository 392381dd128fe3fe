"""What may come, many times over, beside what came: one panel per entry of a vector.

The truth is a dark line. From some of its rows a fan opens: every thread is one way in
which a world thinks things may go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

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

PANEL_WIDTH, PANEL_HEIGHT = 480, 200
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 30, 26
HEAD = 44
PANELS = 12
"""Entries that are drawn; a vector may have more."""
THREAD = 70
"""How opaque a thread is, of 255."""


class Fan(NamedTuple):
    """Guesses for the rows after `start`, the last row that was seen."""

    start: int
    threads: Float[np.ndarray, "S H d"]


def draw_fans(
    truth: Float[np.ndarray, "T d"], fans: Sequence[Fan], title: str = ""
) -> UInt8[np.ndarray, "h w 3"]:
    """The picture of one episode."""
    from PIL import Image, ImageDraw

    count = min(truth.shape[1], PANELS)
    columns = 1 if count == 1 else 2
    rows = math.ceil(count / columns)
    width, height = columns * PANEL_WIDTH, HEAD + rows * PANEL_HEIGHT
    image = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
    draw = ImageDraw.Draw(image, "RGBA")
    draw.text((LEFT * SCALE, 14 * SCALE), title, INK, font(16), anchor="lt")
    for entry in range(count):
        row, column = divmod(entry, columns)
        corner = (column * PANEL_WIDTH, HEAD + row * PANEL_HEIGHT)
        _draw_panel(draw, corner, entry, truth, fans)
    small = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(small, np.uint8)


def _draw_panel(
    draw: Any,
    corner: tuple[int, int],
    entry: int,
    truth: np.ndarray,
    fans: Sequence[Fan],
) -> None:
    line = truth[:, entry]
    threads = [fan.threads[..., entry].reshape(-1) for fan in fans]
    seen = np.concatenate([line, *threads])
    low, high = float(seen.min()), float(seen.max())
    margin = 0.05 * (high - low) or max(abs(high), 1.0) * 0.1
    low, high = low - margin, high + margin

    left, right = (corner[0] + LEFT) * SCALE, (corner[0] + PANEL_WIDTH - RIGHT) * SCALE
    top, bottom = (corner[1] + TOP) * SCALE, (corner[1] + PANEL_HEIGHT - BOTTOM) * SCALE
    to_x = axis(0, max(1, len(truth) - 1), left, right)
    to_y = axis(low, high, bottom, top)
    for tick in ticks(low, high, 4):
        draw.line((left, to_y(tick), right, to_y(tick)), fill=GRID, width=2)
        x, y = left - 8 * SCALE, to_y(tick)
        draw.text((x, y), label(tick), FAINT, font(11), anchor="rm")
    for tick in ticks(0, max(1, len(truth) - 1), 6):
        below = (to_x(tick), bottom + 6 * SCALE)
        draw.text(below, label(tick), FAINT, font(11), anchor="mt")
    draw.line((left, bottom, right, bottom), fill=AXIS, width=2)
    draw.text((left, top - 6 * SCALE), f"[{entry}]", FAINT, font(12), anchor="lb")

    for number, (start, paths) in enumerate(fans):
        colour = (*COLOURS[number % 2], THREAD)
        begin = (to_x(start), to_y(line[start]))
        for path in paths[..., entry]:
            ahead = [(to_x(start + 1 + j), to_y(y)) for j, y in enumerate(path)]
            draw.line([begin, *ahead], fill=colour, width=2)
    points = [(to_x(t), to_y(y)) for t, y in enumerate(line)]
    draw.line(points, fill=INK, width=4, joint="curve")
