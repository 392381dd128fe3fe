"""Plots of rollout ensembles next to the truth, one panel per entry of a vector.

The truth is a dark line. From some of its rows, several sampled rollouts of a world
model are drawn as thin lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from reverie.render.figure import BLACK, COLORS, SCALE, Box, Figure, PanelGrid

PANELS = PanelGrid(columns=2, width=480, height=200, margins=(64, 30, 16, 26))
MAX_PANELS = 12
"""Maximum number of entries of the vector that are drawn."""
OPACITY = 70
"""Opacity of a rollout, from 0 to 255."""


class EnsembleLines(NamedTuple):
    """S rollouts of a vector of size d, for the rows after `start` (last observed)."""

    start: int
    rollouts: Float[np.ndarray, "S H d"]


def draw_ensembles(
    truth: Float[np.ndarray, "T d"],
    ensembles: Sequence[EnsembleLines],
    title: str = "",
) -> UInt8[np.ndarray, "h w 3"]:
    """Plot the ensembles of one episode."""
    figure, boxes = PANELS.figure(min(truth.shape[1], MAX_PANELS), title)
    for entry, box in enumerate(boxes):
        _draw_panel(figure, box, entry, truth, ensembles)
    return figure.to_array()


def _draw_panel(
    figure: Figure,
    box: Box,
    entry: int,
    truth: np.ndarray,
    ensembles: Sequence[EnsembleLines],
) -> None:
    values = truth[:, entry]
    rollouts = [item.rollouts[..., entry].reshape(-1) for item in ensembles]
    everything = np.concatenate([values, *rollouts])
    extent = (float(everything.min()), float(everything.max()))
    steps = (0.0, max(1.0, len(truth) - 1.0))
    to_x, to_y = figure.plot_axes(box, steps, extent, (6, 4), margin=0.05)
    figure.text((box.left, box.top - 6 * SCALE), f"[{entry}]", 12, anchor="lb")
    for number, (start, paths) in enumerate(ensembles):
        color = (*COLORS[number % 2], OPACITY)
        first = (to_x(start), to_y(values[start]))
        for path in paths[..., entry]:
            points = [(to_x(start + 1 + j), to_y(y)) for j, y in enumerate(path)]
            figure.line([first, *points], color)
    figure.line([(to_x(t), to_y(y)) for t, y in enumerate(values)], BLACK, 4)
