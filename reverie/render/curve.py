"""Learning curves, drawn with Pillow.

Each run is a line, the mean over a window of episodes, with a band of two standard
errors of that mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from reverie.api import UserError
from reverie.render.figure import (
    BLACK,
    COLORS,
    GRID,
    SCALE,
    WHITE,
    Box,
    Figure,
    font,
    format_tick,
)
from reverie.render.video import write_image
from reverie.storage.limits import InvalidFile, open_regular

WIDTH, HEIGHT = 960, 560
"""Size of the figure in pixels."""
BOX = Box(84 * SCALE, 64 * SCALE, (WIDTH - 28) * SCALE, (HEIGHT - 64) * SCALE)
"""Plot area."""

Curve = Sequence[tuple[float, float]]
"""(x, score) of each episode; in scores of runs, x counts simulator frames."""

BandedLine = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Values of x and y, and the lower and upper bound of the band."""


def write_curve(
    path: Path | str,
    runs: Mapping[str, Path | str],
    title: str = "",
    key: str = "episode/score",
) -> Path:
    """Plot the scores of run folders as a PNG; the keys of `runs` are the labels."""
    curves = {name: read_scores(Path(run), key) for name, run in runs.items()}
    return write_image(path, draw_curves(curves, title))


def read_scores(run: Path, key: str = "episode/score") -> list[tuple[float, float]]:
    """Read frame and score of each episode from a run folder or a `scores.jsonl`."""
    path = run / "scores.jsonl" if run.is_dir() else run
    if not path.exists():
        raise UserError(
            f"{path} does not exist, so there are no scores to draw.\n"
            "  Fix: give a run folder in which at least one episode has ended."
        )
    points = []
    try:
        with open_regular(path) as file:
            text = file.read().decode(errors="replace")
    except (OSError, InvalidFile) as error:
        raise UserError(
            f"{path} cannot be read ({error}).\n  Fix: give the folder of a run."
        ) from None
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get(key) is not None:
                points.append((float(entry["step"]), float(entry[key])))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            continue  # damaged, or the last line while the run is writing it
    return points


def draw_curves(
    curves: Mapping[str, Curve],
    title: str = "",
    x_label: str = "frames",
    y_label: str = "score",
    smooth: bool = True,
) -> UInt8[np.ndarray, "h w 3"]:
    """Plot one or several runs, by default smoothed."""
    lines = {
        name: _to_line(curve, smooth) for name, curve in curves.items() if len(curve)
    }
    return draw_lines(lines, title, x_label, y_label)


def draw_lines(
    lines: Mapping[str, BandedLine],
    title: str = "",
    x_label: str = "frames",
    y_label: str = "score",
) -> UInt8[np.ndarray, "h w 3"]:
    """Plot lines with their bands."""
    x_range, y_range = _ranges(lines)
    figure = Figure(WIDTH, HEIGHT)
    to_x, to_y = figure.plot_axes(BOX, x_range, y_range, (8, 6), 0.04, size=14)
    figure.text((BOX.left, 30), title, 18, BLACK)
    figure.text((BOX.left - 20, BOX.top - 52), y_label, anchor="rt")
    figure.text((BOX.right, BOX.bottom + 62), x_label, anchor="rt")
    colors = COLORS * (1 + len(lines) // len(COLORS))
    for (steps, _, low, high), color in zip(lines.values(), colors, strict=False):
        xs = [to_x(step) for step in steps]
        band = [*zip(xs, map(to_y, high), strict=True)]
        band += reversed([*zip(xs, map(to_y, low), strict=True)])
        if len(xs) > 1:
            figure.draw.polygon(band, fill=(*color, 48))
    for (steps, mean, *_), color in zip(lines.values(), colors, strict=False):
        points = [(to_x(x), to_y(y)) for x, y in zip(steps, mean, strict=True)]
        if len(points) > 1:
            figure.line(points, color, 5)
        x, y = points[-1]
        dot = (x - 8, y - 8, x + 8, y + 8)
        figure.draw.ellipse(dot, fill=color, outline=WHITE, width=3)
    if lines:
        _draw_legend(figure, lines, colors)
    else:
        center = (WIDTH * SCALE / 2, HEIGHT * SCALE / 2)
        figure.text(center, "no episode has ended yet", 18, anchor="mm")
    return figure.to_array()


def _to_line(curve: Curve, smooth: bool, points: int = 200) -> BandedLine:
    """Return mean and band of a window of episodes around each of up to 200 points."""
    steps, scores = np.array(sorted(curve, key=lambda point: point[0])).T
    count = len(scores)
    # episodes on each side of the center; a window has about 5 % of all episodes
    half = max(1, count // 40) if smooth and count > 4 else 0
    centers = np.unique(np.linspace(0, count - 1, min(points, count)).round())
    rows = []
    for center in centers.astype(int):
        window = scores[max(0, center - half) : center + half + 1]
        mean, error = window.mean(), 2 * window.std() / math.sqrt(len(window))
        rows.append((steps[center], mean, mean - error, mean + error))
    x, mean, low, high = np.array(rows).T
    return x, mean, low, high


def _ranges(lines: Mapping[str, BandedLine]) -> tuple[tuple[float, float], ...]:
    """Return the ranges of the x and y axes that contain all lines and bands."""
    if not lines:
        return (0.0, 1.0), (0.0, 1.0)
    last = max(float(steps[-1]) for steps, *_ in lines.values())
    low = min(float(low.min()) for _, _, low, _ in lines.values())
    high = max(float(high.max()) for _, _, _, high in lines.values())
    return (0.0, last or 1.0), (low, high)


def _draw_legend(
    figure: Figure, lines: Mapping[str, BandedLine], colors: Sequence[tuple[int, ...]]
) -> None:
    """Draw names and last values in the upper left, sorted by value."""
    rows = [
        (float(mean[-1]), name, color)
        for (name, (_, mean, *_)), color in zip(lines.items(), colors, strict=False)
    ]
    rows.sort(key=lambda row: -row[0])
    texts = [f"{name}:  {format_tick(round(score, 4))}" for score, name, _ in rows]
    width = max(figure.draw.textlength(text, font(14)) for text in texts) + 72
    left, top, row_height = BOX.left + 14 * SCALE, BOX.top + 8 * SCALE, 22 * SCALE
    area = (left, top, left + width, top + row_height * len(rows) + 16)
    figure.draw.rounded_rectangle(
        area, 10, fill=(255, 255, 255, 225), outline=GRID, width=2
    )
    for i, (text, (_, _, color)) in enumerate(zip(texts, rows, strict=True)):
        y = top + 8 + row_height * (i + 0.5)
        figure.line([(left + 14, y), (left + 44, y)], color, 6)
        figure.text((left + 56, y), text, 14, BLACK, "lm")
