"""Learning curves as pictures, with nothing but Pillow.

Each run is a line, the mean of a window of episodes, on a band of two standard errors
of that mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from reverie.api import UserError
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
from reverie.render.video import write_image

WIDTH, HEIGHT = 960, 560
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 64, 64

Curve = Sequence[tuple[float, float]]
"""(step, score) of one episode after the other."""


def write_curve(
    path: Path | str,
    runs: Mapping[str, Path | str],
    title: str = "",
    key: str = "episode/score",
) -> Path:
    """Draw the scores of run folders, by the name each has in the legend, as a PNG."""
    curves = {name: read_scores(Path(run), key) for name, run in runs.items()}
    return write_image(path, draw_curves(curves, title))


def read_scores(run: Path, key: str = "episode/score") -> list[tuple[float, float]]:
    """Step and score of each episode in a run folder, or in a `scores.jsonl` itself."""
    path = run / "scores.jsonl" if run.is_dir() else run
    if not path.exists():
        raise UserError(
            f"{path} does not exist, so there are no scores to draw.\n"
            "  Fix: name a run folder in which at least one episode ended"
        )
    points = []
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that is being written
        if isinstance(entry, dict) and entry.get(key) is not None:
            points.append((float(entry["step"]), float(entry[key])))
    return points


def draw_curves(
    curves: Mapping[str, Curve],
    title: str = "",
    x_label: str = "environment steps",
    y_label: str = "score",
    smooth: bool = True,
) -> UInt8[np.ndarray, "h w 3"]:
    """The picture of one or several runs; points stay as they are, unless `smooth`."""
    drawn = {name: curve for name, curve in curves.items() if len(curve)}
    lines = {name: _smooth(curve, smooth) for name, curve in drawn.items()}
    return draw_lines(lines, title, x_label, y_label)


Line = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Steps, what is drawn as a line over them, and the band around it: low, high."""


def draw_lines(
    lines: Mapping[str, Line],
    title: str = "",
    x_label: str = "environment steps",
    y_label: str = "score",
) -> UInt8[np.ndarray, "h w 3"]:
    """The picture of lines, each on a band of its own."""
    from PIL import Image, ImageDraw

    x_range, y_range = _ranges(lines)
    x_ticks = ticks(*x_range, count=8)
    y_ticks = ticks(*y_range, count=6)
    y_range = min(y_range[0], y_ticks[0]), max(y_range[1], y_ticks[-1])

    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
    draw = ImageDraw.Draw(image, "RGBA")
    to_x = axis(*x_range, LEFT * SCALE, (WIDTH - RIGHT) * SCALE)
    to_y = axis(*y_range, (HEIGHT - BOTTOM) * SCALE, TOP * SCALE)
    _draw_axes(draw, x_ticks, y_ticks, to_x, to_y)
    _draw_words(draw, title, x_label, y_label)
    for (steps, _, low, high), colour in zip(lines.values(), _colours(), strict=False):
        xs = [to_x(step) for step in steps]
        band = [*zip(xs, map(to_y, high), strict=True)]
        band += reversed([*zip(xs, map(to_y, low), strict=True)])
        if len(xs) > 1:
            draw.polygon(band, fill=(*colour, 48))
    for (steps, mean, *_), colour in zip(lines.values(), _colours(), strict=False):
        points = [(to_x(x), to_y(y)) for x, y in zip(steps, mean, strict=True)]
        if len(points) > 1:
            draw.line(points, fill=colour, width=5, joint="curve")
        x, y = points[-1]
        draw.ellipse((x - 8, y - 8, x + 8, y + 8), fill=colour, outline=PAPER, width=3)
    if lines:
        _draw_legend(draw, lines)
    else:
        middle = (WIDTH * SCALE / 2, HEIGHT * SCALE / 2)
        draw.text(middle, "no episode has ended yet", FAINT, font(18), anchor="mm")
    small = image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    return np.asarray(small, np.uint8)


def _smooth(curve: Curve, smooth: bool, points: int = 200) -> Line:
    """Steps, mean, and the band around it, over windows of episodes or of one each."""
    steps, scores = np.array(sorted(curve, key=lambda point: point[0])).T
    count = len(scores)
    half = max(1, count // 40) if smooth and count > 4 else 0
    centres = np.unique(np.linspace(0, count - 1, min(points, count)).round())
    rows = []
    for centre in centres.astype(int):
        window = scores[max(0, centre - half) : centre + half + 1]
        mean, error = window.mean(), 2 * window.std() / math.sqrt(len(window))
        rows.append((steps[centre], mean, mean - error, mean + error))
    x, line, low, high = np.array(rows).T
    return x, line, low, high


def _ranges(lines: Mapping[str, Line]) -> tuple[tuple[float, float], ...]:
    if not lines:
        return (0.0, 1.0), (0.0, 1.0)
    last = max(float(steps[-1]) for steps, *_ in lines.values())
    low = min(float(low.min()) for _, _, low, _ in lines.values())
    high = max(float(high.max()) for _, _, _, high in lines.values())
    margin = 0.04 * (high - low) or max(abs(high), 1.0) * 0.1
    return (0.0, last or 1.0), (low - margin, high + margin)


def _colours() -> list[tuple[int, int, int]]:
    return COLOURS * 20


def _draw_axes(
    draw: Any, x_ticks: list[float], y_ticks: list[float], to_x: Any, to_y: Any
) -> None:
    left, right = LEFT * SCALE, (WIDTH - RIGHT) * SCALE
    bottom = (HEIGHT - BOTTOM) * SCALE
    for tick in y_ticks:
        y = to_y(tick)
        draw.line((left, y, right, y), fill=GRID, width=2)
        draw.text((left - 20, y), label(tick), FAINT, font(14), anchor="rm")
    for tick in x_ticks:
        x = to_x(tick)
        draw.line((x, bottom, x, bottom + 10), fill=AXIS, width=2)
        draw.text((x, bottom + 18), label(tick), FAINT, font(14), anchor="mt")
    draw.line((left, bottom, right, bottom), fill=AXIS, width=3)


def _draw_words(draw: Any, title: str, x_label: str, y_label: str) -> None:
    left, right = LEFT * SCALE, (WIDTH - RIGHT) * SCALE
    top, bottom = TOP * SCALE, (HEIGHT - BOTTOM) * SCALE
    draw.text((left, 30), title, INK, font(18), anchor="lt")
    draw.text((left - 20, top - 52), y_label, FAINT, font(14), anchor="rt")
    draw.text((right, bottom + 62), x_label, FAINT, font(14), anchor="rt")


def _draw_legend(draw: Any, lines: Mapping[str, Line]) -> None:
    """Names and last means in the upper left, ordered from best to worst."""
    rows = [
        (float(mean[-1]), name, colour)
        for (name, (_, mean, *_)), colour in zip(
            lines.items(), _colours(), strict=False
        )
    ]
    rows.sort(key=lambda row: -row[0])
    words = font(14)
    texts = [f"{name}:  {label(round(score, 4))}" for score, name, _ in rows]
    width = max(draw.textlength(text, words) for text in texts) + 72
    left, top, pitch = (LEFT + 14) * SCALE, (TOP + 8) * SCALE, 22 * SCALE
    box = (left, top, left + width, top + pitch * len(rows) + 16)
    draw.rounded_rectangle(box, 10, fill=(255, 255, 255, 225), outline=GRID, width=2)
    for index, (text, (_, _, colour)) in enumerate(zip(texts, rows, strict=True)):
        y = top + 8 + pitch * (index + 0.5)
        draw.line((left + 14, y, left + 44, y), fill=colour, width=6)
        draw.text((left + 56, y), text, INK, words, anchor="lm")
