"""Figures with axes, drawn with Pillow; shared by all plots.

Coordinates are pixels at `SCALE` times the final size: figures are drawn larger and
scaled down at the end, for smooth lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

SCALE = 2
"""Factor by which figures are drawn larger."""

WHITE, GRID, AXIS = (255, 255, 255), (232, 234, 237), (154, 160, 166)
BLACK, GRAY = (32, 33, 36), (95, 99, 104)
COLORS = [  # distinguishable with color blindness (Okabe and Ito)
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
]

Point = tuple[float, float]
ToPixel = Callable[[float], float]
"""Maps a value on an axis to its pixel."""


class Box(NamedTuple):
    """The plot area of a panel."""

    left: float
    top: float
    right: float
    bottom: float


class Figure:
    """A white image to draw on."""

    def __init__(self, width: int, height: int):
        from PIL import Image, ImageDraw

        self.width, self.height = width, height
        self.image = Image.new("RGB", (width * SCALE, height * SCALE), WHITE)
        self.draw: Any = ImageDraw.Draw(self.image, "RGBA")

    def text(
        self,
        point: Point,
        text: str,
        size: int = 14,
        color: tuple[int, ...] = GRAY,
        anchor: str = "lt",
    ) -> None:
        """Draw text; `anchor` is a text anchor of Pillow: `lt` is the top left."""
        self.draw.text(point, text, color, font(size), anchor=anchor)

    def line(
        self, points: Sequence[Point], color: tuple[int, ...], width: int = 2
    ) -> None:
        """Draw a line through two or more points."""
        self.draw.line(points, fill=color, width=width, joint="curve")

    def axes(
        self,
        box: Box,
        x_ticks: Sequence[tuple[float, str]],
        y_ticks: Sequence[tuple[float, str]],
        size: int = 11,
    ) -> None:
        """Draw axes with ticks, given as (pixel, label), and horizontal grid lines."""
        for y, text in y_ticks:
            self.line([(box.left, y), (box.right, y)], GRID)
            self.text((box.left - 14, y), text, size, anchor="rm")
        for x, text in x_ticks:
            self.line([(x, box.bottom), (x, box.bottom + 8)], AXIS)
            self.text((x, box.bottom + 14), text, size, anchor="mt")
        self.line([(box.left, box.bottom), (box.right, box.bottom)], AXIS, 3)

    def plot_axes(
        self,
        box: Box,
        x_range: Point,
        y_range: Point,
        counts: tuple[int, int],
        margin: float,
        size: int = 11,
    ) -> tuple[ToPixel, ToPixel]:
        """Draw linear axes with about `counts` ticks; return their `ToPixel` functions.

        `margin` extends the y axis by a fraction of its range on both sides.
        """
        y_range = with_margin(*y_range, margin)
        to_x = linear_axis(*x_range, box.left, box.right)
        to_y = linear_axis(*y_range, box.bottom, box.top)
        x_ticks = tick_labels(round_ticks(*x_range, counts[0]), to_x)
        y_ticks = tick_labels(round_ticks(*y_range, counts[1]), to_y)
        self.axes(box, x_ticks, y_ticks, size)
        return to_x, to_y

    def to_array(self) -> UInt8[np.ndarray, "h w 3"]:
        """Return the image at its final size."""
        from PIL import Image

        size = (self.width, self.height)
        return np.asarray(self.image.resize(size, Image.Resampling.LANCZOS), np.uint8)


class PanelGrid(NamedTuple):
    """Size and margins of panels in a grid, in pixels of the final image."""

    columns: int
    width: int
    height: int
    margins: tuple[int, int, int, int]  # left, top, right, bottom
    title_height: int = 44

    def figure(self, count: int, title: str) -> tuple[Figure, Iterator[Box]]:
        """Return a figure for this many panels, and their plot areas."""
        columns = min(self.columns, count)
        rows = math.ceil(count / columns)
        figure = Figure(columns * self.width, rows * self.height + self.title_height)
        corner = (self.margins[0] * SCALE, 15 * SCALE)
        figure.text(corner, title, 16, BLACK)
        return figure, (self._box(*divmod(i, columns)) for i in range(count))

    def _box(self, row: int, column: int) -> Box:
        """Return the plot area of a panel."""
        x, y = column * self.width, row * self.height + self.title_height
        left, top, right, bottom = self.margins
        return Box(
            (x + left) * SCALE,
            (y + top) * SCALE,
            (x + self.width - right) * SCALE,
            (y + self.height - bottom) * SCALE,
        )


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` values in a range: multiples of 1, 2 or 5 times 10**n."""
    # tolerances for rounding errors: 0.999 and 1e-9
    min_step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= min_step * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def with_margin(low: float, high: float, fraction: float) -> tuple[float, float]:
    """Extend a range on both sides by a fraction of it; the result is not empty."""
    margin = fraction * (high - low) or max(abs(high), 1.0) * 0.1
    return low - margin, high + margin


def linear_axis(low: float, high: float, start: float, end: float) -> ToPixel:
    """Return the function from values in [low, high] to pixels in [start, end]."""
    span = (high - low) or 1.0
    return lambda value: start + (float(value) - low) / span * (end - start)


def tick_labels(ticks: Sequence[float], to_pixel: ToPixel) -> list[tuple[float, str]]:
    """Return pixel and label of each tick."""
    return [(to_pixel(tick), format_tick(tick)) for tick in ticks]


def format_tick(value: float) -> str:
    """Format briefly: 1500000 -> 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def font(size: int) -> Any:
    """Return the font whose size in the final image is `size` pixels."""
    from PIL import ImageFont

    return ImageFont.load_default(size * SCALE)
