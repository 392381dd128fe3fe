"""Plots of the numbers of one episode over time, one panel per key."""

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
    """Plot arrays `(T, ...)` of numbers; every entry of a vector is a line."""
    shown = dict(list(values.items())[:MAX_PANELS])
    if len(shown) < len(values):
        title += f" ({len(shown)} of {len(values)} keys)"
    figure, boxes = PANELS.figure(len(shown), title)
    for (key, array), box in zip(shown.items(), boxes, strict=True):
        _draw_panel(figure, box, key, array.reshape(len(array), -1))
    return figure.to_array()


def _draw_panel(figure: Figure, box: Box, key: str, lines: np.ndarray) -> None:
    shown = np.nan_to_num(lines[:, :MAX_LINES].astype(np.float64))
    if shown.shape[1] < lines.shape[1]:
        key += f" ({shown.shape[1]} of {lines.shape[1]} entries)"
    extent = (float(shown.min(initial=0)), float(shown.max(initial=0)))
    steps = (0.0, max(1.0, len(lines) - 1.0))
    to_x, to_y = figure.plot_axes(box, steps, extent, (6, 4), margin=0.05)
    figure.text((box.left, box.top - 6 * SCALE), key, 12, anchor="lb")
    for number, line in enumerate(shown.T):
        points = [(to_x(t), to_y(y)) for t, y in enumerate(line)]
        figure.line(points, COLORS[number % len(COLORS)], 3)
