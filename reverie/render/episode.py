"""Figures of one episode: scalars and vectors over time, and a grid of its frames."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt8

from reverie.render.figure import COLORS, SCALE, Box, Figure, PanelGrid

PANELS = PanelGrid(columns=2, width=480, height=200, margins=(64, 30, 16, 26))
MAX_PANELS = 24
"""Maximum number of keys that are drawn."""
MAX_LINES = 24
"""Maximum number of entries of a vector that are drawn."""


def draw_episode_curves(
    values: Mapping[str, np.ndarray], title: str = ""
) -> UInt8[np.ndarray, "h w 3"]:
    """Plot scalars and vectors `(T, ...)`; every entry of a vector is a line."""
    shown = dict(list(values.items())[:MAX_PANELS])
    if len(shown) < len(values):
        title += f" ({len(shown)} of {len(values)} keys)"
    figure, boxes = PANELS.figure(len(shown), title)
    for (key, array), box in zip(shown.items(), boxes, strict=True):
        _draw_panel(figure, box, key, array.reshape(len(array), -1))
    return figure.to_array()


def _draw_panel(figure: Figure, box: Box, key: str, lines: np.ndarray) -> None:
    """Plot the columns of `lines` over time."""
    shown = np.nan_to_num(lines[:, :MAX_LINES].astype(np.float64))
    if shown.shape[1] < lines.shape[1]:
        key += f" ({shown.shape[1]} of {lines.shape[1]} entries)"
    y_range = (float(shown.min(initial=0)), float(shown.max(initial=0)))
    steps = (0.0, max(1.0, len(lines) - 1.0))
    to_x, to_y = figure.plot_axes(box, steps, y_range, (6, 4), margin=0.05)
    figure.text((box.left, box.top - 6 * SCALE), key, 12, anchor="lb")
    for number, line in enumerate(shown.T):
        points = [(to_x(t), to_y(y)) for t, y in enumerate(line)]
        figure.line(points, COLORS[number % len(COLORS)], 3)


def contact_sheet(
    frames: UInt8[np.ndarray, "T h w c"],
    count: int = 24,
    columns: int = 8,
    gap: int = 4,
) -> UInt8[np.ndarray, "H W c"]:
    """Arrange up to `count` evenly spaced frames in rows, including first and last."""
    if not len(frames):
        raise ValueError("a contact sheet needs at least one frame")
    chosen = np.linspace(0, len(frames) - 1, min(count, len(frames))).round()
    frames = frames[chosen.astype(int)]
    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    _, height, width, channels = frames.shape
    shape = (rows * (height + gap) + gap, columns * (width + gap) + gap, channels)
    sheet = np.full(shape, 255, np.uint8)
    for number, frame in enumerate(frames):
        row, column = divmod(number, columns)
        top, left = gap + row * (height + gap), gap + column * (width + gap)
        sheet[top : top + height, left : left + width] = frame
    return sheet
