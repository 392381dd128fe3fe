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
    """Sampled rollouts of a vector that start at one row of an episode."""

    start: int
    """Last row that the world model has observed."""
    rollouts: Float[np.ndarray, "S H d"]
    """S samples of the next H rows."""


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
    """Draw one entry of the vector; neighboring ensembles have different colors."""
    values = truth[:, entry]
    rollouts = [item.rollouts[..., entry].reshape(-1) for item in ensembles]
    all_values = np.concatenate([values, *rollouts])
    y_range = (float(all_values.min()), float(all_values.max()))
    steps = (0.0, max(1.0, len(truth) - 1.0))
    to_x, to_y = figure.plot_axes(box, steps, y_range, (6, 4), margin=0.05)
    figure.text((box.left, box.top - 6 * SCALE), f"[{entry}]", 12, anchor="lb")
    for number, (start, samples) in enumerate(ensembles):
        color = (*COLORS[number % 2], OPACITY)
        first = (to_x(start), to_y(values[start]))
        for sample in samples[..., entry]:
            points = [(to_x(start + 1 + j), to_y(y)) for j, y in enumerate(sample)]
            figure.line([first, *points], color)
    figure.line([(to_x(t), to_y(y)) for t, y in enumerate(values)], BLACK, 4)
